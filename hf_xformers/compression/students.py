# SPDX-License-Identifier: Apache-2.0
"""The student before it learns: layers of its teacher, random weights, or a saved model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from ..configuration_xformer import XFormerConfig
from ..conversion.swap import swap_components
from ..conversion.swap_config import swapped_config
from ..conversion.transfer import carry_generation, our_head_of
from ..core.sharing import part_owners, shares_parts
from ..core.specs import did_you_mean
from ..finetuning.loading import has_head, load_model, open_config, saved_config_with
from ..training.building import with_changes
from ..training.presets import size_fields
from ..variants import config_class, family, resolve
from .geometry import own_layers, tower_fields
from .layer_maps import copied

FROM_TEACHER, FROM_SCRATCH = "teacher", "scratch"
_SHAPES = (FROM_TEACHER, FROM_SCRATCH)
_NOT_OURS = ("model_type", "transformers_version", "architectures", "dtype", "quantization_config")
# What a student of another family takes over, so that it reads and says the same.
_MEANING = (
    *("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "mask_token_id"),
    *("decoder_start_token_id", "id2label", "label2id", "problem_type", "is_decoder", "is_encoder_decoder"),
)
_SAME = (
    *_MEANING,
    *("max_position_embeddings", "type_vocab_size", "tie_word_embeddings", "tag_decoder", "classifier_pooling"),
)
_LAYER = re.compile(r"^(.*?\b(trunk|decoder)\.layers\.)(\d+)\.(.*)$")


@dataclass
class StudentChoice:
    """What the student is made of.

    Args:
        start: 'teacher' (its layers), 'scratch' (its shape with random weights), a variant (random weights), or a
            folder of a saved model.
        copy_layers: which of the teacher's layers.
        size: of a variant.
        components, fields: what of the configuration is changed.
    """

    start: str = FROM_TEACHER
    copy_layers: str = "alternate"
    size: str | None = None
    components: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Student:
    """The model, and how it came about, in words; of a saved one its folder, and its tokenizer once it is read."""

    model: PreTrainedModel
    made: str
    folder: str | None = None
    tokenizer: Any = None


def build_student(teacher: PreTrainedModel, choice: StudentChoice, seed: int) -> Student:
    """The student of a teacher with the same head. The teacher stays as it is.

    Raises:
        ValueError: layers, fields or components that do not fit, a folder without a model, another vocabulary.
    """
    _check_fields(cast(XFormerConfig, teacher.config), choice)
    student = _started(teacher, choice, seed)
    if student.folder is None:  # a saved model has settings of its own
        carry_generation(teacher, student.model)
    return student


def _started(teacher: PreTrainedModel, choice: StudentChoice, seed: int) -> Student:
    if choice.start in _SHAPES:
        if choice.size is not None:
            raise ValueError(
                "--size is of a student of another variant, and this one has the teacher's shape; give its sizes as"
                " --student.hidden_size and the like, or name a variant with --student"
            )
        return _in_teachers_shape(teacher, choice, seed)
    if Path(choice.start).expanduser().is_dir():
        return _saved(teacher, choice)
    try:
        variant = resolve(choice.start)
    except ValueError as error:
        raise ValueError(
            f"--student {choice.start!r} is neither 'teacher', 'scratch', a folder, nor a variant ({error}); give one"
            " of these"
        ) from error
    return _of_variant(teacher, variant, choice, seed)


def _check_fields(config: XFormerConfig, choice: StudentChoice) -> None:
    """Refuses fields that there are not, or that decide what is read and said, and layers that nothing is copied
    from."""
    if choice.start != FROM_TEACHER and choice.copy_layers != StudentChoice.copy_layers:
        raise ValueError(
            f"--copy_layers {choice.copy_layers} names layers of the teacher, and --student {choice.start!r} starts"
            " from none of them; leave it out, or take --student teacher"
        )
    known = {item.name for item in dataclasses.fields(config)}
    for name in choice.fields:
        if name in (*_MEANING, "num_labels"):
            raise ValueError(
                f"--student.{name} would make the student read or say something else than its teacher; leave it out"
            )
        if name not in known and choice.start in _SHAPES:
            raise ValueError(
                f"there is no --student.{name}.{did_you_mean(name, known)} Give fields of the configuration, such as"
                " --student.num_hidden_layers, or components"
            )


# ------------------------------------------------------------------------------------------------ three ways


def _in_teachers_shape(teacher: PreTrainedModel, choice: StudentChoice, seed: int) -> Student:
    before = cast(XFormerConfig, teacher.config)
    config, kept = reduced_config(before, choice, [len(tower.layers) for tower in _towers(teacher)])
    head = our_head_of(teacher)
    if choice.start == FROM_SCRATCH:
        if choice.components:
            config = swapped_config(config, dict(choice.components))
        model = _fresh(config, head, seed)
        return Student(model, f"random weights, {_shape(config)}")
    model = _fresh(config, head, seed)
    used = set(copy_tensors(teacher, model, kept))
    if choice.components:
        model, _ = swap_components(model, measure=False, seed=seed, **dict(choice.components))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}  # tied ones once
    share = sum(size for name, size in sizes.items() if name in used) / sum(sizes.values())
    numbers = kept.get("trunk", [])
    layers = f"layer{'s' if len(numbers) != 1 else ''} {', '.join(map(str, numbers))}"
    changed = "".join(f", {slot} {_name(value)}" for slot, value in choice.components.items())
    return Student(
        model,
        f"{layers} of the teacher{changed}, {share:.0%} of the numbers copied, {_shape(model.config)}",
    )


def reduced_config(
    before: XFormerConfig, choice: StudentChoice, modules: Sequence[int]
) -> tuple[XFormerConfig, dict[str, list[int]]]:
    """The teacher's configuration with the student's fields, and the teacher's layers of each tower that are copied.
    Without another word the student has half the layers. modules: of each tower, how many layers with parameters of
    their own it has."""
    fields = dict(choice.fields)
    towers = ["trunk", "decoder"] if before.is_encoder_decoder else ["trunk"]
    names = {"trunk": "num_hidden_layers", "decoder": "num_decoder_layers"}
    kept: dict[str, list[int]] = {}
    for tower, view, built in zip(towers, before.tower_configs(), modules):
        depth = view.num_hidden_layers
        listed = "," in choice.copy_layers or choice.copy_layers.isdecimal()
        usual = len(choice.copy_layers.split(",")) if listed else max(1, (depth + 1) // 2)
        wanted = fields.get(names[tower])
        count = int(usual if wanted is None else wanted)
        fields[names[tower]] = count
        if choice.start == FROM_SCRATCH:
            kept[tower] = []
            continue
        shared = built != depth  # by several steps
        named = copied(choice.copy_layers, min(count, depth) if shared else count, depth)
        kept[tower] = list(range(built)) if shared else named
    values = {name: value for name, value in before.to_dict().items() if name not in _NOT_OURS}
    for tower in towers:
        decodes = tower == "decoder"
        own = own_layers(before, decodes)
        if own and (decodes or "per_layer_config" not in fields):
            order = kept[tower] or list(range(fields[names[tower]]))
            left = {new: own[old] for new, old in enumerate(order) if old in own}
            values |= tower_fields(before, decodes, {"per_layer_config": left or None})
    if before.layer_map is not None and not {"layer_map", "distinct_layers"} & fields.keys():
        steps = copied(choice.copy_layers, fields["num_hidden_layers"], before.num_hidden_layers)
        used = sorted({before.layer_map[step] for step in steps})
        values["layer_map"] = [used.index(before.layer_map[step]) for step in steps]
        if kept["trunk"]:
            kept["trunk"] = steps if shares_parts(before) else used
    wider = "hidden_size" in fields and fields["hidden_size"] != before.hidden_size
    if wider and "intermediate_size" not in fields and isinstance(values.get("intermediate_size"), int):
        ratio = values["intermediate_size"] / before.hidden_size
        fields["intermediate_size"] = max(8, round(fields["hidden_size"] * ratio / 8) * 8)
    return type(before)(**{**values, **fields}), kept


def copy_tensors(teacher: PreTrainedModel, student: PreTrainedModel, kept: Mapping[str, list[int]]) -> list[str]:
    """Copies what has the same name and shape, layers by `kept` (the student's i-th is the teacher's kept[i]); the
    names of what was copied."""
    source, used = teacher.state_dict(), []
    owners = {name: part_owners(view) for name, view in zip(("trunk", "decoder"), teacher.config.tower_configs())}
    with torch.no_grad():
        for name, tensor in student.state_dict().items():
            found = _LAYER.match(name)
            old = name
            if found is not None:
                numbers = kept.get(found[2], [])
                if int(found[3]) >= len(numbers):
                    continue
                number = numbers[int(found[3])]
                old = f"{found[1]}{number}.{found[4]}"
                if old not in source and owners[found[2]]:  # a part that it borrows from another layer
                    old = f"{found[1]}{owners[found[2]][number]}.{found[4]}"
            if old in source and source[old].shape == tensor.shape:
                tensor.copy_(source[old])
                used.append(name)
    return used


def _of_variant(teacher: PreTrainedModel, variant: str, choice: StudentChoice, seed: int) -> Student:
    before, cls, head = cast(XFormerConfig, teacher.config), config_class(variant), our_head_of(teacher)
    if head not in cls.heads:
        raise ValueError(
            f"variant {variant!r} has no {head} class, which the teacher is; take another variant for --student"
        )
    known = set(cls.__dataclass_fields__)
    taught = before.to_dict()
    values: dict[str, Any] = {}
    if choice.size is not None:
        values |= size_fields(cls, choice.size, two_towers=before.is_encoder_decoder)
    else:
        sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        values |= {name: taught[name] for name in sizes if isinstance(taught.get(name), int)}
    values |= {name: taught[name] for name in _SAME if name in taught}
    values = {name: value for name, value in values.items() if name in known or name in ("id2label", "label2id")}
    for key in ("problem_type", "pad_token_id", "bos_token_id", "eos_token_id"):
        if taught.get(key) is not None:
            values[key] = taught[key]
    config = cls(**{**values, **with_changes(cls, choice.components, choice.fields)})
    return Student(_fresh(config, head, seed), f"random weights of {variant}, {_shape(config)}")


def _saved(teacher: PreTrainedModel, choice: StudentChoice) -> Student:
    if choice.components or choice.fields or choice.size is not None:
        raise ValueError(
            f"--student {choice.start!r} is a saved model, whose weights belong to its own shape; leave"
            " --student.FIELD and --size out"
        )
    head = our_head_of(teacher).removeprefix("For")
    config: Any = open_config(choice.start)
    taught: Any = teacher.config
    if not isinstance(config, XFormerConfig):
        raise ValueError(
            f"--student {choice.start!r} is a {config.model_type!r} of transformers; convert it first with"
            " `hf-xformers convert`"
        )
    kept = has_head(config, head)
    labels: dict[str, Any] = {} if head.endswith("LM") else {"id2label": taught.id2label, "label2id": taught.label2id}
    if labels and getattr(taught, "problem_type", None):
        labels["problem_type"] = taught.problem_type
    same = kept and (not labels or config.id2label == taught.id2label)
    config = saved_config_with(config, head, {}, {}, labels)
    model, _ = load_model(choice.start, config, head, has_head=kept, new_head=kept and not same)
    return Student(model, f"the saved model {choice.start!r}, {_shape(config)}", choice.start)


# ------------------------------------------------------------------------------------------------ helpers


def _towers(model: Any) -> list[Any]:
    base = model.model if hasattr(model, "model") else model
    return [tower for tower in (base.trunk, base.decoder) if tower is not None]


def _fresh(config: XFormerConfig, head: str, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return family(config.model_type)[head](config).eval()


def _name(component: Any) -> str:
    return str(component.get("type", component)) if isinstance(component, Mapping) else str(component)


def _shape(config: Any) -> str:
    count = config.num_hidden_layers
    return f"{count} layer{'s' if count != 1 else ''} of width {config.hidden_size}"


def refuse_other_vocabulary(student: Any, teacher: Any, names: tuple[str, str]) -> None:
    """Refuses tokenizers whose ids mean other tokens: rows are given to both models.

    student, teacher: tokenizers. names: folders or Hub ids.

    Raises:
        ValueError: they differ; the message names a token.
    """
    own, theirs = student.get_vocab(), teacher.get_vocab()
    if own == theirs:
        return
    odd = next(iter(sorted(token for token in {**own, **theirs} if own.get(token) != theirs.get(token))), "")
    raise ValueError(
        f"the student {names[0]!r} has another vocabulary than the teacher {names[1]!r} ({len(own)} and {len(theirs)}"
        f" tokens; {odd!r} is {own.get(odd)} in the one and {theirs.get(odd)} in the other), so that one row cannot be"
        " given to both; take a student with the teacher's tokenizer (--student teacher or scratch, or pretrained with"
        f" --tokenizer {names[1]}), or, where texts are classified, compare these predictions alone (--store_teacher"
        " --method distilbert --method.cosine_weight 0)"
    )

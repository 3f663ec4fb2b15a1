# SPDX-License-Identifier: Apache-2.0
"""The card of one checkpoint: what it is, how it was trained, how good it is, how to load it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..compat import shared_setting
from ..core.head_names import HEADS
from ..core.saved_files import read_object, refuse_damaged_weights, weight_files
from .adapter_card import Adapter, read_adapter
from .card_metadata import IMPORT, TASKS, head_of, hub_task, metric_names, own_imports, widget
from .checkpoint_files import BOTTLENECK, CONFIG, MARK, MODEL, PEFT, Kind, kind_of
from .compression_card import compression_sections
from .model_card import _component_table, _table
from .origin_card import origin_of
from .training_record import TrainingRecord, read_record


@dataclass
class CardFacts:
    """What the folder does not say.

    Args:
        license: an id of the Hub's list, e.g. "apache-2.0".
        language: codes such as "en".
        base_model, datasets: ids on the Hub; by default those that the record of the training names.
    """

    license: str | None = None
    language: list[str] = field(default_factory=list)
    base_model: str | None = None
    datasets: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)


def checkpoint_card(
    folder: str | Path, repo_id: str, *, self_contained: bool = False, facts: CardFacts | None = None
) -> ModelCard:
    """The card of a checkpoint or adapter folder as it will be in the repository `repo_id`.

    self_contained: the code goes with it. Figures come from the run's `training_summary.json`, or from Trainer's
    `all_results.json` and `trainer_state.json`. Local paths are never named.

    Raises:
        ValueError: the folder is no checkpoint.
    """
    folder, facts = Path(folder).expanduser(), facts or CardFacts()
    kind, record = kind_of(folder), read_record(folder)
    if kind == MODEL:
        about = _About.of_model(folder)
    else:
        about = _About.of_adapter(folder, kind, facts.base_model)
    name = repo_id.rpartition("/")[2]
    base = facts.base_model or (about.adapter and about.adapter.base) or about.base_model or record.base_model
    datasets = facts.datasets or record.datasets
    results = _results(record, about, datasets)
    more: dict[str, Any] = {"base_model_relation": "adapter"} if base and kind != MODEL else {}
    example = widget(folder, about.head, record.task) if about.modality == "text" else None
    if example is not None:
        more["widget"] = example
    task = about.task(record.task)
    searched = [task] if task and task != about.pipeline else []
    data = ModelCardData(
        language=facts.language or record.languages or None,
        license=facts.license,
        library_name={MODEL: "transformers", PEFT: "peft", BOTTLENECK: "hf_xformers"}[kind],
        pipeline_tag=about.pipeline,
        tags=list(dict.fromkeys(["hf_xformers", *about.tags, *searched, *facts.tags])),
        base_model=base,
        datasets=datasets or None,
        metrics=metric_names(record.scores),
        model_name=name if results else None,
        eval_results=results or None,
        **more,
    )
    parts = [f"---\n{data.to_yaml()}\n---", f"# {name}", about.summary, *about.sections]
    if record.facts:
        parts += ["## Training", _table([{"": key, " ": _figure(value)} for key, value in record.facts.items()])]
    if record.scores:
        parts += ["## Evaluation", *_evaluation(record)]
    parts += ["## Use", about.use(repo_id, self_contained, _reader(folder)), *about.citation, MARK]
    return ModelCard("\n\n".join(parts) + "\n")


@dataclass
class _About:
    """What config and weights say."""

    summary: str
    head: str = "Model"
    modality: str = "text"
    tags: list[str] = field(default_factory=list)
    sections: list[str] = field(default_factory=list)
    citation: list[str] = field(default_factory=list)
    adapter: Adapter | None = None
    base_model: str | None = None
    imports: list[str] = field(default_factory=list)

    @property
    def auto(self) -> str:
        return HEADS[self.head]

    @property
    def pipeline(self) -> str | None:
        if self.modality != "image":
            return TASKS.get(self.head)
        image_tasks = {"Model": "image-feature-extraction", "ForImageClassification": "image-classification"}
        return image_tasks.get(self.head)

    def task(self, trained: str | None) -> str | None:
        """The Hub's name of what it does. trained: the task that it was fine-tuned for."""
        return self.pipeline if self.modality == "image" else hub_task(self.head, trained)

    @classmethod
    def of_model(cls, folder: Path) -> _About:
        from ..configuration_xformer import XFormerConfig

        config = _config(folder)
        architecture = _architecture(config)
        head = head_of(architecture)
        if not isinstance(config, XFormerConfig):
            return cls(f"`{architecture}` of transformers.", head, tags=[config.model_type])
        info, origin = config.info, origin_of(folder, config, architecture)
        rows = [{"": name, " ": _figure(value)} for name, value in _geometry(config, folder).items()]
        papers = "\n\n".join([*(entry.citation for entry in origin.infos), *origin.citations])
        return cls(
            origin.summary or f"`{architecture}`: the Transformer with {info.summary} ([{info.paper}]({info.url})).",
            head,
            "image" if config.reads_colors == "only" else config.modality,
            [config.model_type],
            [*origin.sections, *compression_sections(folder), "## Model", _table(rows), _component_table(config)],
            ["## Citation", f"```bibtex\n{papers}\n```"],
            base_model=origin.base,
            imports=[IMPORT, *own_imports(folder), ""],
        )

    @classmethod
    def of_adapter(cls, folder: Path, kind: Kind, base_model: str | None) -> _About:
        adapter = read_adapter(folder, kind, base_model)
        of = f" of `{adapter.base}`" if adapter.base else ""
        if kind == PEFT:
            summary, tags = f"An adapter{of} ({adapter.method}, PEFT).", [adapter.method]
        else:
            summary = f"A bottleneck adapter{of} ({adapter.method}) for `{adapter.architecture}`."
            tags = ["bottleneck-adapter", *([adapter.model_type] if adapter.model_type else [])]
        return cls(summary, adapter.head, tags=tags, adapter=adapter)

    def use(self, repo_id: str, self_contained: bool, reader: tuple[str, str] | None) -> str:
        """A code block that loads it from the Hub, with what makes its inputs: (Auto class, name)."""
        if self.adapter is not None:
            lines = self.adapter.use(repo_id)
        else:
            made = [(self.auto, "model")] if reader is None else [reader, (self.auto, "model")]
            trust = ", trust_remote_code=True" if self_contained else ""
            ours = [] if self_contained else self.imports
            lines = [f"from transformers import {', '.join(sorted(auto for auto, _ in made))}", "", *ours]
            lines += [f'{name} = {auto}.from_pretrained("{repo_id}"{trust})' for auto, name in made]
        return "```python\n" + "\n".join(lines) + "\n```"


def _reader(folder: Path) -> tuple[str, str] | None:
    if (folder / "tokenizer_config.json").is_file():
        return "AutoTokenizer", "tokenizer"
    return ("AutoImageProcessor", "processor") if (folder / "preprocessor_config.json").is_file() else None


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    read_object(folder / CONFIG)
    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, TypeError, OSError, KeyError) as error:
        first = str(error).strip().splitlines()
        raise ValueError(
            f"{str(folder / CONFIG)!r} cannot be read: {first[0] if first else type(error).__name__}"
        ) from error


def _architecture(config: Any) -> str:
    named = config.architectures[0] if config.architectures else None
    return named or type(config).__name__.removesuffix("Config") + "Model"


def _geometry(config: Any, folder: Path) -> dict[str, Any]:
    found = {
        "variant": f"`{config.model_type}`",
        "parameters": _parameters(folder),
        "layers": shared_setting(config, "num_hidden_layers"),
        "decoder layers": config.num_decoder_layers if config.is_encoder_decoder else None,
        "width": shared_setting(config, "hidden_size"),
        "heads": shared_setting(config, "num_attention_heads"),
        "feed-forward width": shared_setting(config, "intermediate_size"),
        "vocabulary": config.vocab_size if config.modality == "text" else None,
        "longest input (tokens)": config.max_position_embeddings if config.modality == "text" else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def _parameters(folder: Path) -> int | None:
    """The numbers that the weight files hold, from their headers."""
    import math

    from safetensors import safe_open

    refuse_damaged_weights(folder)
    total = 0
    for path in weight_files(folder):
        with safe_open(path, framework="np") as file:
            total += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())
    return total or None


def _evaluation(record: TrainingRecord) -> list[str]:
    """A table of the scores, next to their baselines where these are known, and what the baseline is."""
    told = {} if record.f1_name is None else {"f1": record.f1_name}
    rows = [
        {"split": split, "metric": told.get(metric, metric), "value": _figure(value)}
        for (split, metric), value in record.scores.items()
    ]
    if not any(key in record.baselines for key in record.scores):
        return [_table(rows)]
    for row, key in zip(rows, record.scores):
        row["baseline"] = _figure(record.baselines[key]) if key in record.baselines else ""
    rule = f": {record.baseline_rule}" if record.baseline_rule else " (the frequencies of what it predicts)"
    return [_table(rows), f"*The baseline is what can be said without the model{rule}.*"]


def _results(record: TrainingRecord, about: _About, datasets: list[str]) -> list[EvalResult]:
    """The scores as the Hub's model-index wants them; those of several datasets belong to none of them alone."""
    dataset = datasets[0] if len(datasets) == 1 and len(record.data) <= 1 else None
    name = ", ".join(record.data) or "held-out data"
    return [
        EvalResult(
            task_type=about.task(record.task) or "other",
            dataset_type=dataset or "custom",
            dataset_name=name,
            dataset_split=split,
            metric_type=metric,
            metric_value=round(value, 6),
            verified=False,
        )
        for (split, metric), value in record.scores.items()
    ]


def _figure(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"

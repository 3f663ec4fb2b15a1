"""Uses the components that CONTRIBUTING.md has as examples: `python -m tests.contributing_examples FOLDER`.

FOLDER holds their files, by room. This is a process of its own because what registers itself stays registered. It
prints `NAME works` for each example that does, and writes to stderr what is wrong with the others.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import traceback
import types
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

import hf_xformers.variants
from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM, XFormerForSeq2SeqLM
from hf_xformers.core.components import SLOTS
from tests.conformance.tiny_configs import VOCAB
from tests.helpers import NO_DROPOUT, close, gradients, make_strong, pad, tokens

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    **NO_DROPOUT,
}
MODELS = {"encoder": XFormerForMaskedLM, "decoder": XFormerForCausalLM}


def refused(word: str, build) -> str:
    """What `build()` says when it refuses; it has to name `word`."""
    try:
        build()
    except ValueError as error:
        assert word in str(error), error
        return str(error)
    raise AssertionError(f"{word} was accepted")


def made(model_class, **fields):
    torch.manual_seed(0)
    return make_strong(model_class(XFormerConfig(**{**SIZES, **fields})).double().eval())


def saved_and_loaded(model, folder: Path):
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.float64).eval()


def generates_as_it_reads(model) -> None:
    """With a cache and without one, padded on the left as well."""
    ids, mask = pad([tokens(9), tokens(6, seed=1)], 9, "left")
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(**given), model.generate(**given, use_cache=False))


def attention(folder: Path) -> None:
    importlib.import_module("hf_xformers.variants.distance_decay")
    assert "xf_distance_decay" in hf_xformers.variants.model_types()
    own = {"type": "distance_decay", "slope": 0.3}
    config = AutoConfig.for_model("xf_distance_decay", **SIZES, attention=own)
    torch.manual_seed(0)
    model = make_strong(AutoModelForCausalLM.from_config(config).double().eval())
    ids = tokens(2, 9)
    literal = model(ids, use_cache=False, output_attentions=True)
    close(model(ids, use_cache=False).logits, literal.logits)
    weights = literal.attentions[0]
    close(weights.sum(-1), torch.ones(2, 2, 9, dtype=torch.float64))
    assert weights.triu(1).abs().max() == 0
    flat = made(XFormerForCausalLM, attention={"type": "distance_decay", "slope": 0}, position="none")
    dense = made(XFormerForCausalLM, attention="dense", position="none")
    close(flat(ids).logits, dense(ids).logits)
    generates_as_it_reads(model)
    model.save_pretrained(folder / "saved_attention")
    again = AutoModelForCausalLM.from_pretrained(folder / "saved_attention", dtype=torch.float64)
    close(again(ids).logits, model(ids).logits)
    assert again.config.attention.slope == 0.3
    encoder = make_strong(AutoModelForMaskedLM.from_config(config).double().eval())
    for side in ("left", "right"):
        padded, mask = pad(list(ids), 12, side, seed=4)
        close(encoder(padded, attention_mask=mask).logits[mask.bool()].view(2, 9, -1), encoder(ids).logits)
    refused("slope", lambda: AutoConfig.for_model("xf_distance_decay", attention={**own, "slope": -1}))


# What an attention wants beside it.
COMPANY = {"conditional": {"stack": "conditional_computation"}}


def position(folder: Path) -> None:
    """In every attention that accepts biases it does what T5's table does when that holds the same numbers, whether it
    says that it is `relative` or not."""
    module = importlib.import_module("hf_xformers.position.log_distance")
    assert {name for name in vars(module.LogDistance) if name[0] != "_"} == {"initialize", "score_bias", "block"}
    tried, wrong = 0, []
    for name in SLOTS["attention"]:
        spec = SLOTS["attention"].get(name)
        for shape in [
            shape for shape, can in (("encoder", spec.bidirectional), ("decoder", "causal" not in spec.why_not)) if can
        ]:
            if name == "axial_transformer" and shape == "decoder":
                continue  # which needs a stack of its own
            fields = {"attention": name, "is_decoder": shape == "decoder", **COMPANY.get(name, {})}
            if "score_bias" not in spec.acts:
                refused("log_distance", lambda: XFormerConfig(**{**SIZES, **fields}, position="log_distance"))
                continue
            for relative in (False, True):
                module.LogDistance.relative = relative
                tried += 1
                try:
                    equals_a_table(fields, shape)
                except Exception as error:
                    traceback.print_exc()
                    wrong.append(f"{name} {shape} relative={relative}: {type(error).__name__}")
    assert tried > 20 and not wrong, wrong
    module.LogDistance.relative = False
    model, ids = made(XFormerForMaskedLM, position={"type": "log_distance", "slope": 0.5}), tokens(2, 9)
    close(saved_and_loaded(model, folder / "saved_position")(ids).logits, model(ids).logits)


def equals_a_table(fields: dict, shape: str) -> None:
    buckets, length = 64, 14  # single distances up to 15 in an encoder and up to 31 in a decoder
    model = made(MODELS[shape], **fields, position="log_distance")
    name, slope = next(entry for entry in model.named_parameters() if entry[0].endswith("position.slope"))
    distances = torch.arange(buckets, dtype=torch.float64)
    if shape == "encoder":
        distances = distances % (buckets // 2)
    position = {"type": "t5_relative_bias", "num_buckets": buckets, "max_distance": 128}
    other = made(MODELS[shape], **fields, position=position)
    weights = model.state_dict()
    del weights[name]
    weights[name.replace("slope", "table.weight")] = -torch.log1p(distances)[:, None] * slope.detach()
    other.load_state_dict(weights)
    ids = tokens(2, length)
    padded, mask = pad(list(ids), length + 1, "left", seed=5)
    output = model(ids, use_cache=False).logits
    close(output, other(ids, use_cache=False).logits)
    assert gradients(model, output)[name].any()
    with torch.no_grad():
        given = {"input_ids": padded, "attention_mask": mask, "use_cache": False}
        close(model(**given).logits[mask.bool()], other(**given).logits[mask.bool()])
    if shape == "decoder":
        generates_as_it_reads(model)


def stack(folder: Path) -> None:
    ids = tokens(2, 9)
    repeated = {"type": "repeated", "rounds": 2}
    for model_class in MODELS.values():  # the same weights, written out as the layers of a deeper model
        model = made(model_class, stack=repeated)
        deeper = made(model_class, num_hidden_layers=4)
        weights = model.state_dict()
        for key in list(weights):
            for layer in (0, 1):
                if f".layers.{layer}." in key:
                    weights[key.replace(f".layers.{layer}.", f".layers.{layer + 2}.")] = weights[key]
        deeper.load_state_dict(weights)
        close(model(ids).logits, deeper(ids).logits)
        assert len(model(ids, output_hidden_states=True).hidden_states) == 5
    generates_as_it_reads(model)
    close(saved_and_loaded(model, folder / "saved_stack")(ids).logits, model(ids).logits)
    both = made(XFormerForSeq2SeqLM, stack=repeated, decoder_start_token_id=1)
    assert both(input_ids=ids, decoder_input_ids=ids).logits.shape == (2, 9, VOCAB)
    plain = gradients(model.train(), model(ids, use_cache=False).logits)
    model.gradient_checkpointing_enable()
    for name, gradient in gradients(model, model(ids, use_cache=False).logits).items():
        close(gradient, plain[name])
    refused("rounds", lambda: XFormerConfig(**SIZES, stack={"type": "repeated", "rounds": 0}))


def objective(folder: Path) -> None:
    from hf_xformers.cli import main
    from hf_xformers.data import train_tokenizer
    from hf_xformers.objectives import build_objective
    from hf_xformers.training.building import objectives_for

    assert "last_tokens" in objectives_for(XFormerConfig)
    tokenizer = train_tokenizer(["the quick brown fox jumps over the lazy dog"] * 5, kind="wordpiece", vocab_size=250)
    collator = build_objective({"type": "last_tokens", "fraction": 0.5}).collator(tokenizer)
    rows = [[7, 8, 9, 10], [11, 12]]
    for side in ("right", "left"):
        collator.padding_side = side
        batch = collator([{"input_ids": row} for row in rows])
        masked, none = tokenizer.mask_token_id, -100
        for index, (given, labels) in enumerate(
            [([7, 8, masked, masked], [none, none, 9, 10]), ([11, masked], [none, 12])]
        ):
            real = batch["attention_mask"][index].bool()
            assert batch["input_ids"][index][real].tolist() == given
            assert batch["labels"][index][real].tolist() == labels
            assert (batch["labels"][index][~real] == none).all()
    refused("fraction", lambda: build_objective({"type": "last_tokens", "fraction": 1.5}))
    text = folder / "text.txt"
    text.write_text("\n".join(f"line {number} of a text that says little, and says it again" for number in range(400)))
    options = "pretrain --variant bert --objective last_tokens --objective.fraction 0.5 --size tiny --max_steps 2"
    more = "--hidden_size 16 --num_attention_heads 2 --intermediate_size 32 --block_size 32 --use_cpu true"
    code = main([*options.split(), *more.split(), "--data", str(text), "--output_dir", str(folder / "run")])
    assert code in (None, 0), code
    assert (folder / "run" / "config.json").is_file()


def stateful_attention(folder: Path) -> None:
    model = made(XFormerForCausalLM, attention="gated_mean", num_key_value_heads=1, is_decoder=True)
    generates_as_it_reads(model)
    ids = tokens(2, 9)
    close(saved_and_loaded(model, folder / "saved_state")(ids).logits, model(ids).logits)
    changed = ids.clone()
    changed[:, 6:] = tokens(2, 3, seed=7)
    close(model(changed).logits[:, :6], model(ids).logits[:, :6])
    for side in ("left", "right"):
        padded, mask = pad(list(ids), 12, side, seed=4)
        close(model(padded, attention_mask=mask).logits[mask.bool()].view(2, 9, -1), model(ids).logits)
    layer, states = model.model.trunk.layers[0].attention, torch.randn(1, 7, 16, dtype=torch.float64)
    query, key, value = layer.projected_heads(states)
    weight, expected = torch.log1p(key.exp()), torch.zeros_like(query)
    for place in range(7):  # the equation; both heads read the one of keys and values
        seen = weight[:, :, : place + 1]
        mean = (seen * value[:, :, : place + 1]).sum(2) / seen.sum(2)
        expected[:, :, place] = mean / (1 + (-query[:, :, place]).exp())
    call = types.SimpleNamespace(query_padding_mask=None, unpadding=None)
    close(layer(states, call).output, layer.o_proj(expected.transpose(1, 2).flatten(2)))
    searched = {"num_beams": 3, "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(ids, **searched), model.generate(ids, **searched, use_cache=False))
    refused("gated_mean", lambda: XFormerConfig(**SIZES, attention="gated_mean", position="rotary", is_decoder=True))


def head(folder: Path) -> None:
    model = made(XFormerForMaskedLM, head={"type": "learned_scale", "start": 3.0})
    plain, ids = made(XFormerForMaskedLM, head="linear"), tokens(2, 9)
    weights = model.state_dict()
    scale = weights.pop("lm_head.log_scale")
    assert abs(scale.item() - math.log(3)) < 1  # as it starts, and the noise that all parameters have here
    plain.load_state_dict(weights)
    close(model(ids).logits, plain(ids).logits * scale.exp())
    assert model.lm_head.decoder.weight is model.get_input_embeddings().weight
    assert gradients(model, model(ids).logits)["lm_head.log_scale"].any()
    close(saved_and_loaded(model, folder / "saved_head")(ids).logits, model(ids).logits)
    refused("start", lambda: XFormerConfig(**SIZES, head={"type": "learned_scale", "start": 0}))


def task(folder: Path) -> None:
    from hf_xformers.cli import main

    rows = folder / "grades.jsonl"
    grades = ["1 poor", "2 fair", "3 good", "4 best"]
    entries = [{"text": f"film {number} is {grade}", "label": grade} for number in range(12) for grade in grades]
    rows.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    options = "finetune --task grading --variant bert --size tiny --max_steps 2 --use_cpu true"
    out = folder / "graded"
    assert main([*options.split(), "--data", str(rows), "--output_dir", str(out)]) in (None, 0)
    predictions = folder / "said.jsonl"
    said = ["predict", "--model", str(out), "--data", str(rows), "--output", str(predictions)]
    assert main(said) in (None, 0)
    found = [json.loads(line) for line in predictions.read_text().splitlines()]
    distances = [abs(int(row["prediction"][0]) - int(row["reference"][0])) for row in found]
    from hf_xformers.finetuning import TaskOptions, build_task

    made_task = build_task(TaskOptions(task="grading"))
    made_task.labels = types.SimpleNamespace(names=grades)
    close(torch.tensor(made_task.score(found)["distance"]), torch.tensor(sum(distances) / len(distances)))


def family(folder: Path) -> None:
    from transformers import SeedOssConfig, SeedOssForCausalLM

    from hf_xformers.conversion import convert_checkpoint, from_transformers, to_transformers

    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "pad_token_id")}
    more = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    ids = tokens(2, 9)
    for biases in ({}, {"attention_out_bias": True, "mlp_bias": True, "attention_bias": False}):
        torch.manual_seed(0)
        theirs = make_strong(SeedOssForCausalLM(SeedOssConfig(**sizes, **more, **biases)).double().eval())
        ours = from_transformers(theirs)
        close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits, 1e-5)  # their norms and angles are float32
        back = to_transformers(ours)
        assert type(back) is SeedOssForCausalLM and back.config.rope_parameters == theirs.config.rope_parameters
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(back.state_dict()[name], tensor), name
    theirs.save_pretrained(folder / "seed")
    assert convert_checkpoint(folder / "seed", folder / "ours").complete
    refused("mish", lambda: from_transformers(SeedOssForCausalLM(SeedOssConfig(**sizes, **more, hidden_act="mish"))))


def main_of_examples(folder: Path) -> int:
    for room in {path.parent for path in folder.rglob("*.py")}:
        name = ".".join(room.relative_to(folder).parts)
        importlib.import_module(f"hf_xformers.{name}").__path__.append(str(room))
    failed = 0
    for example in (attention, stateful_attention, position, stack, objective, head, task, family):
        try:
            example(folder)
            print(f"{example.__name__} works", flush=True)
        except Exception:
            failed = 1
            print(f"{example.__name__}:", file=sys.stderr)
            traceback.print_exc()
    return failed


if __name__ == "__main__":
    sys.exit(main_of_examples(Path(sys.argv[1])))

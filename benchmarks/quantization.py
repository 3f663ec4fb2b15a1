"""Which linear maps of a family must not be quantized: each kind alone, and how far it moves the outputs.

python benchmarks/quantization.py [--only bert,reformer,...] [--weights int8,int4] [--seeds 3] [--factor 10]

One model of every family that reads text, of size `tiny` with random weights, and noise on all parameters, so that
maps that start at zero count, too. For each type of linear map inside its layers the table has the squared error of
the outputs by their square where that kind alone is quantized (a mean over seeds), and how many times that is the
squared error of the weights by their square. An ordinary map passes on about its own error or less; one that decides
something passes on far more. A kind above `--factor` times in any number of bits is one that a component should name
in `unquantized`, and is marked; what components name already is measured, too. (The median of a family's kinds is no
measure: queries and keys of a nearly even attention count for nothing.) Nothing needs torchao: weights are rounded as
its configurations for weights round them.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from measure import write_results
from torch import nn

from hf_xformers.compression.quantizable import SMALLEST, kind_of, linear_modules, output_errors, outside, split
from hf_xformers.training.presets import size_fields
from hf_xformers.variants import config_class, family, model_types

HEADS = ("ForMaskedLM", "ForCausalLM", "ForSeq2SeqLM")
VOCABULARY, ROWS, LENGTH = 512, 4, 48


def rounded(bits: int, group: int | None) -> Any:
    """A function that rounds the weight of a linear map: symmetric, a scale for each output or group of inputs."""

    @torch.no_grad()
    def apply(module: nn.Linear) -> None:
        weight = module.weight
        grouped = weight if group is None or weight.shape[1] % group else weight.unflatten(1, (-1, group))
        scale = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 0.5)
        made = (grouped / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale
        module._parameters["weight"] = nn.Parameter(made.reshape(weight.shape), requires_grad=False)

    return apply


def built(name: str, seed: int, noise: float) -> nn.Module:
    members = family(name)
    head = next(head for head in HEADS if head in members)
    config = config_class(name)
    fields = {**size_fields(config, "tiny", two_towers=head == "ForSeq2SeqLM"), "vocab_size": VOCABULARY}
    shape = {"is_decoder": head == "ForCausalLM", "is_encoder_decoder": head == "ForSeq2SeqLM"}
    torch.manual_seed(seed)
    model = members[head](config(**fields, **shape)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model


def errors_of(name: str, bits: int, seed: int, noise: float) -> tuple[dict[str, tuple[float, float]], set[str]]:
    """By kind the errors of a family's outputs and weights, and the kinds that keep their precision."""
    model = built(name, seed, noise)
    names = [
        key
        for key, module in linear_modules(model).items()
        if not outside(model, key) and min(module.in_features, module.out_features) >= SMALLEST
    ]
    ids = torch.randint(5, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids
    found = output_errors(model, [batch], rounded(bits, 32 if bits == 4 else None), names)
    of_weights = weight_errors(model, names, bits)
    chosen = set(map(kind_of, split(model).chosen))
    return {kind: (error, of_weights[kind]) for kind, error in found.items()}, {kind_of(key) for key in names} - chosen


@torch.no_grad()
def weight_errors(model: nn.Module, names: list[str], bits: int) -> dict[str, float]:
    """By kind |W_q - W|^2 / |W|^2."""
    modules, sums = linear_modules(model), {}
    for name in names:
        module = modules[name]
        before = module.weight.detach()
        rounded(bits, 32 if bits == 4 else None)(module)
        entry = sums.setdefault(kind_of(name), [0.0, 0.0])
        entry[0] += float((module.weight - before).square().sum())
        entry[1] += float(before.square().sum())
    return {kind: max(error, 1e-30) / max(size, 1e-30) for kind, (error, size) in sums.items()}


def measured(name: str, bits: dict[str, int], seeds: int, factor: float, noise: float) -> list[dict[str, Any]]:
    sums: dict[str, dict[str, float]] = {}
    kept: set[str] = set()
    for label, count in bits.items():
        for seed in range(seeds):
            found, kept = errors_of(name, count, seed, noise)
            for kind, (error, of_weights) in found.items():
                entry = sums.setdefault(kind, dict.fromkeys([*bits, *(f"weights {one}" for one in bits)], 0.0))
                entry[label] += error / seeds
                entry[f"weights {label}"] += of_weights / seeds
    rows = []
    for kind, entry in sums.items():
        times = {label: entry[label] / entry[f"weights {label}"] for label in bits}
        rows.append(
            {
                "family": name,
                "kind": kind,
                **{f"error ({label})": entry[label] for label in bits},
                **{f"times the weights' ({label})": round(value, 1) for label, value in times.items()},
                "kept": "yes" if kind in kept else "",
                "far above": "yes" if max(times.values()) > factor else "",
            }
        )
    return sorted(rows, key=lambda row: -row[f"times the weights' ({next(iter(bits))})"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--weights", default="int8,int4")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--noise", type=float, default=0.05, help="standard deviation, added to every parameter")
    parser.add_argument("--dry", action="store_true", help="print the kinds far above and write nothing")
    given = parser.parse_args()
    names = [f"xf_{name}" for name in given.only.split(",")] if given.only else model_types()
    bits = {label: int(label.removeprefix("int")) for label in given.weights.split(",")}
    rows = []
    for name in names:
        if config_class(name).modality != "text" or not any(head in family(name) for head in HEADS):
            continue
        try:
            found = measured(name, bits, given.seeds, given.factor, given.noise)
        except (ValueError, TypeError, RuntimeError) as error:  # a family that `tiny` does not fit
            print(f"{name}: {error}")
            continue
        rows += found
        for row in found:
            if row["far above"] or row["kept"]:
                print(", ".join(f"{key} {value}" for key, value in row.items() if value != ""), flush=True)
    if not given.dry:
        title = "What a type of linear map moves when it alone is quantized"
        write_results("quantization", rows, list(rows[0]), title, __doc__ or "")


if __name__ == "__main__":
    main()

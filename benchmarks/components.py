"""Overhead of positions, norms and residuals over the plain choice: a model of one layer.

python benchmarks/components.py [--lengths 512,4096] [--rounds 3] [--only rotary] [--no-peers]

Each case is a model with one layer (hidden 512, 8 heads, a feed-forward eight wide, batch 1, float32, no dropout),
forward + backward on `inputs_embeds`, against the same model with dense attention, no position and post-norm layer
norm. Peers are transformers' models of the same geometry. Ratios below 1 are faster or smaller. Time is the median of
paired rounds, memory the growth of the peak over one step in a process of its own. Rows replace those of the same case
and length in `results/components.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peers
import torch
from measure import forked_memory, interleaved_seconds, ratios, write_results
from peers import HEADS, WIDTH, training_step

from hf_xformers import XFormerConfig, XFormerModel


@dataclass(frozen=True)
class Case:
    """slot: the component's kind; fields: of the config; causal: in a decoder; peers: makers by name, called with the
    length."""

    slot: str
    fields: dict[str, Any]
    causal: bool = False
    peers: dict[str, Callable] = field(default_factory=dict)


def position(name: Any, causal: bool = False, **others: Callable) -> Case:
    return Case("position", {"position": name}, causal, others)


def norm(**fields: Any) -> Case:
    return Case("norm", fields)


def block(name: str, causal: bool = False) -> Case:
    return Case("block", {"block": name, "residual": "pre_ln"}, causal)


DEBERTA_V3 = {"type": "deberta", "buckets": 256, "max_distance": 512, "share_projections": True, "normalize": True}
CASES: dict[str, Case] = {
    "rotary": position("rotary", RoFormer=peers.roformer),
    "sinusoidal": position("sinusoidal_absolute"),
    "learned": position("learned_absolute"),
    "learnable sinusoidal": position("learnable_sinusoidal"),
    "floater": position("floater"),
    "per layer": position("per_layer_position"),
    "T5 bias": position("t5_relative_bias", T5=peers.t5),
    "TUPE": position("tupe"),
    "Shaw, 16": position("shaw_relative"),
    "DeBERTa": position({"type": "deberta", "max_distance": 512}),
    "DeBERTa v3": position(DEBERTA_V3, DeBERTaV2=peers.deberta_v2),
    "Music Transformer, causal": position({"type": "music_transformer"}, True),
    "InDIGO, causal": position("indigo", True),
    "Transformer-XL, causal": Case("position", {"attention": "transformer_xl"}, True, {"XLNet": peers.xlnet}),
    "CPE": Case("position", {"block": "cpe"}),
    "R-Transformer, causal": Case("position", {"block": "r_transformer"}, True),
    "Lite Transformer": block("lite_transformer"),
    "Lite Transformer, causal": block("lite_transformer", True),
    "DeLighT": block("delight"),
    "mask attention network": block("mask_attention_network"),
    "Evolved Transformer": block("evolved_transformer"),
    "DARTSformer": block("dartsformer"),
    "pre-norm": norm(residual="pre_ln"),
    "RMS norm": norm(normalization="rms_norm"),
    "AdaNorm": norm(normalization="adanorm"),
    "ScaleNorm": norm(normalization="scale_norm"),
    "PowerNorm": norm(normalization="power_norm"),
    "ReZero": norm(residual="rezero"),
    "Admin": norm(residual="admin"),
}


def ours(case: Case | None, causal: bool, length: int) -> Callable[[], None]:
    torch.manual_seed(0)
    fields = {"position": "none"} if case is None else {"position": "none", **case.fields}
    config = XFormerConfig(
        vocab_size=16,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_hidden_layers=1,
        intermediate_size=8,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        is_decoder=causal,
        **fields,
    )
    model = XFormerModel(config)
    # Nothing is generated, so nothing is cached.
    return training_step((model, lambda states: model(inputs_embeds=states, use_cache=False)[0]), length)


def make(name: str, length: int) -> Callable[[], None]:
    """The step of a case, of `plain|full` or `plain|causal`, or of `case | peer`."""
    if name.startswith("plain|"):
        return ours(None, name.endswith("causal"), length)
    case, _, peer = name.partition(" | ")
    if peer:
        return training_step(CASES[case].peers[peer](length), length)
    return ours(CASES[case], CASES[case].causal, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,4096")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args()
    names = [name for name in CASES if arguments.only.lower() in name.lower()]
    stored = Path(__file__).parent / "results" / "components.json"
    rows = json.loads(stored.read_text())["rows"] if stored.exists() else []
    measured = []
    # Memory first: a process that has run a backward pass cannot be forked safely.
    for length in [int(length) for length in arguments.lengths.split(",")]:
        for name in names:
            plain = f"plain|{'causal' if CASES[name].causal else 'full'}"
            others = [] if arguments.no_peers else [f"{name} | {peer}" for peer in CASES[name].peers]
            try:
                memory = {entry: forked_memory(make, entry, length) for entry in (plain, name, *others)}
            except RuntimeError as error:
                print(f"{name} at {length}: {error}", flush=True)
                continue
            measured.append((length, name, plain, others, memory))
    for length, name, plain, others, memory in measured:
        everything = (plain, name, *others)
        seconds = interleaved_seconds({entry: make(entry, length) for entry in everything}, arguments.rounds)
        time = ratios(seconds, plain)
        row: dict[str, Any] = {
            "slot": CASES[name].slot,
            "component": name,
            "T": length,
            "time ratio": time[name],
            "memory ratio": memory[name] / memory[plain],
            "others busy": seconds.others_busy,
        }
        for entry in others:
            row |= {
                "peer": entry.partition(" | ")[2],
                "peer time ratio": time[entry],
                "peer memory ratio": memory[entry] / memory[plain],
                "time / peer": time[name] / time[entry],
                "memory / peer": memory[name] / memory[entry],
            }
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        rows = [old for old in rows if (old["component"], old["T"]) != (name, length)] + [row]
        order = list(CASES)
        rows.sort(key=lambda entry: (order.index(entry["component"]), entry["T"]))
        columns = ["slot", "component", "T", "time ratio", "memory ratio"]
        columns += ["peer", "peer time ratio", "peer memory ratio", "time / peer", "memory / peer", "others busy"]
        note = (
            "A model of one layer (hidden 512, 8 heads, feed-forward eight wide, batch 1), forward + backward, against"
            " the same with dense attention, no position and post-norm layer norm (causal where the case is); peers of"
            " the same geometry."
        )
        write_results("components", rows, columns, "Positions, norms and residuals against the plain choice", note)


if __name__ == "__main__":
    main()

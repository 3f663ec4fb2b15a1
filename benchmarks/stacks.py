"""Whole stacks against a plain stack of dense layers, and against other implementations.

python benchmarks/stacks.py [--lengths 512,2048,4096] [--rounds 3] [--only funnel] [--no-peers]

Each case is a model (hidden 512, 8 heads, feed-forward 2048, batch 1, float32, no dropout), forward + backward on
`inputs_embeds`, against xf_bert with as many layers (causal where the case is). Transformer-XL reads the text in
segments of 512 tokens with a memory of as many, each with its backward pass. Peers have the same geometry. Ratios
below 1 are faster or smaller. Time is the median of paired rounds, memory the growth of the peak over one step in a
process of its own. Rows replace those of the same case and length in `results/stacks.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import peers
import torch
from measure import forked_memory, interleaved_seconds, ratios, write_results
from peers import HEADS, WIDTH, training_step
from torch import Tensor
from transformers import AutoConfig, AutoModel

SEGMENT = 512


@dataclass(frozen=True)
class Case:
    """layers: of the case and of its baseline; fields: of the config; segments: read one after the other, with
    memory."""

    variant: str
    layers: int
    fields: dict[str, Any] = field(default_factory=dict)
    causal: bool = False
    segments: bool = False
    peers: dict[str, Callable] = field(default_factory=dict)


FUNNEL = {"type": "funnel", "block_sizes": [2, 2, 2]}
CASES: dict[str, Case] = {
    "funnel 2-2-2": Case(
        "xf_funnel_transformer",
        6,
        {"stack": {**FUNNEL, "decoder_layers": 0, "upsample": False}},
        peers={"transformers": peers.funnel},
    ),
    "funnel 2-2-2, 2 after up-sampling": Case(
        "xf_funnel_transformer",
        8,
        {"stack": {**FUNNEL, "decoder_layers": 2}},
        peers={"transformers": partial(peers.funnel, readers=2)},
    ),
    "transformer-xl, segments of 512": Case("xf_transformer_xl", 6, causal=True, segments=True),
    "ernie-doc, segments of 512": Case("xf_ernie_doc", 6, causal=True, segments=True),
    "memformer, segments of 512": Case("xf_memformer", 6, causal=True, segments=True),
    "recurrent pretrained lm, windows of 512": Case("xf_recurrent_pretrained_lm", 6, causal=True, segments=True),
    "hi-transformer, sentences of 64": Case(
        "xf_hi_transformer", 6, {"stack": {"type": "hi_transformer", "segment_length": 64}}
    ),
    "hibert, sentences of 64": Case("xf_hibert", 6, {"stack": {"type": "hibert", "segment_length": 64}}),
    "etc, a global token for 27": Case("xf_etc", 6),
    "universal, 6 steps": Case("xf_universal_transformer", 6, {"stack": {"type": "universal"}}),
}


def ours(case: Case, length: int) -> Callable[[], None]:
    """Forward and backward of a model."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        case.variant,
        vocab_size=16,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_hidden_layers=case.layers,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=SEGMENT if case.segments else length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **({"is_decoder": True, "bos_token_id": None, "eos_token_id": None} if case.causal else {}),
        **case.fields,
    )
    model = AutoModel.from_config(config)
    if not case.segments:
        # Nothing is generated, so nothing is cached.
        return training_step((model, lambda states: model(inputs_embeds=states, use_cache=False)[0]), length)
    return segment_steps(model, torch.randn(1, length, WIDTH))


def segment_steps(model: torch.nn.Module, states: Tensor) -> Callable[[], None]:
    """A backward pass for each segment; the memory carries states, not gradients."""
    model.train()

    def run() -> None:
        memory = None
        for segment in states.split(SEGMENT, 1):
            output = model(inputs_embeds=segment, use_cache=False, segment_memory=memory)
            output[0].sum().backward()
            memory = output.segment_memory.detach()
        model.zero_grad(set_to_none=True)

    return run


def baseline(case: Case) -> str:
    return f"dense|{'causal' if case.causal else 'full'}|{case.layers}"


def make(name: str, length: int) -> Callable[[], None]:
    """The step of a case, of `dense|full|6`, or of `case | peer`."""
    if name.startswith("dense|"):
        _, order, layers = name.split("|")
        return ours(Case("xf_bert" if order == "full" else "xf_gpt2", int(layers), causal=order == "causal"), length)
    case, _, peer = name.partition(" | ")
    return training_step(CASES[case].peers[peer](length), length) if peer else ours(CASES[case], length)


COLUMNS = ["variant", "case", "layers", "T", "time ratio", "memory ratio", "ms", "peak MiB"]
COLUMNS += ["peer", "peer time ratio", "peer memory ratio", "time / peer", "memory / peer"]
NOTE = (
    "A model (hidden 512, 8 heads, feed-forward 2048, batch 1), forward + backward, against a plain stack of as many"
    " dense layers (xf_bert; xf_gpt2 where the case is causal), and against peers of the same geometry."
    " Transformer-XL: segments of 512 tokens one after the other, with a memory of 512 (ERNIE-Doc: of 128; Memformer:"
    " of 128 slots; a recurrent pretrained LM: of one key)."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,2048,4096")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="part of the names of cases, or one whole name")
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args()
    names = [name for name in CASES if arguments.only.lower() in name.lower()]
    names = [arguments.only] if arguments.only in CASES else names
    stored = Path(__file__).parent / "results" / "stacks.json"
    rows = json.loads(stored.read_text())["rows"] if stored.exists() else []
    lengths, measured = [int(length) for length in arguments.lengths.split(",")], []
    # Memory first: a process that has run a backward pass cannot be forked safely.
    for length in lengths:
        for name in names:
            others = [] if arguments.no_peers else [f"{name} | {peer}" for peer in CASES[name].peers]
            entries = (baseline(CASES[name]), name, *others)
            measured.append((length, name, others, {entry: forked_memory(make, entry, length) for entry in entries}))
    for length, name, others, memory in measured:
        case, plain = CASES[name], baseline(CASES[name])
        seconds = interleaved_seconds({entry: make(entry, length) for entry in memory}, arguments.rounds)
        time = ratios(seconds, plain)
        row: dict[str, Any] = {
            "variant": case.variant,
            "case": name,
            "layers": case.layers,
            "T": length,
            "time ratio": time[name],
            "memory ratio": memory[name] / memory[plain],
            "others busy": seconds.others_busy,
            "ms": 1000 * sorted(seconds[name])[len(seconds[name]) // 2],
            "peak MiB": memory[name] / 2**20,
        }
        for entry in others:
            row |= {
                "peer": entry.partition(" | ")[2],
                "peer time ratio": time[entry],
                "peer memory ratio": memory[entry] / memory[plain],
                "time / peer": time[name] / time[entry],
                "memory / peer": memory[name] / memory[entry],
            }
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        rows = [old for old in rows if (old["case"], old["T"]) != (name, length)] + [row]
        order = list(CASES)
        rows.sort(key=lambda entry: (order.index(entry["case"]), entry["T"]))
        write_results("stacks", rows, COLUMNS, "Stacks against plain stacks of dense layers, and peers", NOTE)


if __name__ == "__main__":
    main()

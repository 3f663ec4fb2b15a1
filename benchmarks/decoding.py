"""Generation with a state of constant size against generation with keys and values: speed, and bytes of the cache.

    OMP_NUM_THREADS=1 python benchmarks/decoding.py [--contexts 512,2048,8192,16384] [--tokens 32] [--rounds 3]

A context is read in pieces of at most `--piece` tokens; then tokens follow one by one through the whole model with its
cache, each model in turn. The figures are processor time on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from measure import interleaved_seconds, write_results
from transformers.cache_utils import Cache

from hf_xformers import XFormerConfig, XFormerForCausalLM

LAYERS, WIDTH, HEADS = 4, 512, 8
MODELS = {
    "xf_performer": "performer",
    "xf_linear_transformer": "linear_transformer",
    "xf_delta_net": "delta_net",
    "dense": "dense",
}
BASELINE = "dense"


def build(attention: str, layers: int = LAYERS, width: int = WIDTH) -> XFormerForCausalLM:
    """Models that differ in their attention alone, with positions that know no longest text."""
    torch.manual_seed(0)
    config = XFormerConfig(
        vocab_size=1000,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=4 * width,
        position="sinusoidal_absolute",
        attention=attention,
        is_decoder=True,
    )
    return XFormerForCausalLM(config).eval()


@torch.no_grad()
def read(model: XFormerForCausalLM, context: int, piece: int) -> Cache:
    """The cache after `context` tokens."""
    ids, cache = torch.randint(5, 1000, (1, context), generator=torch.Generator().manual_seed(0)), None
    for start in range(0, context, piece):
        output = model.model(input_ids=ids[:, start : start + piece], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
    return cache


def generation(model: XFormerForCausalLM, cache: Cache, tokens: int) -> Callable[[], None]:
    """A callable that generates `tokens` tokens after what the cache holds, the same ones each time."""

    @torch.no_grad()
    def run() -> None:
        past, token = copy.deepcopy(cache), torch.full((1, 1), 7)
        for _ in range(tokens):
            output = model(input_ids=token, past_key_values=past, use_cache=True)
            token, past = output.logits[:, -1:].argmax(-1), output.past_key_values

    return run


def copying(cache: Cache) -> float:
    """Seconds that the copy of the cache takes, which is no part of generation."""
    found = []
    for _ in range(3):
        start = time.process_time()
        copy.deepcopy(cache)
        found.append(time.process_time() - start)
    return statistics.median(found)


def bytes_held(cache: Cache) -> int:
    """Bytes of all tensors in a cache."""
    total = 0
    for layer in cache.layers:
        tensors = [*getattr(layer, "state", {}).values(), getattr(layer, "keys", None), getattr(layer, "values", None)]
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
    return total


def measure(contexts: list[int], tokens: int, rounds: int, piece: int, **size: int) -> list[dict]:
    """One row for each model and context."""
    models = {name: build(attention, **size) for name, attention in MODELS.items()}
    rows = []
    for context in contexts:
        calls, caches, prefill = {}, {}, {}
        for name, model in models.items():
            start = time.process_time()
            caches[name] = read(model, context, piece)
            prefill[name] = time.process_time() - start
            calls[name] = generation(model, caches[name], tokens)
        seconds = interleaved_seconds(calls, rounds)
        speed = {}
        for name in models:
            spent = statistics.median(seconds[name]) - copying(caches[name])
            speed[name] = tokens / max(spent, 1e-9)
        for name in models:
            row = {"model": name, "context": context, "tokens/s": speed[name]}
            row["against dense"] = speed[name] / speed[BASELINE]
            row["cache KiB"] = bytes_held(caches[name]) / 1024
            row |= {"reading s": prefill[name], "others busy": seconds.others_busy}
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="512,2048,8192,16384")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--piece", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--name", default="decoding", help="results/NAME.json and results/NAME.md")
    given = parser.parse_args()
    contexts = [int(context) for context in given.contexts.split(",")]
    rows = measure(contexts, given.tokens, given.rounds, given.piece, layers=given.layers, width=given.width)
    columns = ["model", "context", "tokens/s", "against dense", "cache KiB", "reading s", "others busy"]
    note = (
        f"{given.layers} layers, hidden {given.width}, {HEADS} heads, batch 1: {given.tokens} tokens after a context"
        f" that was read in pieces of {given.piece}. `against dense`: ratio of tokens per second, above 1 is faster;"
        " `cache KiB`: what the cache holds after the context; `reading s`: seconds for the context. The models"
        " differ in their attention alone."
    )
    print(write_results(given.name, rows, columns, "Generating with a state of constant size", note))


if __name__ == "__main__":
    main()

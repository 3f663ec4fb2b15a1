"""Whole models of 125M parameters on the GPU compared with transformers' BERT and Llama: training and decoding.

    python benchmarks/gpu_models.py [--output_dir DIR] [--minutes 3] [--only decoding]

Training: 16,384 tokens a step in rows of 1,024 and 8,192, weights in float32 under bfloat16 autocast, AdamW (fused),
tokens per second. Decoding: weights in bfloat16, one row, tokens per second after 1,024 to 65,536 tokens, which were
read in pieces of 8,192. No dropout, nothing is compiled but FlexAttention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_common import DEVICE, Rows, milliseconds, parse, peak_mib, wanted
from torch import nn
from transformers import AutoConfig, BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import hf_xformers  # noqa: F401  (registers the families)
from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM
from hf_xformers.compat import CACHE
from hf_xformers.variants import family

ON_GPU = DEVICE.type == "cuda"
VOCAB, WIDTH, LAYERS, HEADS = (32768, 768, 12, 12) if ON_GPU else (64, 32, 2, 2)
TOKENS, ROWS = (16384, (1024, 8192)) if ON_GPU else (64, (32,))
CONTEXTS, PIECE, STEPS = ((1024, 8192, 65536), 8192, 24) if ON_GPU else ((32,), 16, 2)
LONGEST = max(*ROWS, *CONTEXTS) + 64
SIZES = dict(vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS)
OURS = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": LONGEST}
MODERN: dict[str, Any] = {
    "position": "rotary",
    "normalization": "rms_norm",
    "residual": "pre_ln",
    "feedforward": {"type": "swiglu", "bias": False},
    "intermediate_size": 8 * WIDTH // 3,
    "is_decoder": True,
}


def bert() -> nn.Module:
    sizes = dict(intermediate_size=4 * WIDTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForMaskedLM(BertConfig(**SIZES, **sizes, max_position_embeddings=LONGEST))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=8 * WIDTH // 3, max_position_embeddings=LONGEST))


def variant(name: str, **fields: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = AutoConfig.for_model(name, **{**OURS, "intermediate_size": 4 * WIDTH, **fields})
        return family(name)["ForMaskedLM"](config)

    return make


def decoder(attention: Any, **fields: Any) -> Callable[[], nn.Module]:
    return lambda: XFormerForCausalLM(XFormerConfig(**{**OURS, **MODERN, "attention": attention, **fields}))


def encoder(attention: Any) -> Callable[[], nn.Module]:
    fields = {"intermediate_size": 4 * WIDTH, "attention": attention}
    return lambda: XFormerForMaskedLM(XFormerConfig(**{**OURS, **fields}))


WINDOW = {"type": "sliding_window", "window_size": 512, "sinks": 4, "bias": False}
ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "transformers BERT": bert,
    "xf_bert": variant("xf_bert"),
    "xf_longformer": variant("xf_longformer"),
    "xf_performer": variant("xf_performer"),
    "linear encoder": encoder("linear_transformer"),
}
DECODERS: dict[str, Callable[[], nn.Module]] = {
    "transformers Llama": llama,
    "dense": decoder({"type": "dense", "bias": False}),
    "sliding window": decoder(WINDOW),
    "linear": decoder({"type": "linear_transformer", "bias": False}),
    "delta rule": decoder({"type": "delta_net", "feature_map": "elu", "bias": False}),
    "gated delta net": decoder({"type": "gated_delta_net", "bias": False}),
    "mamba2": decoder({"type": "mamba2", "bias": False}),
    "performer": decoder({"type": "performer", "bias": False}),
}


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    try:  # drawing this many weights on a processor takes longer than measuring them
        with torch.device(DEVICE):
            return make().to(DEVICE)
    except RuntimeError:  # some are drawn by a processor's generator
        return make().to(DEVICE)


def training(model: nn.Module, length: int) -> dict[str, Any]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=ON_GPU)
    ids = torch.randint(5, VOCAB, (TOKENS // length, length), device=DEVICE)

    def step() -> None:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3 if ON_GPU else 1):
        step()
    taken = milliseconds(step, 1.0)
    return {"tokens/s": 1000 * TOKENS / taken, "ms": taken, "peak MiB": peak_mib(step)}


@torch.inference_mode()
def decoding(model: nn.Module, context: int) -> dict[str, Any]:
    model.to(torch.bfloat16 if ON_GPU else torch.float32).eval()
    ids = torch.randint(5, VOCAB, (1, context), device=DEVICE)
    cache: Any = None
    for start in range(0, context, PIECE):
        output = model(
            input_ids=ids[:, start : start + PIECE], past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        cache = output.past_key_values
    token = ids[:, -1:]

    def steps() -> None:
        nonlocal cache
        for _ in range(STEPS):
            cache = getattr(model(input_ids=token, use_cache=True, **{CACHE: cache}), CACHE)

    steps()
    taken = milliseconds(steps, 0.5)
    state = sum(x.numel() * x.element_size() for x in _tensors(cache))
    return {"tokens/s": 1000 * STEPS / taken, "ms": taken / STEPS, "cache MiB": state / 2**20}


def _tensors(found: Any, seen: set[int] | None = None) -> list[torch.Tensor]:
    """All tensors that a cache holds."""
    seen = set() if seen is None else seen
    if id(found) in seen:
        return []
    seen.add(id(found))
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, dict):
        entries = list(found.values())
    elif isinstance(found, (list, tuple)):
        entries = list(found)
    else:
        entries = list(vars(found).values()) if hasattr(found, "__dict__") and not isinstance(found, type) else []
    return [tensor for entry in entries for tensor in _tensors(entry, seen)]


TITLE = "Models of 125M parameters on a GPU"
NOTE = (
    "Training: 16,384 tokens a step in rows of T, weights in float32 under bfloat16 autocast, fused AdamW, 32,768"
    " tokens in the vocabulary, no dropout. Decoding: weights in bfloat16, one row, after T tokens. Nothing but"
    " FlexAttention is compiled. `against transformers`: tokens per second by those of its BERT (encoders) or Llama"
    " (decoders). Rows of encoders are of 2026-11-26, all others of the date below."
)
COLUMNS = ["task", "model", "T", "tokens/s", "against transformers", "ms", "peak MiB", "cache MiB"]


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds to each row its speed by that of transformers' model."""
    speeds = {(row["task"], row["T"], row["model"]): row["tokens/s"] for row in rows if "tokens/s" in row}
    for (task, length, model), speed in speeds.items():
        baseline = speeds.get((task, length, "transformers BERT" if model in ENCODERS else "transformers Llama"))
        for row in rows:
            if baseline and (row.get("task"), row.get("T"), row["model"]) == (task, length, model):
                row["against transformers"] = speed / baseline


COMPILED = ("xf_longformer", "sliding window")


def main() -> None:
    arguments, models = parse(__doc__, COMPILED), {**DECODERS, **ENCODERS}
    if arguments.tune:
        for length in ROWS[::-1]:
            training(built(models[arguments.tune]), length)
        return
    rows = Rows("gpu_models", arguments)
    for name, make in models.items():
        jobs = [("training", training, length) for length in ROWS[::-1]]
        jobs += [("decoding", decoding, context) for context in CONTEXTS[::-1] if name in DECODERS]
        jobs = [job for job in jobs if wanted(f"{job[0]} {name}", arguments)]
        if not jobs or name in rows.not_ready:
            continue
        if rows.out_of_time():
            rows.add({"model": name, "note": "out of time"})
            continue
        model = built(make)
        for task, measure, length in jobs:
            try:
                found = measure(model, length)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            rows.add({"task": task, "model": name, "T": length, **found})
    compare(rows.rows)
    rows.rows.sort(key=lambda row: (str(row.get("task")) != "training", row.get("T", 0)))
    rows.store()
    rows.page(TITLE, NOTE, COLUMNS)


if __name__ == "__main__":
    main()

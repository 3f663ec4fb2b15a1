"""What the tests of expert layers share: tiny modules, contexts, and the loop over tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import initialization

from hf_xformers import XFormerConfig, build_spec
from hf_xformers.core.call import Call
from tests.helpers import make_strong

WIDTH, INNER = 6, 10


def make_config(**fields):
    given = {"hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": INNER, "num_hidden_layers": 2}
    return XFormerConfig(**{**given, **fields})


def build(spec, dtype=torch.float64, layer_idx=1, seed=0, **fields):
    """A layer's feed-forward module with strong parameters, in evaluation mode."""
    config = make_config(**fields)
    torch.manual_seed(seed)
    module = build_spec("feedforward", spec).build(config, layer_idx=layer_idx)
    for child in [*module.modules()][::-1]:
        if hasattr(child, "initialize"):
            child.initialize(config, initialization)
    return make_strong(module.to(dtype).eval(), amount=0.5)


def vectors(*shape, seed=0, dtype=torch.float64, width=WIDTH):
    return torch.randn(*shape, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def context(batch: int, length: int, mask: Tensor | None = None, segments: Tensor | None = None, **inputs):
    index = torch.arange(length)
    return Call(
        padding_mask=mask,
        positions=index[None],
        query_index=index,
        key_index=index,
        causal=False,
        fresh=True,
        segment_ids=segments,
        inputs=inputs,
    )


def expert(experts, number: int, row: Tensor) -> Tensor:
    """One expert's ReLU network on one vector."""
    inner = experts.up_proj[number] @ row
    if experts.up_bias is not None:
        inner = inner + experts.up_bias[number]
    output = experts.down_proj[number] @ inner.clamp(min=0)
    return output if experts.down_bias is None else output + experts.down_bias[number]


def capacity(tokens: int, num_experts: int, factor: float | None) -> float:
    return math.inf if factor is None else math.ceil(tokens * factor / num_experts)


def padded(states: Tensor, side: str, extra: int = 3, seed: int = 9) -> tuple[Tensor, Tensor, slice]:
    """`states` with `extra` random padded vectors -> states, mask [B, T + extra], where the real ones are."""
    batch, length = states.shape[:2]
    noise = vectors(batch, extra, seed=seed, width=states.shape[-1]).to(states.dtype)
    parts = [states, noise] if side == "right" else [noise, states]
    mask = torch.ones(batch, length + extra, dtype=torch.bool)
    where = slice(0, length) if side == "right" else slice(extra, length + extra)
    mask[:, [i for i in range(length + extra) if not where.start <= i < where.stop]] = False
    return torch.cat(parts, 1), mask, where

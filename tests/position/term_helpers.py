"""What the tests of positions inside attention share: one attention layer with its position, run on vectors."""

import torch

from hf_xformers import XFormerConfig
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    WIDTH,
    allowed_pairs,
    make_context,
    small_blocks,
    softmax_by_rows,
    split_heads,
    vectors,
)
from tests.helpers import close

D_HEAD = WIDTH // HEADS


def build(position, causal=False, strong=0.5, **fields):
    """(attention layer, position module, config), in float64 with random parameters."""
    config = XFormerConfig(**{**GEOMETRY, "is_decoder": causal, "position": position, **fields})
    torch.manual_seed(0)
    module = config.position.build(config).double().eval()
    layer = config.attention.build(config, layer_idx=0).double().eval()
    with torch.no_grad():
        for parameter in (*module.parameters(), *layer.parameters()):
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * strong)
    return layer, module, config


def run(layer, module, states, causal=False, literal=False, **given):
    """Output [B, T, D] and weights (None on the fast path)."""
    context = make_context(states.shape[1], causal, implementation="eager" if literal else "sdpa", **given)
    module.share(context, states)
    layer.prepare(context, None)
    result = layer(states, context)
    return result.output, result.weights


def projected(layer, states):
    """Queries, keys and values [B, H, T, d]."""
    return tuple(split_heads(p(states), D_HEAD) for p in (layer.q_proj, layer.k_proj, layer.v_proj))


def check_scores(position, expected, causal=False, length=9, values=None, mask=None, **fields):
    """Literal path and fast path (in several blocks and in one), outputs and gradients, against
    `expected(layer, module, q, k) -> scores [B, H, T, T]`, and `values(layer, weights) -> [B, H, T, d]`. What padding
    as a query gets is nobody's."""
    layer, module, _ = build(position, causal, **fields)
    states = vectors(2, length)
    given = {"padding_mask": mask} if mask is not None else {}
    if mask is not None:
        given["positions"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    query, key, value = projected(layer, states)
    weights = softmax_by_rows(expected(layer, module, query, key), allowed_pairs(length, causal, mask))
    mixed = weights @ value
    if values is not None:
        mixed = mixed + values(layer, weights)
    want = layer.o_proj(mixed.transpose(1, 2).flatten(2))
    parameters = [p for p in (*layer.parameters(), *module.parameters()) if p.requires_grad]
    real = torch.ones(2, length, 1) if mask is None else mask[..., None]
    probe = vectors(2, length, seed=5) * real
    slopes = torch.autograd.grad((want * probe).sum(), parameters, allow_unused=True)

    def compare(**how):
        output, found = run(layer, module, states, causal, **how, **given)
        close(output * real, want * real)
        if found is not None:
            close(found * real[:, None], weights * real[:, None])
        for one, other in zip(torch.autograd.grad((output * probe).sum(), parameters, allow_unused=True), slopes):
            assert (one is None) == (other is None)
            if one is not None:
                close(one, other)

    compare(literal=True)
    compare()
    for rows in (1, 3, 4):
        with small_blocks(rows):
            compare()
    return layer, module

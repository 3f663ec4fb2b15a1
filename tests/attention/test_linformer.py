"""Linformer against its equation, its exact limit, fairseq's order of operations, and the four kinds of sharing."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_xformers import XFormerConfig, XFormerForMaskedLM
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    WIDTH,
    build_layers,
    make_context,
    run_layers,
    split_heads,
    vectors,
)
from tests.helpers import close, gradients, tokens

D, N, K = WIDTH // HEADS, 9, 3
MODES = ("none", "headwise", "key_value", "layerwise")
each_mode = pytest.mark.parametrize("sharing", MODES)


def spec(sharing="headwise", **fields):
    return {"type": "linformer", "sharing": sharing, "projected_length": K, "max_length": N, **fields}


@each_mode
def test_identity_projections_are_exact_attention(sharing):
    """k = n tokens and E = F = I; with padding the softmax keeps the zero rows, so only full texts are equal."""
    (layer,) = build_layers(spec(sharing, projected_length=6, max_length=6))
    states = vectors(2, 6)
    with torch.no_grad():
        for projection in (layer.key_projection, layer.value_projection):
            if projection is not None:
                projection.copy_(torch.eye(6).expand_as(projection))
        q, k, v = (split_heads(part(states), D) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        expected = layer.o_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        close(run_layers([layer], states, make_context(6))[0].output, expected, 1e-12)


def test_parameters():
    """Numbers of parameters of the four kinds of sharing in a model of three layers."""
    counts = {}
    for sharing in MODES:
        model = XFormerForMaskedLM(XFormerConfig(**GEOMETRY, attention=spec(sharing)))
        named = [(name, p) for name, p in model.named_parameters() if name.endswith("_projection")]
        counts[sharing] = sum(parameter.numel() for _, parameter in named)
    each = K * N
    assert counts == {"none": 2 * HEADS * each * 3, "headwise": 2 * each * 3, "key_value": each * 3, "layerwise": each}


def test_layerwise_gradient_is_the_sum_over_layers():
    """One matrix in three layers gets what three equal matrices get together."""
    ids, found = tokens(2, 7, high=50), {}
    for sharing in ("layerwise", "key_value"):
        torch.manual_seed(0)
        model = XFormerForMaskedLM(XFormerConfig(**GEOMETRY, attention=spec(sharing))).double().eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not name.endswith("key_projection"):
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            shared = torch.randn(K, N, generator=torch.Generator().manual_seed(2))
            for layer in model.model.trunk.layers:
                if layer.attention.key_projection is not None:
                    layer.attention.key_projection.copy_(shared)
        found[sharing] = gradients(model, model(input_ids=ids).logits)
    names = [f"model.trunk.layers.{index}.attention.key_projection" for index in range(3)]
    close(found["layerwise"][names[0]], sum(found["key_value"][name] for name in names))


def test_padding_takes_no_columns():
    """A row of n real tokens fits, wherever its padding stands; one more does not."""
    (layer,) = build_layers(spec())
    states = vectors(1, N)
    with torch.no_grad():
        expected = run_layers([layer], states, make_context(N))[0].output
        for where in (slice(0, N), slice(4, N + 4)):
            mask = torch.zeros(1, N + 4).bool()
            mask[:, where] = True
            padded = torch.full((1, N + 4, WIDTH), 7.0).double()
            padded[:, where] = states
            for implementation in ("eager", "sdpa"):
                context = make_context(N + 4, padding_mask=mask, implementation=implementation)
                close(run_layers([layer], padded, context)[0].output[:, where], expected)
        with pytest.raises(ValueError, match="10 tokens, but this linformer projects 9"):
            run_layers([layer], vectors(1, N + 1), make_context(N + 1))

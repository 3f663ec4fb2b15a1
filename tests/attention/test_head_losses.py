"""Losses on heads: disagreement and guidance against double loops, and what they may cost."""

import math

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM
from hf_xformers.core.components import SLOTS
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
    build_layers,
    make_context,
    run_layers,
    small_blocks,
    vectors,
)
from tests.helpers import close, tokens

HEAD = WIDTH // HEADS
LAYERS = GEOMETRY["num_hidden_layers"]
ALL_KINDS = {"type": "disagreement_regularization", "of": ("subspace", "position", "output")}
GUIDANCE = {"type": "attention_guidance", "same": 1, "next": 1, "previous": 1, "first": 1}
KEEPS_ORDER = {**GUIDANCE, "next": 0}
MASKS = {"whole": None, "padded": PADDING}


def dense(*losses, **fields):
    return {"type": "dense", "losses": losses, **fields}


def losses_of(attention, length=6, causal=False, mask=None, layer=None, cross=False, **context):
    (layer,) = build_layers(attention, causal=causal, cross=cross) if layer is None else (layer,)
    layer.train()
    layer.dropout = 0.0
    states = vectors(4, 6)[:, :length]
    memory = vectors(4, 5, seed=1) if cross else None
    where = {"memory_padding_mask": mask} if cross else {"padding_mask": mask}
    (result,) = run_layers([layer], states, make_context(length, causal, **where, **context), memory)
    return layer, states, memory, result


def heads_of(layer, states, memory=None):
    """Queries, keys and values [B, H, T, d] of all heads."""
    read = states if memory is None else memory
    made = layer.q_proj(states), layer.k_proj(read), layer.v_proj(read)
    query, key, value = (x.unflatten(-1, (-1, HEAD)).transpose(1, 2) for x in made)
    groups = HEADS // key.shape[1]
    return query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def weights_by_hand(query, key, causal, mask):
    scores = query @ key.mT / HEAD**0.5
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool)
    allowed = (allowed.tril() if causal else allowed)[None, None].expand(len(scores), 1, -1, -1)
    if mask is not None:
        allowed = allowed & mask[:, None, None]
    powers = scores.exp() * allowed
    return powers / powers.sum(-1, keepdim=True).clamp(min=1e-300)


@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 2}], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("path", ["eager", "sdpa", "blocks"])
def test_disagreement_by_pairs_of_heads(path, mask, causal, fields):
    (layer,) = build_layers(dense(ALL_KINDS), causal=causal, **fields)
    given = {"layer": layer, "causal": causal, "mask": mask, "implementation": "eager" if path == "eager" else "sdpa"}
    if path == "blocks":
        with small_blocks():
            layer, states, _, result = losses_of(None, **given)
    else:
        layer, states, _, result = losses_of(None, **given)
    query, key, value = heads_of(layer, states)
    weights = weights_by_hand(query, key, causal, mask)
    output = weights @ value
    real = torch.ones(4, 6).bool() if mask is None else mask
    expected = dict.fromkeys(("subspace", "position", "output"), 0.0)
    for i in range(HEADS):
        for j in range(HEADS):
            cosines = [torch.cosine_similarity(x[:, i], x[:, j], dim=-1)[real].mean() for x in (value, output)]
            products = (weights[:, i] * weights[:, j]).sum(-1)[real].mean()
            for name, found in zip(expected, (cosines[0], products, cosines[1]), strict=True):
                expected[name] += found / HEADS**2 / LAYERS
    assert set(result.aux_losses) == {f"disagreement_{kind}" for kind in expected}
    for kind, value in expected.items():
        close(result.aux_losses[f"disagreement_{kind}"], value)


@pytest.mark.parametrize("mask", [None, PADDING[:, :5]], ids=MASKS)
def test_disagreement_of_cross_attention(mask):
    attention = dense(ALL_KINDS)
    layer, states, memory, result = losses_of(attention, cross=True, mask=mask)
    query, key, value = heads_of(layer, states, memory)
    weights = weights_by_hand(query, key, False, mask)
    unit = torch.nn.functional.normalize
    real = torch.ones(4, 5).bool() if mask is None else mask
    subspace = unit(value, dim=-1).mean(1).square().sum(-1)[real].mean()
    close(result.aux_losses["disagreement_subspace"], subspace / LAYERS)
    # Every token asks, also of a memory without real tokens, of which it reads nothing.
    close(result.aux_losses["disagreement_position"], weights.mean(1).square().sum(-1).mean() / LAYERS)


def pattern(name, length, start=0, stop=None):
    """P of one text that stands at [start, stop) of a row."""
    stop, matrix = length if stop is None else stop, torch.zeros(length, length, dtype=torch.float64)
    for i in range(start, stop):
        j = {"same": i, "next": i + 1, "previous": i - 1, "first": start}[name]
        if start <= j < stop:
            matrix[i, j] = 1
    return matrix


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("path", ["eager", "sdpa", "blocks"])
def test_guidance_with_its_patterns(path, mask, causal):
    spec = KEEPS_ORDER if causal else GUIDANCE
    (layer,) = build_layers(dense(spec), causal=causal)
    given = {"layer": layer, "causal": causal, "mask": mask, "implementation": "eager" if path == "eager" else "sdpa"}
    if path == "blocks":
        with small_blocks():
            layer, states, _, result = losses_of(None, **given)
    else:
        layer, states, _, result = losses_of(None, **given)
    query, key, _ = heads_of(layer, states)
    weights = weights_by_hand(query, key, causal, mask)
    spans = [(0, 6)] * 4 if mask is None else [(0, 6), (0, 3), (2, 6), (0, 0)]
    pairs = sum((stop - start) ** 2 for start, stop in spans)
    expected, head = 0.0, 0
    for name in ("same", "next", "previous", "first"):
        if spec[name]:
            for row, (start, stop) in enumerate(spans):
                part = slice(start, stop)
                error = weights[row, head] - pattern(name, 6, start, stop)
                expected += 100 * error[part, part].square().sum() / pairs
            head += 1
    close(result.aux_losses["attention_guidance"], expected)


def test_guidance_in_packed_rows():
    """Each text of a row has a first token of its own, and none before it."""
    (layer,) = build_layers(dense(KEEPS_ORDER), causal=True)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1]] * 4)
    _, states, _, result = losses_of(None, layer=layer, causal=True, segment_ids=segments)
    query, key, _ = heads_of(layer, states)
    weights = torch.zeros(4, HEADS, 6, 6, dtype=torch.float64)
    for part in (slice(0, 3), slice(3, 6)):
        weights[..., part, part] = weights_by_hand(query[:, :, part], key[:, :, part], True, None)
    expected = 0.0
    for head, name in enumerate(("same", "previous", "first")):
        both = pattern(name, 6, 0, 3) + pattern(name, 6, 3, 6)
        expected += 100 * (weights[:, head] - both).square().mean()
    close(result.aux_losses["attention_guidance"], expected)


def test_only_guided_heads_learn():
    (layer,) = build_layers(dense({"type": "attention_guidance", "next": 1, "previous": 1, "first": 0}))
    losses_of(None, layer=layer)[3].aux_losses["attention_guidance"].backward()
    moved = layer.q_proj.weight.grad.unflatten(0, (HEADS, HEAD)).abs().amax((1, 2)) > 0
    assert moved.tolist() == [True, True, False, False]
    assert layer.v_proj.weight.grad is None


def test_strength_over_passes():
    spec = {**GUIDANCE, "constant_passes": 2, "total_passes": 4}
    (layer,) = build_layers(dense(spec))
    (guidance,) = layer.head_losses
    guidance.passes.zero_()
    found = [float(losses_of(None, layer=layer)[3].aux_losses["attention_guidance"].detach()) for _ in range(5)]
    close(torch.tensor(found) / found[0], torch.tensor([1.0, 1.0, 1.0, 0.5, 0.0]), 1e-6)
    assert int(guidance.passes) == 5
    with torch.no_grad():
        losses_of(None, layer=layer)
    assert int(guidance.passes) == 5


def test_how_many_heads_by_default():
    def counts(heads, **fields):
        config = XFormerConfig(**{**GEOMETRY, "hidden_size": 48, "num_attention_heads": heads, **fields})
        return tuple(SLOTS["attention"].get("dense")(losses=("attention_guidance",)).losses[0].counts(config).values())

    assert counts(12) == (0, 1, 1, 4)
    assert counts(12, is_decoder=True) == (0, 0, 1, 4)
    assert counts(4) == (0, 1, 1, 1)
    assert counts(2) == (0, 1, 1, 0) and counts(1) == (0, 1, 0, 0)


def test_losses_are_for_training():
    for head in (XFormerForMaskedLM, XFormerForCausalLM):
        model = head(XFormerConfig(**GEOMETRY, attention=dense(ALL_KINDS, "attention_guidance")))
        ids = tokens(2, 7, high=50)
        trained, used = model.train()(ids, labels=ids), model.eval()(ids, labels=ids)
        assert set(trained.aux_losses) == {*(f"disagreement_{kind}" for kind in ALL_KINDS["of"]), "attention_guidance"}
        assert not used.aux_losses
        plain = trained.loss - sum(trained.aux_losses.values())
        assert math.isclose(plain.item(), used.loss.item(), rel_tol=0.5)


HANDING_OUT = [name for name in SLOTS["attention"] if "parts" in SLOTS["attention"].get(name).head_options]


@pytest.mark.parametrize("name", HANDING_OUT)
def test_every_mechanism_that_says_so(name):
    """Losses and aggregations reach a mechanism that hands out the parts of heads."""
    kind = SLOTS["attention"].get(name)
    loss = {"type": "disagreement_regularization", "of": ("subspace", "output")}
    attention = {"type": name, "losses": (loss,), "aggregation": {"type": "capsule_heads", "final_linear": False}}
    plain_decoder = "causal" not in kind.why_not and name != "axial_transformer"  # whose decoder is another stack
    head = XFormerForCausalLM if plain_decoder else XFormerForMaskedLM
    config = XFormerConfig(**{**GEOMETRY, "attention": attention})
    model = head(config).train()
    ids = tokens(2, 9, high=50)
    output = model(ids, labels=ids)
    output.loss.backward()
    assert set(output.aux_losses) >= {"disagreement_subspace", "disagreement_output"}
    for layer in model.model.trunk.layers:
        assert layer.attention.o_proj is None and layer.attention.aggregation.votes.grad.abs().sum() > 0

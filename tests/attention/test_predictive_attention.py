"""Predictive and evolving attention: the equations with the convolution as a sum of shifts, limits, strictness."""

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.attention.predictive_attention import ScoreRowsLayer
from hf_xformers.core.cache import XFormerCache
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    allowed_pairs,
    build_layers,
    check_contract,
    make_context,
    mixes,
    run_layers,
    softmax_by_rows,
    split_heads,
    vectors,
)
from tests.helpers import close

PAT = {"form": "pat", "alpha": 0.7}
FORMS = [{}, PAT, {"alpha": 0.2, "beta": 0.6, "kernel": 5, "activation": "relu"}, {"kernel": 1}]


def build(count=3, causal=False, cross=False, config=None, **fields):
    spec = {"type": "predictive_attention", **fields}
    if not cross:
        return build_layers(spec, count, causal, **(config or {}))
    given = {"is_decoder": True, "is_encoder_decoder": True, "attention": spec, "cross_attention": spec}
    made = XFormerConfig(**GEOMETRY, **given)
    torch.manual_seed(0)
    layers = [made.cross_attention.build(made, layer_idx=index, cross=True).double().eval() for index in range(count)]
    for parameter in (p for layer in layers for p in layer.parameters()):
        parameter.data.normal_(std=0.3)
    return layers


def shifted_sum(conv, image, causal):
    """The convolution, a number of the kernel at a time; zeros around the image."""
    weight, size = conv.conv.weight, conv.conv.weight.shape[-1]
    (rows, columns), half = image.shape[2:], size // 2
    wide = torch.nn.functional.pad(image, (half, half, size, size))
    top = size - (size - 1 if causal else half)
    total = conv.conv.bias[:, None, None] + torch.zeros_like(image)
    for a in range(size):
        for b in range(size):
            part = wide[:, :, top + a : top + a + rows, b : b + columns]
            total = total + torch.einsum("oc,bcij->boij", weight[:, :, a, b], part)
    return total


@torch.no_grad()
def by_hand(layers, states, causal=False, mask=None, memory=None, seen=None, in_order=None):
    """Outputs of each layer. seen: mask of the memory."""
    in_order, spec = causal if in_order is None else in_order, layers[0].spec
    length, before, outputs = states.shape[1], None, []
    if memory is None:
        allowed = allowed_pairs(length, causal, mask)
    else:
        allowed = torch.ones(1, 1, 1, memory.shape[1]).bool() if seen is None else seen[:, None, None, :]
    inside = allowed if mask is None else allowed & mask[:, None, :, None]
    for layer in layers:
        width, groups = layer.head_dim, layer.num_heads // layer.num_key_value_heads
        read = states if memory is None else memory
        q = split_heads(layer.q_proj(states), width)
        k, v = (split_heads(p(read), width).repeat_interleave(groups, 1) for p in (layer.k_proj, layer.v_proj))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / width**0.5
        if before is not None:
            image = before if spec.form == "pat" else (1 - spec.beta) * scores + spec.beta * before
            found = shifted_sum(layer.score_conv, torch.where(inside, image, 0.0), in_order)
            if spec.function != "none":
                found = torch.where(found > 0, found, (0.01 if spec.function == "leaky_relu" else 0.0) * found)
            own, share = (scores, 1 - spec.alpha) if spec.form == "pat" else (image, spec.alpha)
            scores = (1 - share) * own + share * found
        before = scores
        mixed = torch.einsum("bhij,bhjd->bihd", softmax_by_rows(scores, allowed), v).flatten(2)
        outputs.append(layer.o_proj(mixed))
        states = states + outputs[-1]
    return outputs


@pytest.mark.parametrize("path", ["eager", "sdpa"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fields", FORMS, ids=str)
def test_equation(fields, causal, path):
    layers, states = build(causal=causal, **fields), vectors(4, 6)
    for mask in (None, PADDING):
        found = run_layers(layers, states, make_context(6, causal, padding_mask=mask, implementation=path))
        real = torch.ones(4, 6).bool() if mask is None else mask
        for one, other in zip(found, by_hand(layers, states, causal, mask), strict=True):
            close(one.output[real].detach(), other[real])


@pytest.mark.parametrize("config", [{"num_key_value_heads": 2}, {"head_dim": 6}], ids=str)
def test_geometry(config):
    layers, states = build(config=config), vectors(2, 6)
    for one, other in zip(run_layers(layers, states, make_context(6)), by_hand(layers, states), strict=True):
        close(one.output.detach(), other)


@pytest.mark.parametrize("fields", [{}, PAT], ids=str)
def test_cross_attention(fields):
    layers = build(cross=True, **fields)
    states, memory, mask = vectors(4, 5), vectors(4, 6, seed=1), PADDING[:, :5]
    context = make_context(5, True, padding_mask=mask, memory_padding_mask=PADDING)
    found = run_layers(layers, states, context, memory)
    expected = by_hand(layers, states, False, mask, memory, PADDING, in_order=True)
    for one, other in zip(found, expected, strict=True):
        close(one.output[mask].detach(), other[mask])
    assert set(found[-1].streams) == {"predictive_cross_scores"}


def test_layer_0_and_nothing_carried_are_dense():
    states = vectors(2, 6)
    for fields in ({"alpha": 0.0, "beta": 0.0}, {"form": "pat", "alpha": 1.0}):
        layers, dense = build(**fields), build_layers("dense", 3)
        for layer, plain in zip(layers, dense, strict=True):
            plain.load_state_dict({k: v for k, v in layer.state_dict().items() if "score_conv" not in k})
        expected = run_layers(dense, states, make_context(6))
        for one, other in zip(run_layers(layers, states, make_context(6)), expected, strict=True):
            close(one.output, other.output)
    assert build()[0].score_conv is None


def own_scores(layers, states):
    parts = [(split_heads(layer.q_proj(states), 4), split_heads(layer.k_proj(states), 4)) for layer in layers]
    return [q @ k.mT / 2 for q, k in parts]


def test_running_averages():
    """Without a convolution `evolving` halves what it carries; with one that copies, `pat` averages exponentially."""
    states, context = vectors(2, 6), make_context(6)
    layers = build(alpha=0.0, beta=0.5)
    first, second, third = own_scores(layers, states)
    found = run_layers(layers, states, context, residual=False)[-1].streams["predictive_scores"]
    close(found, first / 4 + second / 4 + third / 2)
    layers = build(**PAT)
    for layer in layers[1:]:
        with torch.no_grad():
            layer.score_conv.conv.weight.zero_()[:, :, 1, 1] = torch.eye(HEADS)
            layer.score_conv.conv.bias.zero_()
    first, second, third = own_scores(layers, states)
    found = run_layers(layers, states, context, residual=False)[-1].streams["predictive_scores"]
    close(found, 0.3 * (0.3 * first + 0.7 * second) + 0.7 * third)


def leak(layers):
    """How much earlier outputs change when the last two tokens do."""
    states, changed = vectors(1, 9), vectors(1, 9)
    changed[:, 7:] = vectors(1, 2, seed=8)
    one, other = (run_layers(layers, x, make_context(9, True))[-1].output[:, :7] for x in (states, changed))
    return (one - other).abs().max().item()


def test_nothing_of_later_tokens(monkeypatch):
    """Neither hiding later keys in the image nor reading earlier rows alone is enough."""
    assert leak(build(causal=True)) == 0.0
    rows_alone = build(causal=True)
    monkeypatch.setattr(type(rows_alone[0]), "_visible", lambda self, scores, context: scores)
    assert leak(rows_alone) > 1e-4
    monkeypatch.undo()
    hiding_alone = build(causal=True)
    for layer in hiding_alone[1:]:
        layer.score_conv.above, layer.score_conv.conv.padding = 0, (1, 1)
    assert leak(hiding_alone) > 1e-4


@pytest.mark.parametrize("fields", [{}, PAT, {"kernel": 5}], ids=str)
def test_cache(fields):
    """Token by token and in pieces as at once, left padding included; what is kept beside keys and values."""
    layers, states = build(causal=True, **fields), vectors(2, 12)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, :4] = False
    expected = run_layers(layers, states, make_context(12, True, padding_mask=mask))[-1].output
    cache, found, past = XFormerCache([ScoreRowsLayer() for _ in layers]), [], 0
    for size in (1, 4, 1, 1, 5):
        context = make_context(size, True, past=past, padding_mask=mask[:, : past + size])
        found.append(run_layers(layers, states[:, past : past + size], context, cache=cache)[-1].output)
        past += size
    close(torch.cat(found, 1)[mask], expected[mask])
    kept = {name: rows.shape for name, rows in cache.layers[2].rows.items()}
    assert kept == {"predictive": (2, HEADS, fields.get("kernel", 3) - 1, 12)} and not cache.layers[0].rows
    cache.reorder_cache(torch.tensor([1, 1]))
    rows = cache.layers[2].rows["predictive"]
    assert torch.equal(rows[0], rows[1])
    with pytest.raises(ValueError, match="cannot forget its last tokens"):
        cache.layers[2].crop(-1)


def test_cache_without_a_place():
    from transformers.cache_utils import DynamicCache

    with pytest.raises(ValueError, match="keeps rows of scores.*DynamicCache has no place for"):
        run_layers(build(causal=True), vectors(1, 3), make_context(3, True), cache=DynamicCache())


def test_convolution_stays_in_single_precision():
    layers = [layer.to(torch.bfloat16) for layer in build()]
    results = run_layers(layers, vectors(1, 6).to(torch.bfloat16), make_context(6))
    assert layers[1].score_conv.conv.weight.dtype == torch.float32
    assert results[-1].streams["predictive_scores"].dtype == torch.float32
    assert results[-1].output.dtype == torch.bfloat16


MIXES = {
    "pat": {"attention": {"type": "predictive_attention", **PAT}, "position": "alibi", "residual": "pre_ln"},
}


@pytest.mark.parametrize("case", mixes(MIXES), ids=str)
def test_contract(case):
    check_contract(case)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alpha": 1.5}, r"`alpha` in \[0, 1\]"),
        ({"beta": -0.1}, r"`beta` in \[0, 1\]"),
        ({"kernel": 4}, "an odd `kernel`"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ValueError, match=message):
        XFormerConfig(**GEOMETRY, attention={"type": "predictive_attention", **fields})


def test_layers_that_do_not_fit():
    spec = "predictive_attention"
    with pytest.raises(ValueError, match="shares tensors between layers"):
        XFormerConfig(**GEOMETRY, attention=spec, per_layer_config={1: {"num_attention_heads": 2}})
    with pytest.raises(ValueError, match="reads what layer 0 owns"):
        XFormerConfig(**GEOMETRY, attention=spec, per_layer_config={0: {"attention": "dense"}})
    with pytest.raises(ValueError, match="the decoder's `attention` is 'dense'"):
        XFormerConfig(**GEOMETRY, cross_attention=spec, is_encoder_decoder=True)

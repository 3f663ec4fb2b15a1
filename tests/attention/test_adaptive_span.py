"""Adaptive span: gradients against the equation, its reach, penalty, relative keys and cache."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.attention.shared.spans import SpanCacheLayer
from tests.attention.references.softmax import adaptive_span as by_equation
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
    build_layers,
    make_context,
    run_layers,
    small_blocks,
    split_heads,
    vectors,
)
from tests.helpers import close, make_strong, tokens


def build(count=1, causal=True, spans=None, config=None, **fields):
    """spans: z in tokens, for every head."""
    spec = {"type": "adaptive_span", "max_span": 12, "ramp": 3, **fields}
    layers = build_layers(spec, count, causal, **(config or {}))
    if spans is not None:
        for layer in layers:
            with torch.no_grad():
                layer.span.copy_(torch.tensor(spans, dtype=torch.float64) / layer.max_span)
    return layers


SPANS = [0.0, 1.7, 2.0, 7.3]


@pytest.mark.parametrize("relative_keys", [True, False])
def test_gradients(relative_keys):
    """All parameters, the spans among them, against the gradient of the equation written with tensors (other
    paths have the same)."""
    (layer,) = build(spans=SPANS, relative_keys=relative_keys, loss_coef=0.0)
    states = vectors(2, 9)
    result = run_layers([layer], states, make_context(9, True))[0].output
    probe = vectors(2, 9, seed=4)
    names, parameters = zip(*layer.named_parameters())
    found = torch.autograd.grad((result * probe).sum(), parameters)
    q, k, v = (split_heads(part(states), 4) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    x = torch.arange(9)[:, None] - torch.arange(9) - 1
    scores = q @ k.transpose(2, 3) / 2
    if relative_keys:
        scores = scores + torch.einsum("bhid,ijd->bhij", q, layer.relative_keys[x.clamp(0, 11)]) / 2
    m = ((3 + 12 * layer.span[:, None, None] - x) / 3).clamp(0, 1) * (x >= 0)
    m = torch.where(m > 0, m, 0.0)
    powers = m * scores.exp()
    weights = powers / torch.where(x.amax(1)[:, None] >= 0, powers.sum(-1, keepdim=True), 1.0)
    expected = layer.o_proj((weights @ v).transpose(1, 2).flatten(2))
    close(result, expected)
    for name, one, other in zip(names, found, torch.autograd.grad((expected * probe).sum(), parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_reach_is_exact():
    """m > 0 within reach, and nowhere beyond."""
    for spans in (SPANS, [0.0, 0.5, 8.999, 9.0], [12.0, 11.0, 10.0, 0.001]):
        (layer,) = build(spans=spans)
        z = layer.spans()
        mask = layer._mask(1 + torch.arange(30), z[:, None])
        for row, reach in zip(mask, layer._reach(z, make_context(1, True)), strict=True):
            assert (row[:reach] > 0).all() and (row[reach:] == 0).all()
            assert (row[1:] <= row[:-1]).all() and row[0] == 1  # non-increasing, from 1


@pytest.mark.parametrize("relative_keys", [True, False])
def test_dominating_keys_out_of_reach(relative_keys):
    """A key far away with an enormous score does not take the precision of those in reach."""
    (layer,) = build(spans=[1.0] * 4, relative_keys=relative_keys, ramp=1, loss_coef=0.0)
    layer = layer.float()
    states = vectors(1, 9).float()
    states[:, 0] *= 1e4
    for implementation in ("eager", "sdpa"):
        with small_blocks(2):
            context = make_context(9, True, implementation=implementation)
            output = run_layers([layer], states, context)[0].output
            near = run_layers([layer], states[:, 4:], make_context(5, True, implementation=implementation))[0].output
        slopes = torch.autograd.grad(output[:, -1].sum(), list(layer.parameters()))
        assert all(slope.isfinite().all() for slope in slopes)
        close(output[:, -1], near[:, -1], 1e-4)


# ------------------------------------------------------------------------------------------------ spans and penalty


@pytest.mark.parametrize("dynamic", [False, True])
def test_loss(dynamic):
    """coef * the mean span in tokens, over heads, and over real tokens where each has its own."""
    (layer,) = build(spans=None if dynamic else SPANS, dynamic=dynamic, loss_coef=0.01)
    states = vectors(4, 6)
    loss = run_layers([layer], states, make_context(6, True, padding_mask=PADDING))[0].aux_losses["span"]
    if dynamic:
        z = 12 * torch.sigmoid(layer.span_proj(states))
        close(loss, 0.01 * z[PADDING].mean())
    else:
        close(loss.detach(), torch.tensor(0.01 * sum(SPANS) / 4, dtype=torch.float64))
    (silent,) = build(loss_coef=0.0)
    assert run_layers([silent], states, make_context(6, True))[0].aux_losses is None


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_spans_stay_in_their_interval(optimizer):
    """Under the penalty alone spans shrink to 0 and stay there; a reward brings them back at once, up to 1."""
    (layer,) = build(spans=[3.0, 6.0, 9.0, 12.0])
    make = {"sgd": lambda p: torch.optim.SGD(p, lr=0.01), "adam": lambda p: torch.optim.Adam(p, lr=0.03)}[optimizer]
    step = make([layer.span])
    seen = []
    for number in range(300):
        loss = layer.spans().mean() * (1 if number < 150 else -1)
        step.zero_grad()
        loss.backward()
        step.step()
        seen.append(layer.spans().detach())
        assert (layer.span > -0.6).all() and (layer.span < 1.6).all()  # momentum goes on for a while
    seen = torch.stack(seen)
    assert (seen[:100].diff(dim=0) <= 0).all()
    assert (seen[149] == 0).all() and (seen[180] > 0).all() and (seen[-1] == 12).all()


def test_start():
    for start in (0.0, 0.3, 1.0):
        (layer,) = build(start=start)
        layer.initialize(layer.config, torch.nn.init)
        close(layer.spans(), torch.full((4,), 12 * start, dtype=torch.float64))
        assert 0.8 < layer.relative_keys.std() < 1.2
    (layer,) = build(start=0.3, dynamic=True)
    layer.initialize(layer.config, torch.nn.init)
    close(layer.spans(torch.zeros(1, 1, WIDTH).double()).flatten(), torch.full((4,), 3.6, dtype=torch.float64))


# ------------------------------------------------------------------------------------------------ relative keys


def test_relative_keys_are_shared():
    """One table for all heads and layers, owned by the first, trained by all."""
    layers = build(3, spans=SPANS)
    assert [layer.relative_keys is not None for layer in layers] == [True, False, False]
    assert layers[0].relative_keys.shape == (12, 4)
    states = vectors(1, 6)
    results = run_layers(layers, states, make_context(6, True))
    for layer, result in zip(layers, results, strict=True):
        close(
            result.output.detach(),
            by_equation(layer, states, None, True, relative=layers[0].relative_keys)[0].detach(),
        )
        states = states + result.output.detach()
    apart = run_layers(layers, vectors(1, 6), make_context(6, True), residual=False)[-1]
    (slope,) = torch.autograd.grad(apart.output.sum(), layers[0].relative_keys)
    assert (slope[:5] != 0).any() and (slope[5:] == 0).all()
    assert build(causal=False)[0].relative_keys.shape == (25, 4)


# ------------------------------------------------------------------------------------------------ caches, cost


def test_weights_over_a_window():
    """Weights asked for while decoding cover the whole text; forgotten tokens have none."""
    config = XFormerConfig(**GEOMETRY, is_decoder=True, attention={"type": "adaptive_span", "max_span": 3, "ramp": 2})
    torch.manual_seed(0)
    model = make_strong(XFormerForCausalLM(config).double().eval())
    ids = tokens(1, 9, high=50)
    with torch.no_grad():
        full = model(input_ids=ids, output_attentions=True).attentions
        cache = model(input_ids=ids[:, :8], use_cache=True).past_key_values
        assert all(isinstance(layer, SpanCacheLayer) and layer.keys.shape[2] <= 3 for layer in cache.layers)
        last = model(input_ids=ids[:, 8:], past_key_values=cache, output_attentions=True).attentions
    for one, other in zip(last, full, strict=True):
        assert one.shape == (1, HEADS, 1, 9)
        close(one, other[:, :, 8:])

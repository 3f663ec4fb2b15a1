"""Adaptive span against the dense equation, and its trimming, penalty and cache."""

import math

import pytest
import torch
from transformers.cache_utils import DynamicCache

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.attention import adaptive_span
from hf_xformers.attention.adaptive_span import AdaptiveSpanAttention, SpanCacheLayer
from hf_xformers.core.cache import make_cache
from hf_xformers.ops.score_terms import window as window_attention
from hf_xformers.position.t5_relative_bias import T5RelativeBias, T5RelativeBiasSpec
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
    build_layers,
    check_compile,
    check_contract,
    make_context,
    mixes,
    run_layers,
    saved_sizes,
    small_blocks,
    split_heads,
    vectors,
)
from tests.helpers import NO_DROPOUT, close, make_strong, tokens

PATHS = ("literal", "blocks", "tiles")


@pytest.fixture
def path(request, monkeypatch):
    """The literal equation, small blocks of queries (differentiated by torch) or small tiles (with a backward pass of
    their own); spans rounded up to few tokens."""
    if request.param == "literal":
        yield {"implementation": "eager"}
    else:
        monkeypatch.setattr(adaptive_span, "TRIM", 2)
        monkeypatch.setattr(window_attention, "_ROWS", 2)
        monkeypatch.setattr(window_attention, "_SCORES", 20)
        if request.param == "blocks":
            monkeypatch.setattr(AdaptiveSpanAttention, "_tiles_apply", lambda *_: False)
        with small_blocks(2):
            yield {"implementation": "sdpa"}


each_path = pytest.mark.parametrize("path", PATHS, indirect=True)


def build(count=1, causal=True, spans=None, config=None, **fields):
    """spans: z in tokens, for every head."""
    spec = {"type": "adaptive_span", "max_span": 12, "ramp": 3, **fields}
    layers = build_layers(spec, count, causal, **(config or {}))
    if spans is not None:
        for layer in layers:
            with torch.no_grad():
                layer.span.copy_(torch.tensor(spans, dtype=torch.float64) / layer.max_span)
    return layers


@torch.no_grad()
def by_hand(layer, states, causal, mask=None, relative=None, bias=None, segments=None):
    """m(x) e^s over its sum, one pair of tokens at a time -> output [B, T, D], weights [B, H, T, T]."""
    spec, d, groups = layer.spec, layer.head_dim, layer.num_key_value_groups
    gap, longest, (batch, length) = 0 if spec.include_self else 1, layer.max_span, states.shape[:2]
    q, k, v = (split_heads(part(states), d) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    z = layer.spans(states)
    z = z if spec.dynamic else z[None, :, None].expand(batch, -1, length)
    weights = torch.zeros(batch, HEADS, length, length, dtype=torch.float64)
    for b in range(batch):
        for h in range(HEADS):
            for i in range(length):
                powers = torch.zeros(length, dtype=torch.float64)
                for j in range(length):
                    x = (i - j if causal else abs(i - j)) - gap
                    if x < 0 or x >= longest or (mask is not None and not mask[b, j]):
                        continue
                    if segments is not None and segments[b, i] != segments[b, j]:
                        continue
                    m = min(max((spec.ramp + float(z[b, h, i]) - x) / spec.ramp, 0.0), 1.0)
                    key = k[b, h // groups, j]
                    if relative is not None:
                        key = key + relative[x if causal else i - j + longest - 1 + gap]
                    score = float(q[b, h, i] @ key) / math.sqrt(d) + (0.0 if bias is None else float(bias[h, i, j]))
                    powers[j] = m * math.exp(score)
                if powers.sum() > 0:
                    weights[b, h, i] = powers / powers.sum()
    mixed = torch.einsum("bhij,bhjd->bihd", weights, v.repeat_interleave(groups, 1)).flatten(2)
    return layer.o_proj(mixed), weights


SPANS = [0.0, 1.7, 2.0, 7.3]


@each_path
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both_sides"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"include_self": True},
        {"relative_keys": False},
        {"relative_keys": False, "include_self": True, "max_span": 3},
        {"max_span": 2, "ramp": 5},
        {"dynamic": True, "max_span": 4},
        {"dynamic": True, "relative_keys": False, "include_self": True},
        {"config": {"num_key_value_heads": 2}},
        {"relative_keys": False, "config": {"num_key_value_heads": 2}},
    ],
    ids=[
        "plain",
        "itself",
        "engine",
        "engine_itself",
        "short",
        "dynamic",
        "dynamic_itself",
        "grouped",
        "engine_grouped",
    ],
)
def test_equation(path, causal, fields):
    (layer,) = build(causal=causal, spans=None if fields.get("dynamic") else SPANS, **fields)
    states = vectors(4, 9)
    mask = torch.nn.functional.pad(PADDING, (2, 1), value=False)
    mask[0] = True
    for given in (None, mask):
        (result,) = run_layers([layer], states, make_context(9, causal, padding_mask=given, **path))
        output, weights = by_hand(layer, states, causal, given, layer.relative_keys)
        close(result.output.detach(), output)
        if path["implementation"] == "eager":
            close(result.weights.detach(), weights)


@each_path
@pytest.mark.parametrize("relative_keys", [True, False])
def test_gradients_of_both_paths(path, relative_keys):
    """All parameters, the spans among them, against the gradient of the equation written with tensors."""
    (layer,) = build(spans=SPANS, relative_keys=relative_keys, loss_coef=0.0)
    states = vectors(2, 9)
    result = run_layers([layer], states, make_context(9, True, **path))[0].output
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


@each_path
@pytest.mark.parametrize("relative_keys", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
def test_position_bias_and_packed_documents(path, relative_keys, dynamic):
    position = T5RelativeBias(XFormerConfig(**GEOMETRY), T5RelativeBiasSpec(num_buckets=8, max_distance=10)).double()
    (layer,) = build(spans=None if dynamic else SPANS, relative_keys=relative_keys, dynamic=dynamic)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 1, 1]])
    context = make_context(9, True, segment_ids=segments, **path)
    context.shared["score_bias"] = position
    bias = position.block(context.query_index, context.key_index).detach()
    states = vectors(2, 9)
    expected = by_hand(layer, states, True, None, layer.relative_keys, bias, segments)[0]
    close(run_layers([layer], states, context)[0].output.detach(), expected)


@each_path
def test_wide_spans_are_dense_attention(path):
    """With the token itself, and spans as long as the text: full causal attention."""
    (layer,), (dense,) = (
        build(relative_keys=False, include_self=True, spans=[9.0] * 4),
        build_layers("dense", causal=True),
    )
    dense.load_state_dict({name: value for name, value in layer.state_dict().items() if name != "span"})
    states = vectors(2, 9)
    expected = run_layers([dense], states, make_context(9, True))[0].output
    close(run_layers([layer], states, make_context(9, True, **path))[0].output, expected)


@pytest.mark.parametrize("relative_keys", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_trimming_changes_nothing(monkeypatch, relative_keys, causal):
    """Trimmed to the longest span, not trimmed, and trimmed for each head."""
    (layer,) = build(causal=causal, spans=SPANS, relative_keys=relative_keys, max_span=20)
    states, outputs = vectors(2, 19), []
    for reach in (lambda self, *_: [20] * 4, lambda self, *_: [11] * 4, lambda self, *_: [3, 5, 5, 11]):
        monkeypatch.setattr(AdaptiveSpanAttention, "_reach", reach)
        monkeypatch.setattr(adaptive_span, "TRIM", 1)
        with small_blocks(3):
            outputs.append(run_layers([layer], states, make_context(19, causal))[0].output)
    close(outputs[0], outputs[1], 1e-12)
    close(outputs[0], outputs[2], 1e-12)


def test_reach_is_exact():
    """m > 0 within reach, and nowhere beyond."""
    for spans in (SPANS, [0.0, 0.5, 8.999, 9.0], [12.0, 11.0, 10.0, 0.001]):
        (layer,) = build(spans=spans)
        z = layer.spans()
        mask = layer._mask(1 + torch.arange(30), z[:, None])
        for row, reach in zip(mask, layer._reach(z, make_context(1, True)), strict=True):
            assert (row[:reach] > 0).all() and (row[reach:] == 0).all()
            assert (row[1:] <= row[:-1]).all() and row[0] == 1  # non-increasing, from 1


def test_flat_masks_have_no_gradient():
    """Where every m is 0 or 1, off the kinks, the weights do not depend on the span."""
    for causal in (True, False):
        (layer,) = build(causal=causal, spans=[4.5] * 4, ramp=1, max_span=12, loss_coef=0.0)
        for relative in (layer.relative_keys, None):
            output = run_layers([layer], vectors(1, 5), make_context(5, causal))[0].output
            (slope,) = torch.autograd.grad(output.sum(), layer.span)
            assert (slope == 0).all()


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


@each_path
def test_first_token_reads_nothing(path):
    (layer,) = build(spans=SPANS)
    states = vectors(2, 3).requires_grad_()
    output = run_layers([layer], states, make_context(3, True, **path))[0].output
    assert torch.equal(output[:, 0], layer.o_proj.bias.expand(2, -1))
    (slope,) = torch.autograd.grad(output[:, 0].sum(), states)
    assert (slope == 0).all()


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


def test_loss_of_a_model():
    config = XFormerConfig(
        **GEOMETRY, is_decoder=True, attention={"type": "adaptive_span", "start": 0.5, "loss_coef": 0.01}
    )
    model, ids = XFormerForCausalLM(config).eval(), tokens(2, 6, high=50)
    output = model(input_ids=ids, labels=ids)
    assert set(output.aux_losses) == {"span"}
    close(output.aux_losses["span"].detach(), torch.tensor(3 * 0.01 * 0.5 * 24), 1e-6)
    plain = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    close(output.loss, plain + 0.36, 1e-5)


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


def test_training_shortens_spans_that_do_not_help():
    config = XFormerConfig(
        **GEOMETRY, **NO_DROPOUT, is_decoder=True, attention={"type": "adaptive_span", "start": 0.9, "loss_coef": 1.0}
    )
    torch.manual_seed(0)
    model = XFormerForCausalLM(config)
    ids = tokens(4, 12, high=50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    spans = [layer.attention.span for layer in model.model.trunk.layers]
    before = torch.stack(spans).detach()
    for _ in range(5):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    assert (torch.stack(spans) < before - 0.05).all()


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
        close(result.output.detach(), by_hand(layer, states, True, None, layers[0].relative_keys)[0])
        states = states + result.output.detach()
    apart = run_layers(layers, vectors(1, 6), make_context(6, True), residual=False)[-1]
    (slope,) = torch.autograd.grad(apart.output.sum(), layers[0].relative_keys)
    assert (slope[:5] != 0).any() and (slope[5:] == 0).all()
    assert build(causal=False)[0].relative_keys.shape == (25, 4)


def test_relative_keys_without_an_owner():
    with pytest.raises(ValueError, match="of layer 1 reads what layer 0 owns, which has 'dense'"):
        XFormerConfig(**GEOMETRY, attention="adaptive_span", per_layer_config={0: {"attention": "dense"}})


# ------------------------------------------------------------------------------------------------ caches, cost


@pytest.mark.parametrize("fields", [{}, {"relative_keys": False}, {"include_self": True}, {"dynamic": True}], ids=str)
@pytest.mark.parametrize("kind", ["window", "growing"])
def test_cache_by_hand(fields, kind):
    dynamic = fields.get("dynamic", False)
    (layer,) = build(spans=None if dynamic else [0.0, 1.0, 0.5, 2.2], max_span=6, **fields)
    states = vectors(2, 12)
    expected = by_hand(layer, states, True, None, layer.relative_keys)[0]
    cache = make_cache(layer.config) if kind == "window" else DynamicCache()
    found, done = [], 0
    for length in (5, 1, 4, 1, 1):
        with small_blocks(2):
            context = make_context(length, True, past=done)
            found.append(run_layers([layer], states[:, done : done + length], context, cache=cache)[0].output)
        done += length
        assert cache.get_seq_length() == done
        if (
            kind == "window"
        ):  # z + ramp = 5.2: six distances, of which the next token itself is one where it reads itself
            needed = 5 if fields.get("include_self") else 6
            assert cache.layers[0].keys.shape[2] == min(done, needed)
    close(torch.cat(found, 1).detach(), expected)


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


def test_static_cache():
    config = XFormerConfig(**GEOMETRY, is_decoder=True, attention={"type": "adaptive_span", "max_span": 4, "ramp": 2})
    torch.manual_seed(0)
    model = make_strong(XFormerForCausalLM(config).double().eval())
    ids, mask = tokens(2, 5, high=50), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "attention_mask": mask}
    expected = model.generate(input_ids=ids, **settings)
    output = model.generate(input_ids=ids, cache_implementation="static", disable_compile=True, **settings)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("relative_keys", [True, False])
def test_what_is_kept(relative_keys):
    """What is kept grows with T, not with T x T."""
    (layer,) = build(spans=[6.0] * 4, max_span=600, relative_keys=relative_keys)
    totals = []
    for length in (300, 600):
        with small_blocks(8):
            states = vectors(1, length)
            sizes = saved_sizes(lambda: run_layers([layer], states, make_context(length, True)))
        assert sizes[0] < length * length / 4
        totals.append(sum(sizes))
    assert totals[1] < 2.2 * totals[0]


def test_refusals():
    with pytest.raises(ValueError, match="cannot read a memory"):
        XFormerConfig(**GEOMETRY, is_encoder_decoder=True, cross_attention="adaptive_span")


SHORT = {"type": "adaptive_span", "max_span": 5, "ramp": 2, "start": 0.3}
MIXES = {
    "span_windows": {"attention": SHORT, "num_key_value_heads": 2},
    "span_engine": {"attention": {**SHORT, "relative_keys": False}, "position": "rotary"},
    "span_bias": {
        "attention": {**SHORT, "include_self": True, "relative_keys": False},
        "position": {"type": "t5_relative_bias", "num_buckets": 8},
    },
    "span_dynamic": {"attention": {**SHORT, "dynamic": True}},
}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("case", mixes(MIXES), ids=str)
def test_contract(case, monkeypatch):
    monkeypatch.setattr(adaptive_span, "TRIM", 2)
    with small_blocks(3):
        check_contract(case)


COMPILED = [
    *mixes({"span_windows": MIXES["span_windows"]}, ("decoder",)),
    *mixes({"span_dynamic": MIXES["span_dynamic"]}, ("encoder",)),
]


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compile(case):
    with small_blocks(5):
        check_compile(case)


@each_path
@pytest.mark.parametrize("relative_keys", [True, False])
def test_dropout_acts_on_weights(path, relative_keys):
    fields = {"config": {"attention_probs_dropout_prob": 0.5}, "relative_keys": relative_keys}
    (layer,) = build(spans=SPANS, include_self=True, **fields)
    states = vectors(1, 6)
    expected = run_layers([layer], states, make_context(6, True, **path))[0].output.detach()
    torch.manual_seed(0)
    with torch.no_grad():
        draws = torch.stack(
            [run_layers([layer.train()], states, make_context(6, True, **path))[0].output for _ in range(300)]
        )
    assert (draws[0] - draws[1]).abs().max() > 1e-3
    assert ((draws.mean(0) - expected).abs() < 5 * draws.std(0) / 300**0.5 + 1e-12).all()

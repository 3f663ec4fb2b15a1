"""Attention by products of features (trigonometric, ReLU, DPFP, those of random feature attention) against its
equations, one query and one key at a time, and against the kernels that random features estimate."""

import itertools
import math

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_xformers import XFormerConfig
from hf_xformers.ops.linear.feature_maps import dpfp_reference
from hf_xformers.position.rotary import RotaryPosition, RotarySpec
from hf_xformers.variants.performer_v1 import XFPerformerV1Config
from tests.attention.linear_helpers import check_no_future, in_pieces, state_sizes, turned
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
    allowed_pairs,
    build_layers,
    make_context,
    run_layers,
    saved_sizes,
    split_heads,
    vectors,
)
from tests.helpers import close

D = WIDTH // HEADS
SMALL = {"num_features": 10, "chunk_size": 4}
SPECS = {
    "trigonometric": {"type": "performer", "feature_kind": "trigonometric", **SMALL},
    "guarded": {"type": "performer", "feature_kind": "trigonometric", "min_denominator": 0.6, **SMALL},
    "performer_relu": {"type": "performer", "feature_kind": "relu", **SMALL},
    "arccos": {"type": "arccos_attention", **SMALL},
    "arccos_plain": {"type": "arccos_attention", "num_features": None, "chunk_size": 4},
    "arccos_unit": {"type": "arccos_attention", "normalize_qk": True, **SMALL},
    "rfa": {"type": "rfa", "tau": 0.8, **SMALL},
    "rfa_guarded": {"type": "rfa", "min_denominator": 2.0, **SMALL},
    "rfa_arccos": {"type": "rfa", "feature_map": "arccos", "learn_sigma": False, **SMALL},
    "rfa_gate": {"type": "rfa", "gate": True, **SMALL},
    "dpfp": {"type": "dpfp", "nu": 2, "chunk_size": 4},
    "dpfp_sums": {"type": "dpfp", "attention_normalize": False, "chunk_size": 4},
    "dpfp_raw": {"type": "dpfp", "nu": 1, "sum_normalize": False, "eps": 0.5, "chunk_size": 4},
    "dpfp_raw_sums": {"type": "dpfp", "sum_normalize": False, "attention_normalize": False, "scale": 0.3},
}
BOTH = [name for name in SPECS if name != "rfa_gate"]
each_path = pytest.mark.parametrize("implementation", ["eager", "sdpa"])
each_spec = pytest.mark.parametrize("name", SPECS)


def build(name, **fields):
    (layer,) = build_layers(SPECS[name], **fields)
    if getattr(layer, "num_rows", None):
        layer.directions.copy_(layer.draw(0))
    if getattr(layer, "sigma", None) is not None:
        layer.sigma.data.add_(1.0)
    return layer


def features(layer, x, head):
    """Of one vector: numbers, and the logarithm of a factor of the vector."""
    spec, log = layer.spec, 0.0
    if spec.type == "dpfp":
        found = dpfp_reference(x, spec.nu)
        return (found / found.sum() if spec.sum_normalize else found), log
    if spec.type == "rfa" or (spec.type == "arccos_attention" and spec.normalize_qk):
        x = x / (x.norm() ** 2 + 1e-6) ** 0.5
    if spec.type == "performer":
        x = x * D**-0.25
    rows = layer.directions if layer.num_rows is not None else None
    if spec.type == "rfa":
        rows = rows[head] * (layer.sigma[head] if spec.learn_sigma else 1.0) / spec.tau
    kind = {"performer": "feature_kind", "rfa": "feature_map"}.get(spec.type)
    kind = "relu" if kind is None else getattr(spec, kind)
    if kind in ("relu", "arccos"):
        products = x if rows is None else torch.stack([row @ x for row in rows]) / len(rows) ** 0.5
        return torch.tensor([max(float(y), 0.0) + 1e-3 for y in products], dtype=torch.float64), log
    if kind == "trigonometric":
        log = float(x @ x) / 2
    angles = [float(row @ x) for row in rows]
    found = [math.cos(y) for y in angles] + [math.sin(y) for y in angles]
    return torch.tensor(found, dtype=torch.float64) / len(rows) ** 0.5, log


@torch.no_grad()
def by_hand(layer, states, allowed, memory=None, turn=lambda x: x):
    read = states if memory is None else memory
    q, k = turn(split_heads(layer.q_proj(states), D)), turn(split_heads(layer.k_proj(read), D))
    v = split_heads(layer.v_proj(read), D)
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    batch, _, queries, _ = q.shape
    allowed = allowed.expand(batch, HEADS, queries, k.shape[2])
    gates = None
    if getattr(layer, "decay_proj", None) is not None:
        gates = torch.sigmoid(layer.decay_proj(states)).transpose(1, 2)
    least, eps = getattr(layer.spec, "min_denominator", 0.0), getattr(layer.spec, "eps", 0.0)
    weights = torch.zeros(allowed.shape, dtype=torch.float64)
    for b in range(batch):
        for h in range(HEADS):
            of_keys = [features(layer, x, h) for x in k[b, h]]
            for i in range(queries):
                phi_q, _ = features(layer, q[b, h, i], h)
                seen = [j for j in range(k.shape[2]) if allowed[b, h, i, j]]
                factors = {}
                for j in seen:
                    factors[j] = math.exp(of_keys[j][1])
                    if gates is not None:
                        passed = [float(gates[b, h, n]) for n in range(j + 1, i + 1) if allowed[b, h, -1, n]]
                        factors[j] *= float(1 - gates[b, h, j]) * math.prod(passed)
                products = {j: float(phi_q @ of_keys[j][0]) * factors[j] for j in seen}
                if layer.spec.type == "dpfp" and not layer.spec.has_denominator:
                    scale = D**-0.5 if layer.spec.scale is None else layer.spec.scale
                    total, top = 1 / scale, 1.0
                else:
                    top = max(factors.values(), default=1.0)
                    total = sum(products.values()) / top + eps
                    if (layer.spec.type, getattr(layer.spec, "feature_map", "")) != ("rfa", "arccos"):
                        trigonometric = getattr(layer.spec, "feature_kind", "trigonometric") == "trigonometric"
                        if trigonometric and abs(total) < least:
                            total = -least if total < 0 else least
                for j in seen:
                    weights[b, h, i, j] = products[j] / top / total if total else 0.0
    return layer.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights


@each_path
@each_spec
@pytest.mark.parametrize("causal", [False, True])
def test_equation(name, implementation, causal):
    if name == "rfa_gate" and not causal:
        pytest.skip("it is causal")
    layer = build(name, causal=causal, num_key_value_heads=2)
    states = vectors(4, 6)
    for mask in (None, PADDING):
        context = make_context(6, causal, padding_mask=mask, implementation=implementation)
        (result,) = run_layers([layer], states, context)
        output, weights = by_hand(layer, states, allowed_pairs(6, causal, mask))
        close(result.output.detach(), output)
        if implementation == "eager":
            close(result.weights.detach(), weights)


@each_path
@pytest.mark.parametrize("name", ["guarded", "arccos_unit", "rfa", "rfa_guarded", "dpfp", "dpfp_sums"])
def test_cross_attention(name, implementation):
    layer = build(name, cross=True, is_encoder_decoder=True)
    states, memory = vectors(4, 3), vectors(4, 6, seed=1)
    expected = by_hand(layer, states, PADDING[:, None, None, :], memory)[0]
    context = make_context(3, True, memory_padding_mask=PADDING, implementation=implementation)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    for read in (memory, memory if implementation == "eager" else torch.zeros_like(memory)):  # not looked at again
        close(run_layers([layer], states, context, read, cache)[0].output.detach(), expected)


@each_path
@pytest.mark.parametrize("name", ["trigonometric", "arccos", "rfa_gate", "dpfp"])
def test_rotary_turns_queries_and_keys(name, implementation):
    layer, states = build(name, causal=True), 0.3 * vectors(2, 6)  # angles are made in float32
    context = make_context(6, True, implementation=implementation)
    context.shared["rotation"] = RotaryPosition(D, RotarySpec(theta=50.0)).rotation(torch.arange(6)[None], states)
    (result,) = run_layers([layer], states, context)
    expected, _ = by_hand(layer, states, allowed_pairs(6, True), turn=lambda x: turned(x, 50.0))
    close(result.output.detach(), expected, 1e-6)


@each_spec
def test_token_by_token(name):
    """With a cache in pieces as at once; padding on the left leaves no trace; the state does not grow."""
    layer = build(name, causal=True, num_key_value_heads=2)
    states, mask = vectors(2, 15), torch.ones(2, 15).bool()
    mask[0, :5] = False
    with torch.no_grad():
        for seen in (None, mask):
            expected = run_layers([layer], states, make_context(15, True, padding_mask=seen))[0].output
            for pieces in ((1,) * 15, (6, 1, 1, 5, 1, 1), (1, 14)):
                close(in_pieces(layer, states, pieces, seen)[0], expected)
        assert len(set(state_sizes(layer, vectors(1, 15), (6, 15)))) == 1


@each_spec
def test_no_future(name):
    check_no_future(build(name, causal=True), vectors(2, 9))


@each_spec
def test_gradients(name):
    """Those of the fast path are those of the literal one, for every parameter, in every row."""
    causal, found = name == "rfa_gate" or len(name) % 2 == 0, []
    layer, states = build(name, causal=causal), vectors(4, 6)
    for implementation in ("eager", "sdpa"):
        layer.zero_grad()
        given = states.clone().requires_grad_()
        context = make_context(6, causal, padding_mask=PADDING, implementation=implementation)
        output = run_layers([layer], given, context, residual=False)[0].output
        (output * vectors(4, 6, seed=3)).sum().backward()
        found.append({"": given.grad, **{key: x.grad for key, x in layer.named_parameters() if x.grad is not None}})
    assert found[0].keys() == found[1].keys() and len(found[0]) == 1 + len(list(layer.parameters()))
    for key, expected in found[0].items():
        close(found[1][key], expected, 1e-8)


@pytest.mark.parametrize("name", ["trigonometric", "arccos", "rfa", "dpfp"])
def test_what_is_kept(name):
    """Neither T x T nor T x F numbers."""
    spec = {**SPECS[name], "chunk_size": 64}
    spec |= {} if name == "dpfp" else {"num_features": 128}
    (layer,) = build_layers(spec, causal=True)
    for length in (64, 256):
        sizes = saved_sizes(lambda: run_layers([layer], vectors(1, length), make_context(length, True)))
        assert sizes[0] <= max(length * WIDTH, 17 * HEADS * 256 * D), sizes[:3]


# ------------------------------------------------------------------------------------------- kernels


def mean_output(layer, states, draws=4):
    found = []
    with torch.no_grad():
        for _ in range(draws):
            layer.redraw()
            found.append(run_layers([layer], states, make_context(states.shape[1]))[0].output)
    return torch.stack(found).mean(0)


def kernel_attention(layer, states, kernel):
    """All pairs with a kernel of vectors q, k [B, H, T, d]."""
    with torch.no_grad():
        q, k, v = (split_heads(part(states), D) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        weights = kernel(q, k)
        return layer.o_proj((weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))


def arc_cosine(q, k):
    lengths = q.norm(dim=-1)[..., :, None] * k.norm(dim=-1)[..., None, :]
    angle = torch.acos(((q @ k.mT) / lengths).clamp(-1, 1))
    return lengths * (angle.sin() + (math.pi - angle) * angle.cos())


def of_unit_vectors(q, k, tau=0.8):
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    return torch.exp(q @ k.mT / tau**2)


KERNELS = {
    "trigonometric": lambda q, k: torch.exp(q @ k.mT / D**0.5),
    "arccos": arc_cosine,
    "performer_relu": arc_cosine,
    "rfa": of_unit_vectors,
}


@pytest.mark.parametrize("name", KERNELS)
def test_many_features_give_the_kernel(name):
    """With many features the outputs are those of the kernel in closed form; with fewer they are further off."""
    errors = []
    for count in (64, 4096):
        more = {"kernel_eps": 1e-9} if name in ("arccos", "performer_relu") else {}
        (layer,) = build_layers({**SPECS[name], "num_features": count, **more})
        if name == "rfa":
            layer.sigma.data.fill_(1.0)
        states = vectors(1, 12) * (0.3 if name == "trigonometric" else 1.0)
        mean = mean_output(layer, states)
        exact = kernel_attention(layer, states, KERNELS[name])
        errors.append(float((mean - exact).norm() / exact.norm()))
    assert errors[1] < 0.03 and errors[0] > 3 * errors[1], errors


def test_trigonometric_features_can_be_negative():
    """What tells them from the positive ones: some draws weigh a far key negatively."""
    (layer,) = build_layers({**SPECS["trigonometric"], "num_features": 8})
    layer.directions.copy_(layer.draw(0))
    context = make_context(12, implementation="eager")
    with torch.no_grad():
        weights = run_layers([layer], 4 * vectors(2, 12), context)[0].weights
    assert (weights < -1e-3).any()
    assert not layer.spec.weighs(layer.config)


def test_scaling_queries_and_keys():
    """The arc-cosine kernel knows directions of queries and lengths of keys; with unit vectors, directions alone."""
    for name, scaled in (("arccos", "q_proj"), ("rfa", "q_proj"), ("rfa", "k_proj")):
        spec = {
            **SPECS[name],
            "bias": False,
            **({"kernel_eps": 1e-12, "num_features": 40} if name == "arccos" else {}),
        }
        (layer,) = build_layers(spec)
        layer.directions.copy_(layer.draw(0))
        states, outputs = 10 * vectors(1, 7), []
        with torch.no_grad():
            for _ in range(2):
                outputs.append(run_layers([layer], states, make_context(7))[0].output)
                getattr(layer, scaled).weight.mul_(3.0)
        close(outputs[1], outputs[0], 1e-5)
    layer, states = build("arccos"), vectors(1, 7)
    layer.phi.eps = 0.0
    with torch.no_grad():
        q, k = split_heads(layer.q_proj(states), D), split_heads(layer.k_proj(states), D)
        before = layer.phi(q, layer.directions) @ layer.phi(k, layer.directions).mT
        k[:, :, 2] *= 3.0
        after = layer.phi(q, layer.directions) @ layer.phi(k, layer.directions).mT
    close(after[..., 2], 3 * before[..., 2])
    close(after[..., 3:], before[..., 3:])


def test_first_performer_stays_bounded():
    """Products are at most 1 in magnitude, so that with a denominator of at least 1 no value is read more than once
    per key; beside the smaller one of the component, whose sums of products come near 0."""
    most = []
    for spec in (XFPerformerV1Config().to_dict()["attention"], SPECS["trigonometric"]):
        (layer,) = build_layers({**spec, **SMALL}, causal=True)
        layer.directions.copy_(layer.draw(0))
        states = vectors(64, 24)
        states = states / states.norm(dim=-1, keepdim=True) * WIDTH**0.5
        with torch.no_grad():
            values = split_heads(layer.v_proj(states), D).norm(dim=-1).amax()
            layer.o_proj = torch.nn.Identity()
            output = run_layers([layer], states, make_context(24, True))[0].output
        most.append((output.unflatten(-1, (HEADS, D)).norm(dim=-1).amax() / values).item())
    assert most[0] <= 24 < most[1], most


# ------------------------------------------------------------------------------------------- gates


def test_gate_is_the_recurrence():
    """S and z token by token, as the paper has them."""
    layer, states = build("rfa_gate", causal=True), vectors(2, 11)
    layer.spec.min_denominator = layer.min_denominator = 1e-12
    with torch.no_grad():
        q, k, v = (split_heads(part(states), D) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        gates = torch.sigmoid(layer.decay_proj(states))
        found = torch.zeros_like(v)
        for b in range(2):
            for h in range(HEADS):
                state, norm = torch.zeros(20, D, dtype=torch.float64), torch.zeros(20, dtype=torch.float64)
                for t in range(11):
                    g, phi_k = gates[b, t, h], features(layer, k[b, h, t], h)[0]
                    state = g * state + (1 - g) * torch.outer(phi_k, v[b, h, t])
                    norm = g * norm + (1 - g) * phi_k
                    phi_q = features(layer, q[b, h, t], h)[0]
                    found[b, h, t] = phi_q @ state / (phi_q @ norm)
        expected = layer.o_proj(found.transpose(1, 2).flatten(2))
        close(run_layers([layer], states, make_context(11, True))[0].output, expected)


@pytest.mark.parametrize("logit", [-60.0, 0.4, 60.0])
def test_gates_at_their_ends(logit):
    """Shut, a token sees itself alone; open, all tokens up to now, as without a gate; in between, g^(i - j)."""
    layer, states = build("rfa_gate", causal=True), vectors(2, 9)
    context = make_context(9, True, implementation="eager")
    with torch.no_grad():
        layer.decay_proj.weight.zero_()
        layer.decay_proj.bias.fill_(logit)
        (gated,) = run_layers([layer], states, context)
        fast = run_layers([layer], states, make_context(9, True))[0].output
        plain = build("rfa", causal=True)
        plain.load_state_dict(layer.state_dict(), strict=False)
        plain.phi.scale = layer.phi.scale  # where tau is 1
        (literal,) = run_layers([plain], states, context)
    close(fast, gated.output)
    if logit < 0:
        close(gated.weights, torch.eye(9, dtype=torch.float64).expand_as(gated.weights), 1e-12)
    elif logit > 1:
        close(gated.weights, literal.weights, 1e-9)
    else:
        g = 1 / (1 + math.exp(-logit))
        decay = torch.tensor([[g ** max(i - j, 0) for j in range(9)] for i in range(9)]).double()
        expected = literal.weights * decay
        close(gated.weights, expected / expected.sum(-1, keepdim=True), 1e-6)


def test_long_gated_texts_in_single_precision():
    """The sum of logarithms over a text is far larger than what single precision tells apart."""
    layer, states = build("rfa_gate", causal=True), vectors(1, 1500)
    with torch.no_grad():
        layer.decay_proj.bias.fill_(-12.0)
        layer.decay_proj.weight.mul_(20.0)
        expected = run_layers([layer], states, make_context(1500, True))[0].output
        found = run_layers([layer.float()], states.float(), make_context(1500, True))[0].output
    assert found.dtype == torch.float32
    assert (found.double() - expected).norm() / expected.norm() < 1e-4


# ------------------------------------------------------------------------------------------- draws, DPFP, refusals


def test_draws_of_heads():
    """Each head has rows of its own, orthogonal in blocks; training passes draw anew, evaluation does not."""
    layer, states = build("rfa"), vectors(1, 5)
    rows = layer.draw(0).double()
    assert rows.shape == (HEADS, 10, D) and (rows[0] - rows[1]).abs().max() > 0.1
    gram = rows[2, :D] @ rows[2, :D].T
    close(gram, gram.diagonal().diag(), 1e-5)
    seen = []
    for training in (True, True, False, False, True):
        run_layers([layer.train(training)], states, make_context(5))
        seen.append(layer.directions.clone())
    assert [torch.equal(one, other) for one, other in itertools.pairwise(seen)] == [False, True, True, False]
    close(seen[1], layer.draw(1).double())
    assert build("arccos_plain").num_rows is None and not list(build("arccos_plain").buffers())


def test_keys_that_point_elsewhere_are_orthogonal():
    """Keys in opposite orthants share no feature: what one has written the other does not read."""
    (layer,) = build_layers({"type": "dpfp", "nu": 1, "bias": False, "eps": 0.0}, causal=True)
    one = torch.zeros(1, 3, WIDTH).double()
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj):
            projection.weight.zero_()
            for head in range(HEADS):
                projection.weight[head * D : head * D + 3, 0] = 1.0
        one[0, :, 0] = torch.tensor([1.0, -1.0, 1.0])
        one[0, :, 1] = torch.tensor([0.3, 0.7, -0.2])
        layer.v_proj.weight.zero_()
        layer.v_proj.weight[:, 1] = 1.0
        weights = run_layers([layer], one, make_context(3, True, implementation="eager"))[0].weights[0, 0]
    close(weights, torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0.5, 0, 0.5]]).double(), 1e-12)


def test_dpfp_with_the_delta_rule():
    """It is delta_net with the same features."""
    states = vectors(2, 9)
    outputs = []
    for spec in ({"type": "dpfp", "nu": 2, "update_rule": "delta"}, {"type": "delta_net", "nu": 2}):
        (layer,) = build_layers(spec, causal=True)
        outputs.append(run_layers([layer], states, make_context(9, True))[0].output.detach())
    assert torch.equal(*outputs)


def test_a_vector_of_zeros():
    """It has no direction and, to DPFP, no features: finite outputs and slopes."""
    for name in SPECS:
        layer = build(name, causal=True)
        with torch.no_grad():
            layer.q_proj.bias.zero_()
            layer.k_proj.bias.zero_()
        states = vectors(1, 5)
        states[0, 1:3] = 0.0
        states.requires_grad_()
        output = run_layers([layer], states, make_context(5, True), residual=False)[0].output
        output.sum().backward()
        assert output.isfinite().all() and states.grad.isfinite().all(), name


def test_refusals():
    for fields, message in (
        ({"type": "performer", "kernel_eps": 0.0}, "`kernel_eps` > 0"),
        ({"type": "performer", "min_denominator": 0}, "`min_denominator` > 0"),
        ({"type": "arccos_attention", "num_features": 0}, "`num_features` >= 1, got 0"),
        ({"type": "arccos_attention", "kernel_eps": -1.0}, "`kernel_eps` >= 0"),
        ({"type": "arccos_attention", "kernel_eps": 0, "num_features": 16}, "nothing to read"),
        ({"type": "arccos_attention", "kernel_eps": 0, "num_features": None}, "nothing to read"),
        ({"type": "arccos_attention", "scale": 0.5}, "no scores to scale"),
        ({"type": "rfa", "tau": 0.0}, "`tau` > 0"),
        ({"type": "rfa", "min_denominator": 0.0}, "`min_denominator` > 0"),
        ({"type": "rfa", "redraw_interval": -1}, "`redraw_interval` >= 0"),
        ({"type": "rfa", "scale": 0.5}, "by its `tau`"),
        ({"type": "rfa", "gate": True}, "`gate=False` in an encoder"),
        ({"type": "dpfp", "nu": 0}, "`nu` >= 1, got 0"),
        ({"type": "dpfp", "nu": 8}, "`nu` of at most 7, the different shifts for heads of width 4, got 8"),
        ({"type": "dpfp", "eps": -1}, "`eps` >= 0"),
        ({"type": "dpfp", "scale": 0.5}, "nothing to scale"),
        ({"type": "dpfp", "update_rule": "delta", "sum_normalize": False}, "diverge"),
        ({"type": "dpfp", "update_rule": "delta"}, "`update_rule='sum'` in an encoder"),
    ):
        with pytest.raises(ValueError, match=message):
            XFormerConfig(**GEOMETRY, attention=fields)
    for name in ({"type": "rfa", "gate": True}, {"type": "dpfp", "update_rule": "delta"}):
        with pytest.raises(ValueError, match="in `cross_attention`"):
            XFormerConfig(**GEOMETRY, cross_attention=name, is_decoder=True)

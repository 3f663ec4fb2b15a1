"""Delta networks against the token recurrence, transformers' delta rule, what they overwrite, and the implied
weights."""

from functools import partial

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from hf_xformers import XFormerConfig
from hf_xformers.ops.linear.feature_maps import dpfp_reference
from hf_xformers.position.rotary import RotaryPosition, RotarySpec
from tests.attention.linear_helpers import check_no_future, in_pieces, state_sizes, turned
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
    split_heads,
    vectors,
)
from tests.helpers import close

D = WIDTH // HEADS
SPECS = {
    "dpfp": {"type": "delta_net", "chunk_size": 4},
    "dpfp_1": {"type": "delta_net", "nu": 1, "chunk_size": 3, "bias": False},
    "elu": {"type": "delta_net", "feature_map": "elu", "chunk_size": 5},
    "favor": {"type": "delta_net", "feature_map": "favor", "num_features": 3, "chunk_size": 4},
    "normalized": {"type": "delta_net", "attention_normalize": True, "chunk_size": 4},
    "favor_normalized": {"type": "delta_net", "feature_map": "favor", "attention_normalize": True, "chunk_size": 3},
}
EPS = 1e-5
each_path = pytest.mark.parametrize("implementation", ["eager", "sdpa"])
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def build(spec, **fields):
    (layer,) = build_layers(spec, causal=True, **fields)
    if layer.num_rows is not None:
        layer.directions.copy_(layer.draw(0))
    return layer


def features(layer, spec, x):
    if spec.get("feature_map") == "elu":
        found = torch.where(x > 0, x + 1, torch.exp(x))
    elif spec.get("feature_map") == "favor":
        powers = x @ layer.directions.T
        found = torch.exp(-x.square().sum(-1, keepdim=True) / 2) * torch.cat([powers.exp(), (-powers).exp()], -1)
    else:
        found = dpfp_reference(x, spec.get("nu", 3))
    return found / found.sum(-1, keepdim=True)


def tensors(layer, spec, states, turn=lambda x: x):
    q, k, v = (split_heads(part(states), D) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = turn(q), turn(k)
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    beta = torch.sigmoid(states @ layer.beta_proj.weight.t()).transpose(1, 2)
    return features(layer, spec, q), features(layer, spec, k), v, beta


@torch.no_grad()
def by_hand(layer, spec, states, mask=None, turn=lambda x: x):
    """The rule token by token; padded tokens are left out."""
    q, k, v, beta = tensors(layer, spec, states, turn)
    outputs = torch.zeros_like(v)
    for b in range(states.shape[0]):
        for h in range(HEADS):
            memory, norm = torch.zeros(k.shape[-1], D).double(), torch.zeros(k.shape[-1]).double()
            divides = spec.get("attention_normalize")
            for t in range(states.shape[1]):
                if mask is None or mask[b, t]:
                    found = k[b, h, t] @ memory / (k[b, h, t] @ norm + EPS if divides else 1.0)
                    memory = memory + beta[b, h, t] * torch.outer(k[b, h, t], v[b, h, t] - found)
                    norm = norm + k[b, h, t]
                outputs[b, h, t] = q[b, h, t] @ memory / D**0.5 / (q[b, h, t] @ norm + EPS if divides else 1.0)
    return layer.o_proj(outputs.transpose(1, 2).flatten(2))


@each_path
@each_spec
def test_rule(implementation, spec):
    for fields in ({}, {"num_key_value_heads": 2}):
        layer = build(spec, **fields)
        states = vectors(4, 6)
        for mask in (None, PADDING):
            context = make_context(6, True, padding_mask=mask, implementation=implementation)
            close(run_layers([layer], states, context)[0].output.detach(), by_hand(layer, spec, states, mask))


@each_path
@each_spec
def test_rotary_turns_queries_and_keys(implementation, spec):
    """Before the features, with heads that share keys; each position's angles written out."""
    layer = build(spec, num_key_value_heads=2)
    states = vectors(4, 6)
    context = make_context(6, True, padding_mask=PADDING, implementation=implementation)
    context.shared["rotation"] = RotaryPosition(D, RotarySpec(theta=50.0)).rotation(torch.arange(6)[None], states)
    found = run_layers([layer], states, context)[0].output.detach()
    close(found, by_hand(layer, spec, states, PADDING, partial(turned, theta=50.0)), 1e-6)


@each_spec
def test_weights_are_what_is_read_of_each_value(spec):
    """The gradient of the output by the values is the matrix of weights."""
    layer = build(spec)
    states, divides = vectors(1, 5), spec.get("attention_normalize")
    with torch.no_grad():
        weights = run_layers([layer], states, make_context(5, True, implementation="eager"))[0].weights
        q, k, _, beta = tensors(layer, spec, states)
    for head in range(HEADS):
        memory = torch.zeros(k.shape[-1], 5, dtype=torch.float64)  # one column for each token's value
        for t in range(5):
            value = torch.zeros(5, dtype=torch.float64)
            value[t] = 1.0
            found = k[0, head, t] @ memory / (k[0, head, t] @ k[0, head, :t].sum(0) + EPS if divides else 1.0)
            memory = memory + beta[0, head, t] * torch.outer(k[0, head, t], value - found)
            total = q[0, head, t] @ k[0, head, : t + 1].sum(0) + EPS if divides else 1.0
            close(weights[0, head, t], q[0, head, t] @ memory / D**0.5 / total)


@each_spec
def test_gradients(spec):
    """Those of the fast path are those of the literal one, for every parameter, in every row."""
    layer, states, found = build(spec), vectors(4, 6), []
    for implementation in ("eager", "sdpa"):
        layer.zero_grad()
        given = states.clone().requires_grad_()
        context = make_context(6, True, padding_mask=PADDING, implementation=implementation)
        (run_layers([layer], given, context)[0].output * vectors(4, 6, seed=3)).sum().backward()
        found.append({"": given.grad, **{key: x.grad for key, x in layer.named_parameters()}})
    for key, expected in found[0].items():
        close(found[1][key], expected, 1e-8)


def test_transformers_delta_rule():
    """transformers' recurrent gated delta rule without decay, which scales queries by 1 / sqrt(F) and works in
    float32."""
    spec = SPECS["dpfp"]
    (layer,) = build_layers(spec, causal=True)
    states = vectors(2, 9)
    with torch.no_grad():
        q, k, v, beta = tensors(layer, spec, states)
        q = q * q.shape[-1] ** 0.5 / D**0.5
        arguments = [x.transpose(1, 2).float() for x in (q, k, v, torch.zeros_like(beta), beta)]
        theirs, _ = torch_recurrent_gated_delta_rule(*arguments, initial_state=None, output_final_state=False)
        expected = layer.o_proj(theirs.double().flatten(2))
        close(run_layers([layer], states, make_context(9, True))[0].output, expected, 1e-5)


def test_overwriting():
    """A key written again with full strength returns its new value alone, where a sum would return both."""
    (layer,) = build_layers({"type": "delta_net", "nu": 1, "scale": 1.0, "bias": False}, causal=True)
    one_hot, values = torch.zeros(1, 2, WIDTH).double(), torch.randn(2, WIDTH, dtype=torch.float64)
    one_hot[0, :, 0], one_hot[0, 0, 2], one_hot[0, 1, 3] = 1.0, 1.0, 1.0
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj):  # both tokens ask and write with the features of (1, 1, 0, 0)
            projection.weight.zero_()
            for head in range(HEADS):
                projection.weight[head * D : head * D + 2, 0] = 1.0
        layer.v_proj.weight.zero_()
        layer.v_proj.weight[:, 2], layer.v_proj.weight[:, 3] = values[0], values[1]
        layer.beta_proj.weight.zero_()
        layer.beta_proj.weight[:, 0] = 40.0
        layer.o_proj.weight.copy_(torch.eye(WIDTH))
        outputs = run_layers([layer], one_hot, make_context(2, True))[0].output[0]
    close(outputs, values, 1e-12)


@each_spec
def test_cache(spec):
    layer = build(spec)
    states = vectors(2, 9)
    with torch.no_grad():
        expected = by_hand(layer, spec, states)
        for pieces in ((1,) * 9, (4, 1, 3, 1), (9,)):
            close(in_pieces(layer, states, pieces)[0], expected)
        mask = torch.ones(2, 9).bool()
        mask[0, :3] = False
        alone, cache = in_pieces(layer, states[:1, 3:], (4, 1, 1))
        found, padded = in_pieces(layer, states, (7, 1, 1), mask)
        close(found[:1, 3:], alone)
        for name, tensor in cache.layers[0].state.items():
            close(padded.layers[0].state[name][:1], tensor)
        assert set(padded.layers[0].state) == {"memory", *(["norm"] if spec.get("attention_normalize") else [])}
        assert len(set(state_sizes(layer, states, (1, 5, 9)))) == 1


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["dpfp", "favor_normalized"])
def test_no_future(name, training):
    check_no_future(build(SPECS[name]), vectors(2, 11), training)


def test_what_is_divided():
    """One key written again and again with full strength: with a_t times its value held, a_t = a_{t-1} + (1 - a_{t-1}
    / (t - 1)), it reads a_t / t of it, which is 1 and from then on 1 / 2."""
    layer = build(
        {"type": "delta_net", "feature_map": "elu", "attention_normalize": True, "bias": False, "scale": 1.0}
    )
    states = vectors(1, 1).repeat(1, 5, 1)
    with torch.no_grad():
        layer.beta_proj.weight.copy_(40.0 * states[0, 0] / states[0, 0].square().sum())
        layer.o_proj.weight.copy_(torch.eye(WIDTH))
        found = run_layers([layer], states, make_context(5, True))[0].output[0]
        value = layer.v_proj(states)[0, 0]
    for t in range(5):
        close(found[t], value * (1.0 if t == 0 else 0.5), 1e-3)


def test_draws():
    """The random rows of `favor` are a buffer; other features have none."""
    layer = build(SPECS["favor"])
    assert layer.draw(0).shape == (3, D)
    assert {name for name, _ in layer.named_buffers()} == {"directions", "passes", "draws"}
    assert build(SPECS["favor_normalized"]).draw(0).shape == (D, D)
    assert not list(build(SPECS["elu"]).buffers())


def test_stability():
    """Normalised features keep the state bounded, however long the text and however large the keys."""
    for name in ("dpfp", "elu", "favor", "normalized"):
        layer = build(SPECS[name])
        with torch.no_grad():
            output = run_layers([layer], 30 * vectors(1, 300), make_context(300, True))[0].output
        assert output.abs().max() < 1e4


def test_what_is_kept():
    (layer,) = build_layers("delta_net", causal=True)
    features_wide = 2 * D * 3
    for length in (64, 256):
        states = vectors(1, length)
        sizes = saved_sizes(lambda: run_layers([layer], states, make_context(length, True)))
        states_kept = 16 * HEADS * features_wide * D  # at most so many segments keep one each
        assert sizes[0] <= max(length * WIDTH, states_kept), sizes[:3]


def test_refusals():
    for fields, message in (
        ({"nu": 0}, "`nu` >= 1, got 0"),
        ({"chunk_size": 0}, "`chunk_size` >= 1"),
        ({"nu": 8}, "7 different"),
        ({"num_features": 0}, "`num_features` >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            XFormerConfig(**GEOMETRY, is_decoder=True, attention={"type": "delta_net", **fields})
    with pytest.raises(ValueError, match="causal only"):
        XFormerConfig(**GEOMETRY, attention="delta_net")
    with pytest.raises(ValueError, match="cannot read a memory"):
        XFormerConfig(**GEOMETRY, cross_attention="delta_net")


MIX = {"delta": {"attention": SPECS["elu"], "residual": "pre_ln", "num_key_value_heads": 2, "position": "rotary"}}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("case", mixes(MIX, ("decoder",)), ids=str)
def test_contract(case):
    check_contract(case)


SHALLOW = {"delta": {**MIX["delta"], "num_hidden_layers": 1}}


@pytest.mark.parametrize("case", mixes(SHALLOW, ("decoder",)), ids=str)
def test_compile(case):
    check_compile(case)

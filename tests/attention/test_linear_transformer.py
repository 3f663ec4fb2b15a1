"""The Linear Transformer against its equation in loops, the recurrent network, its limits, and rotated numerators."""

import math

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_xformers import XFormerConfig
from hf_xformers.attention import linear_transformer
from hf_xformers.core.cache import make_cache
from hf_xformers.ops.linear.attention import folded_sums
from hf_xformers.position.rotary import RotaryPosition, RotarySpec
from tests.attention.linear_helpers import check_no_future, in_pieces, state_sizes
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
    allowed_pairs,
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
SPEC = {"type": "linear_transformer", "chunk_size": 4}
each_path = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


def phi(x):
    return torch.where(x > 0, x + 1, torch.exp(x))


@torch.no_grad()
def by_hand(layer, states, allowed, memory=None, turn=None, eps=0.0):
    """One query and one key at a time."""
    read = states if memory is None else memory
    q = split_heads(layer.q_proj(states), D)
    k, v = split_heads(layer.k_proj(read), D), split_heads(layer.v_proj(read), D)
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    phi_q, phi_k = phi(q), phi(k)
    turned_q, turned_k = (phi_q, phi_k) if turn is None else (turn(phi_q), turn(phi_k))
    allowed = allowed.expand(q.shape[0], HEADS, q.shape[2], k.shape[2])
    weights = torch.zeros(allowed.shape, dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        total = eps + sum(float(phi_q[b, h, i] @ phi_k[b, h, j]) for j in range(k.shape[2]) if allowed[b, h, i, j])
        for j in range(k.shape[2]):
            if allowed[b, h, i, j]:
                weights[b, h, i, j] = turned_q[b, h, i] @ turned_k[b, h, j] / total
    return layer.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights


@each_path
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 2}, {"attention": {**SPEC, "eps": 0.5}}], ids=str)
def test_equation(implementation, causal, fields):
    spec = fields.get("attention", SPEC)
    (layer,) = build_layers(spec, causal=causal, **{k: v for k, v in fields.items() if k != "attention"})
    states = vectors(4, 6)
    for mask in (None, PADDING):
        context = make_context(6, causal, padding_mask=mask, implementation=implementation)
        (result,) = run_layers([layer], states, context)
        output, weights = by_hand(layer, states, allowed_pairs(6, causal, mask), eps=spec.get("eps", 0.0))
        close(result.output.detach(), output)
        if implementation == "eager":
            close(result.weights.detach(), weights)


@each_path
def test_cross_attention(implementation):
    (layer,) = build_layers(SPEC, cross=True, is_encoder_decoder=True)
    states, memory = vectors(4, 3), vectors(4, 6, seed=1)
    for mask in (None, PADDING):
        context = make_context(3, True, memory_padding_mask=mask, implementation=implementation)
        allowed = torch.ones(1, 1, 1, 6).bool() if mask is None else mask[:, None, None, :]
        expected = by_hand(layer, states, allowed, memory)[0]
        close(run_layers([layer], states, context, memory)[0].output.detach(), expected)


def test_memory_becomes_a_state():
    """Keys and values of the memory are summed once; the cache holds the sums, whatever the memory's length."""
    (layer,) = build_layers(SPEC, cross=True, is_encoder_decoder=True)
    states = vectors(4, 3)
    for length in (6, 6):
        memory = vectors(4, length, seed=1)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        context = make_context(3, True, memory_padding_mask=PADDING)
        expected = run_layers([layer], states, context, memory)[0].output
        for read in (memory, torch.zeros_like(memory)):  # the second time it is not looked at
            close(run_layers([layer], states, context, read, cache)[0].output, expected)
        kept = cache.cross_attention_cache.layers[0]
        assert kept.keys.shape == (4, HEADS, D, D) and kept.values.shape == (4, HEADS, D, 1)
        cache.reorder_cache(torch.tensor([1, 0, 2, 3]))
        order = [1, 0, 2, 3]
        found = run_layers([layer], states[order], context, memory, cache)[0].output
        close(found, expected[order])


def folding_calls(monkeypatch):
    """Counts how often projections are folded into the sums."""
    calls = []

    def counted(*arguments, **options):
        calls.append(arguments)
        return folded_sums(*arguments, **options)

    monkeypatch.setattr(linear_transformer, "folded_sums", counted)
    return calls


@pytest.mark.parametrize("fields", [{}, {"attention": {**SPEC, "bias": False, "eps": 0.5}}, {"head_dim": 3}], ids=str)
def test_long_texts_fold_projections(fields, monkeypatch):
    calls = folding_calls(monkeypatch)
    (layer,) = build_layers(fields.get("attention", SPEC), **{k: v for k, v in fields.items() if k != "attention"})
    length = WIDTH + 1
    states, mask = vectors(3, length), torch.ones(3, length).bool()
    mask[1, 5:], mask[2] = False, False
    for padding in (None, mask):
        (result,) = run_layers([layer], states, make_context(length, padding_mask=padding), residual=False)
        (literal,) = run_layers([layer], states, make_context(length, padding_mask=padding, implementation="eager"))
        close(result.output, literal.output)
    assert len(calls) == 2
    run_layers([layer], states[:, :WIDTH], make_context(WIDTH))
    assert len(calls) == 2  # in a short text it does not pay


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def doubled_by_class(module):
    module.__class__ = Doubled


def doubled_by_hook(module):
    module.register_forward_hook(lambda module, given, result: 2 * result)


def doubled_before(module):
    module.register_forward_pre_hook(lambda module, given: (2 * given[0],))
    module.bias.data *= 2


def doubled_by_offloading(module):
    own = module.forward
    module.forward = lambda x: 2 * own(x)


def doubled_by_parametrization(module):
    torch.nn.utils.parametrize.register_parametrization(module, "weight", torch.nn.Flatten())
    doubled_by_hook(module)


@pytest.mark.parametrize("name", ["v_proj", "o_proj"])
@pytest.mark.parametrize(
    "change", [doubled_by_class, doubled_by_hook, doubled_before, doubled_by_offloading, doubled_by_parametrization]
)
def test_projections_that_are_more_than_a_weight_are_called(name, change, monkeypatch):
    """What doubles a projection's result is passed over by nobody; gradients are those of the folded form."""
    calls, found = folding_calls(monkeypatch), []
    states = vectors(2, WIDTH + 3)
    for changed in (False, True):
        (layer,) = build_layers(SPEC)
        module, given = getattr(layer, name), states.clone().requires_grad_()
        if changed:
            change(module)
        else:
            module.weight.data *= 2
            module.bias.data *= 2
        (result,) = run_layers([layer], given, make_context(WIDTH + 3))
        result.output.square().sum().backward()
        others = [layer.get_submodule(part).weight.grad for part in ("q_proj", "k_proj")]
        found.append((result.output.detach(), given.grad, *others))
    assert len(calls) == 1
    for one, other in zip(*found, strict=True):
        close(one, other)


def test_half_precision_keeps_its_sums(monkeypatch):
    calls = folding_calls(monkeypatch)
    (layer,) = build_layers(SPEC)
    states = vectors(2, WIDTH + 3)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            run_layers([layer.float()], states.float(), make_context(WIDTH + 3))
        run_layers([layer.bfloat16()], states.bfloat16(), make_context(WIDTH + 3))
    assert not calls


def test_recurrent_network():
    """Token by token with the two sums, each token joining before it reads."""
    (layer,) = build_layers(SPEC, causal=True)
    states = vectors(2, 9)
    with torch.no_grad():
        q, k, v = (split_heads(part(states), D) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        memory, norm, outputs = torch.zeros(2, HEADS, D, D).double(), torch.zeros(2, HEADS, D).double(), []
        for t in range(9):
            key, query = phi(k[:, :, t]), phi(q[:, :, t])
            memory = memory + key[..., None] * v[:, :, t, None]
            norm = norm + key
            outputs.append((query[..., None] * memory).sum(2) / (query * norm).sum(-1, keepdim=True))
        expected = layer.o_proj(torch.stack(outputs, 1).flatten(2))
        close(run_layers([layer], states, make_context(9, True))[0].output, expected)
        for pieces in ((1,) * 9, (4, 1, 3, 1), (9,)):
            close(in_pieces(layer, states, pieces)[0], expected)
        _, cache = in_pieces(layer, states, (4, 1, 3, 1))
    close(cache.layers[0].state["kv"], memory)
    close(cache.layers[0].state["z"], norm)


def test_left_padded_prompts_leave_no_trace():
    (layer,) = build_layers(SPEC, causal=True)
    states, mask = vectors(2, 7), torch.ones(2, 7).bool()
    mask[0, :3] = False
    with torch.no_grad():
        alone, cache = in_pieces(layer, states[:1, 3:], (2, 1, 1))
        found, padded = in_pieces(layer, states, (5, 1, 1), mask)
    close(found[:1, 3:], alone)
    for name, tensor in cache.layers[0].state.items():
        close(padded.layers[0].state[name][:1], tensor)


def test_the_state_does_not_grow():
    (layer,) = build_layers(SPEC, causal=True)
    with torch.no_grad():
        assert state_sizes(layer, vectors(2, 24), (1, 9, 24)) == [2 * HEADS * D * (D + 1)] * 3


@pytest.mark.parametrize("training", [False, True])
def test_no_future(training):
    (layer,) = build_layers(SPEC, causal=True)
    check_no_future(layer, vectors(2, 11), training)


def test_convex_combinations():
    """Outputs stay inside the range of the visible values; the first token reads itself alone; the order of keys is
    nothing to an encoder; the weights have the rank of the features."""
    (layer,) = build_layers(SPEC, causal=True)
    states = vectors(2, 9)
    with torch.no_grad():
        (result,) = run_layers([layer], states, make_context(9, True, implementation="eager"))
        value = split_heads(layer.v_proj(states), D)
        mixed = result.weights @ value
        close(mixed[:, :, 0], value[:, :, 0], 1e-12)
        assert (mixed <= value.cummax(2).values + 1e-12).all() and (mixed >= value.cummin(2).values - 1e-12).all()
        (encoder,) = build_layers(SPEC)
        order = torch.randperm(9)
        outputs = [run_layers([encoder], x, make_context(9))[0].output for x in (states, states[:, order])]
        close(outputs[1], outputs[0][:, order])
        weights = run_layers([encoder], states, make_context(9, implementation="eager"))[0].weights
        assert int(torch.linalg.matrix_rank(weights, rtol=1e-10).max()) <= D


@each_path
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotary_turns_the_numerator_alone(implementation, causal, layout):
    (layer,) = build_layers(SPEC, causal=causal)
    states, positions = vectors(2, 6), torch.arange(6)[None]
    turn = RotaryPosition(D, RotarySpec(layout=layout)).rotation(positions, states)
    context = make_context(6, causal, padding_mask=PADDING[:2], implementation=implementation)
    context.shared["rotation"] = turn

    def rotate(x):
        """Each pair of channels as a complex number times exp(i * position * frequency)."""
        pairs = torch.stack(x.chunk(2, -1), -1) if layout == "half" else x.unflatten(-1, (-1, 2))
        angle = positions[0, :, None] * 10000.0 ** (-torch.arange(0, D, 2) / D)
        turned = torch.view_as_real(
            torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
        )
        return torch.cat(turned.unbind(-1), -1) if layout == "half" else turned.flatten(-2)

    expected, weights = by_hand(layer, states, allowed_pairs(6, causal, PADDING[:2]), turn=rotate)
    (result,) = run_layers([layer], states, context)
    close(result.output.detach(), expected, 1e-6)  # angles are made in float32
    if implementation == "eager":
        close(result.weights.detach(), weights, 1e-6)


def test_what_is_kept():
    """Nothing in proportion to T x T, and no state for every token."""
    for length in (64, 256):
        (layer,) = build_layers("linear_transformer", causal=True)
        states = vectors(1, length)
        sizes = saved_sizes(lambda: run_layers([layer], states, make_context(length, True)))
        assert sizes[0] <= length * WIDTH, sizes[:3]


def test_weights_of_a_cached_text():
    """The first pass with a cache gives weights; later ones have no keys to weigh."""
    (layer,) = build_layers(SPEC, causal=True)
    states, cache = vectors(2, 6), make_cache(layer.config)
    with torch.no_grad():
        whole = run_layers([layer], states, make_context(6, True, implementation="eager"))[0]
        first = run_layers([layer], states[:, :4], make_context(4, True, output_attentions=True), cache=cache)[0]
        rest = run_layers([layer], states[:, 4:], make_context(2, True, past=4, output_attentions=True), cache=cache)[
            0
        ]
    close(first.weights, whole.weights[:, :, :4, :4])
    assert rest.weights is None
    close(torch.cat([first.output, rest.output], 1), whole.output)


def test_refusals():
    for fields, message in (
        ({"chunk_size": 0}, "`chunk_size` >= 1, got 0"),
        ({"eps": -1.0}, "`eps` >= 0, got -1"),
        ({"scale": 1.0}, "no scores to scale"),
    ):
        with pytest.raises(ValueError, match=message):
            XFormerConfig(**GEOMETRY, attention={"type": "linear_transformer", **fields})
    (layer,) = build_layers(SPEC, causal=True)
    with pytest.raises(ValueError, match="make_cache"):
        run_layers([layer], vectors(1, 3), make_context(3, True), cache=DynamicCache())
    with pytest.raises(ValueError, match="score_bias|adds a bias"):
        XFormerConfig(**GEOMETRY, attention="linear_transformer", position="t5_relative_bias")


MIXES = {
    "linear_rotary": {"attention": SPEC, "position": "rotary", "residual": "pre_ln", "num_key_value_heads": 2},
    "linear_cross": {"attention": SPEC, "cross_attention": SPEC},
}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize(
    "case",
    [*mixes({"linear_rotary": MIXES["linear_rotary"]}), *mixes({"x": MIXES["linear_cross"]}, ("seq2seq",))],
    ids=str,
)
def test_contract(case):
    check_contract(case)


@pytest.mark.parametrize("case", mixes({"linear": {"attention": SPEC, "num_hidden_layers": 1}}, ("decoder",)), ids=str)
def test_compile(case):
    check_compile(case)


def test_large_features_in_half_precision():
    """Sums over a long text run in float32: relative errors stay those of the inputs."""
    (layer,) = build_layers("linear_transformer", causal=True)
    states = vectors(1, 600).abs() * 3
    with torch.no_grad():
        expected = run_layers([layer], states, make_context(600, True))[0].output
        found = run_layers([layer.to(torch.bfloat16)], states.to(torch.bfloat16), make_context(600, True))[0].output
    error = (found.double() - expected).norm() / expected.norm()
    assert error < 0.03 and math.isfinite(error)

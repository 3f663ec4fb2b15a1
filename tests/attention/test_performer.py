"""FAVOR+ against its equation, softmax attention as its limit, other implementations, and the rules for redrawing."""

import copy
import itertools
import math
from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.attention.performer import redraw_features
from hf_xformers.position.rotary import RotaryPosition, RotarySpec
from tests.attention.linear_helpers import check_no_future, in_pieces, state_sizes, turned
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
from tests.helpers import close, tokens

D = WIDTH // HEADS
SPEC = {"type": "performer", "num_features": 10, "chunk_size": 4}
HYPERBOLIC = {**SPEC, "feature_kind": "hyperbolic"}
each_path = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


def build(spec=SPEC, **more):
    (layer,) = build_layers(spec, **more)
    layer.directions.copy_(layer.draw(0))
    return layer


@torch.no_grad()
def by_hand(layer, states, allowed, memory=None, turn=lambda x: x):
    """The features as they stand in the paper, and all pairs of them."""
    read = states if memory is None else memory
    q, k = turn(split_heads(layer.q_proj(states), D)), turn(split_heads(layer.k_proj(read), D))
    v = split_heads(layer.v_proj(read), D)
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    w = layer.directions

    def phi(x):
        x = x * D**-0.25
        norm = torch.exp(-(x**2).sum(-1, keepdim=True) / 2)
        if layer.spec.feature_kind == "positive":
            return norm * torch.exp(x @ w.t()) / len(w) ** 0.5
        return norm * torch.cat([torch.exp(x @ w.t()), torch.exp(-x @ w.t())], -1) / (2 * len(w)) ** 0.5

    products = (phi(q) @ phi(k).mT) * allowed
    sums = products.sum(-1, keepdim=True)
    weights = torch.where(sums > 0, products / sums.clamp(min=1e-300), 0.0)
    return layer.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights


@each_path
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", [SPEC, HYPERBOLIC], ids=["positive", "hyperbolic"])
def test_rotary_turns_queries_and_keys(implementation, causal, spec):
    """Before the features, with heads that share keys; each position's angles written out."""
    layer, states = build(spec, causal=causal, num_key_value_heads=2), vectors(4, 6)
    context = make_context(6, causal, padding_mask=PADDING, implementation=implementation)
    context.shared["rotation"] = RotaryPosition(D, RotarySpec(theta=50.0)).rotation(torch.arange(6)[None], states)
    (result,) = run_layers([layer], states, context)
    output, weights = by_hand(layer, states, allowed_pairs(6, causal, PADDING), turn=partial(turned, theta=50.0))
    close(result.output.detach(), output, 1e-6)
    if implementation == "eager":
        close(result.weights.detach(), weights, 1e-6)


@each_path
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", [SPEC, HYPERBOLIC], ids=["positive", "hyperbolic"])
def test_equation(implementation, causal, spec):
    layer, states = build(spec, causal=causal), vectors(4, 6)
    for mask in (None, PADDING):
        context = make_context(6, causal, padding_mask=mask, implementation=implementation)
        (result,) = run_layers([layer], states, context)
        output, weights = by_hand(layer, states, allowed_pairs(6, causal, mask))
        close(result.output.detach(), output)
        if implementation == "eager":
            close(result.weights.detach(), weights)


@each_path
def test_cross_attention(implementation):
    layer = build(cross=True, is_encoder_decoder=True)
    states, memory = vectors(4, 3), vectors(4, 6, seed=1)
    expected = by_hand(layer, states, PADDING[:, None, None, :], memory)[0]
    context = make_context(3, True, memory_padding_mask=PADDING, implementation=implementation)
    close(run_layers([layer], states, context, memory)[0].output.detach(), expected)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    for read in (memory, memory if implementation == "eager" else torch.zeros_like(memory)):
        close(run_layers([layer], states, context, read, cache)[0].output.detach(), expected)


@pytest.mark.parametrize("kind", ["positive", "hyperbolic"])
def test_softmax_attention_is_the_limit(kind):
    """The error against exact attention falls as 1 / sqrt(m) (small scores, many draws)."""
    errors = []
    states = vectors(1, 24) * 0.3
    for m in (32, 512):
        layer, found = build({**SPEC, "feature_kind": kind, "num_features": m, "bias": False}), []
        with torch.no_grad():
            q, k, v = (split_heads(part(states), D) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
            exact = layer.o_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            for _ in range(40):
                layer.redraw()
                found.append(run_layers([layer], states, make_context(24))[0].output - exact)
        errors.append(torch.stack(found).square().mean().sqrt())
    slope = math.log(errors[1] / errors[0]) / math.log(512 / 32)
    assert -0.6 < slope < -0.4, (errors, slope)
    assert errors[1] < 0.08 * exact.std()


def test_draws():
    """Rows are orthogonal in blocks of d; draws differ by layer, by seed, by number, and not by anything else."""
    layer = build({**SPEC, "num_features": 10})
    rows = layer.draw(0).double()
    for block in (rows[:D], rows[D : 2 * D], rows[2 * D :]):
        gram = block @ block.t()
        close(gram, torch.diag(gram.diagonal()), 1e-5)
    torch.manual_seed(123)
    assert torch.equal(layer.draw(0), rows.float())
    others = [layer.draw(1), build({**SPEC, "seed": 1}).draw(0), build_layers(SPEC, 2)[1].draw(0)]
    assert all((other - rows).abs().max() > 0.1 for other in others)
    regular = build({**SPEC, "regularized": True}).draw(0).double()
    close(regular.square().sum(-1), torch.full((10,), float(D)).double(), 1e-5)
    assert (build({**SPEC, "orthogonal": False}).draw(0)[:D] @ rows[:D].float().t()).abs().max() > 0.1


@pytest.mark.parametrize("training", [False, True])
def test_no_future(training):
    """Not through the maximum that keeps the exponentials in range either: later keys here are enormous."""
    check_no_future(build(causal=True), vectors(2, 11), training)


def test_rows_of_a_batch_are_alone():
    layer, states = build(), vectors(2, 6)
    states[1] *= 30
    with torch.no_grad():
        together = run_layers([layer], states, make_context(6))[0].output[:1]
        close(together, run_layers([layer], states[:1], make_context(6))[0].output, 1e-12)


@pytest.mark.parametrize("spec", [SPEC, HYPERBOLIC], ids=["positive", "hyperbolic"])
def test_cache(spec):
    layer, states = build(spec, causal=True), vectors(2, 9)
    with torch.no_grad():
        expected = by_hand(layer, states, allowed_pairs(9, True))[0]
        for pieces in ((1,) * 9, (4, 1, 3, 1), (9,)):
            close(in_pieces(layer, states, pieces)[0], expected)
        mask = torch.ones(2, 9).bool()
        mask[0, :3] = False
        alone, _ = in_pieces(layer, states[:1, 3:], (4, 1, 1))
        found, _ = in_pieces(layer, states, (7, 1, 1), mask)
        close(found[:1, 3:], alone)
        assert len(set(state_sizes(layer, states, (1, 5, 9)))) == 1


def test_large_scores_in_single_precision():
    """Scores of several hundred neither overflow nor lose the largest."""
    layer = build({**SPEC, "num_features": 64}, causal=True)
    states = 8 * vectors(2, 40)
    with torch.no_grad():
        expected = run_layers([layer], states, make_context(40, True))[0].output
        found = run_layers([layer.float()], states.float(), make_context(40, True))[0].output
    assert found.isfinite().all()
    assert (found.double() - expected).norm() / expected.norm() < 1e-3


def small_model(**spec):
    config = XFormerConfig(**GEOMETRY, is_decoder=True, attention={**SPEC, **spec})
    torch.manual_seed(0)
    return XFormerForCausalLM(config)


def test_redrawing_by_interval():
    """Every third training pass begins with new features, the same ones in every process; evaluation draws nothing."""
    model, twin, ids = (
        small_model(redraw_interval=3).train(),
        small_model(redraw_interval=3).train(),
        tokens(2, 7, high=50),
    )
    layer, seen = model.model.trunk.layers[0].attention, []
    for _ in range(7):
        model(input_ids=ids)
        seen.append(layer.directions.clone())
    assert [int(not torch.equal(a, b)) for a, b in itertools.pairwise(seen)] == [0, 0, 1, 0, 0, 1]
    torch.manual_seed(5)
    for _ in range(7):
        twin(input_ids=ids)
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, other)
    assert int(layer.passes) == 7 and int(layer.draws) == 2
    model.eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for _ in range(4):
        model(input_ids=ids)
    with torch.no_grad():
        model.train()(input_ids=ids)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_counting_goes_on_after_loading(tmp_path):
    """A saved model continues with the draws that it would have made."""
    model, ids = small_model(redraw_interval=3).train(), tokens(2, 7, high=50)
    for _ in range(5):
        model(input_ids=ids)
    model.save_pretrained(tmp_path)
    loaded, restored = XFormerForCausalLM.from_pretrained(tmp_path).train(), small_model(redraw_interval=3).train()
    restored(input_ids=ids)
    restored.load_state_dict(model.state_dict())
    for _ in range(4):
        for one in (model, loaded, restored):
            one(input_ids=ids)
        for one in (loaded, restored):
            for (name, buffer), (_, other) in zip(model.named_buffers(), one.named_buffers(), strict=True):
                assert torch.equal(buffer, other), name


def test_redrawing_by_hand():
    model = small_model(redraw_interval=0)
    before = [layer.attention.directions.clone() for layer in model.model.trunk.layers]
    assert redraw_features(model) == 3
    for layer, old in zip(model.model.trunk.layers, before):
        assert not torch.equal(layer.attention.directions, old)
        assert torch.equal(layer.attention.directions, layer.attention.draw(1))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_keeps_its_features(use_reentrant):
    """A redraw between a checkpointed pass and its backward pass does not change the gradients."""
    slopes = []
    for checkpointed in (False, True):
        layer, states = build(causal=True).train(), vectors(1, 6).requires_grad_()
        context = make_context(6, True)
        layer.prepare(context, None)

        def run(x, layer=layer, context=context):
            return layer(x, context, step=0).output

        output = checkpoint(run, states, use_reentrant=use_reentrant) if checkpointed else run(states)
        layer.redraw()
        slopes.append(torch.autograd.grad(output.square().sum(), states) if not use_reentrant else None)
        if use_reentrant:
            output.square().sum().backward()
            slopes[-1] = (states.grad,)
    close(slopes[0][0], slopes[1][0], 1e-12)


def test_performer_pytorch():
    """The PyPI package with its additive constant and the sign of its stabiliser's maximum out of the way: one text,
    one head, and features far above the constant."""
    theirs = pytest.importorskip("performer_pytorch.performer_pytorch", reason="performer-pytorch is not installed")
    layer = build({**SPEC, "num_features": 32})
    states = vectors(1, 12)
    with torch.no_grad():
        q, k, v = (split_heads(part(states), D) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        kernel = {"projection_matrix": layer.directions, "eps": 0.0}
        mixed = theirs.linear_attention(
            theirs.softmax_kernel(q, is_query=True, **kernel), theirs.softmax_kernel(k, is_query=False, **kernel), v
        )
        expected = layer.o_proj(mixed.transpose(1, 2).flatten(2))
        close(run_layers([layer], states, make_context(12))[0].output, expected)
        causal = build({**SPEC, "num_features": 32}, causal=True)
        causal.directions.copy_(layer.directions)
        phi_q = theirs.softmax_kernel(q, is_query=True, **kernel)
        phi_k = theirs.softmax_kernel(k, is_query=False, **kernel)
        mixed = theirs.causal_linear_attention_noncuda(phi_q, phi_k, v, chunk_size=5, eps=0.0)
        close(
            run_layers([causal], states, make_context(12, True))[0].output,
            layer.o_proj(mixed.transpose(1, 2).flatten(2)),
        )


def test_what_is_kept():
    """Neither T x T nor T x m numbers: features are computed again in the backward pass."""
    for length in (64, 256):
        layer = build({"type": "performer", "num_features": 128}, causal=True)
        sizes = saved_sizes(lambda: run_layers([layer], vectors(1, length), make_context(length, True)))
        assert sizes[0] < length * 128, sizes[:3]


def test_refusals():
    for fields, message in (
        ({"num_features": 0}, "`num_features` >= 1, got 0"),
        ({"redraw_interval": -1}, "`redraw_interval` >= 0"),
        ({"scale": -1.0}, "`scale` > 0"),
        ({"seed": -1}, "`seed` >= 0"),
        ({"regularized": True, "orthogonal": False}, "orthogonal rows only"),
    ):
        with pytest.raises(ValueError, match=message):
            XFormerConfig(**GEOMETRY, attention={"type": "performer", **fields})


MIX = {"performer": {"attention": HYPERBOLIC, "residual": "pre_ln", "num_key_value_heads": 2, "position": "rotary"}}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("case", mixes(MIX), ids=str)
def test_contract(case):
    check_contract(case)


SHALLOW = {"performer": {**MIX["performer"], "num_hidden_layers": 1}}


@pytest.mark.parametrize("case", mixes(SHALLOW, ("decoder",)), ids=str)
def test_compile(case):
    check_compile(case)


def test_copies_are_independent():
    layer = build()
    other = copy.deepcopy(layer)
    other.redraw()
    assert not torch.equal(layer.directions, other.directions)

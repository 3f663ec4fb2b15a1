"""FAVOR+: its draws, the rules for redrawing, and performer-pytorch."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerModel
from hf_xformers.attention.performer import PerformerAttention, redraw_features
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
from tests.helpers import close, tokens

D = WIDTH // HEADS
SPEC = {"type": "performer", "num_features": 10, "chunk_size": 4}


def build(spec=SPEC, **more):
    (layer,) = build_layers(spec, **more)
    layer.directions.copy_(layer.draw(0))
    return layer


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


@pytest.mark.parametrize(
    "more", [{"distinct_layers": 1}, {"block": {"type": "dartsformer", "operations": [["attention", "attention"]]}}]
)
def test_every_module_counts_a_pass_once(more):
    """One that runs at several depths, and each of two in a layer."""
    model = XFormerModel(XFormerConfig(**GEOMETRY, attention={**SPEC, "redraw_interval": 1}, **more)).train()
    counted = [module for module in model.modules() if isinstance(module, PerformerAttention)]
    before = [module.directions.clone() for module in counted]
    for _ in range(2):
        model(input_ids=tokens(2, 7, high=50))
    assert [int(module.passes) for module in counted] == [2] * len(counted)
    assert not any(torch.equal(module.directions, rows) for module, rows in zip(counted, before, strict=True))


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

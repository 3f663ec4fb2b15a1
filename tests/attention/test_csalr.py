"""CSALR against its equation text by text, the sums of its rows, and exact attention."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_xformers import XFormerConfig
from hf_xformers.ops.landmarks import ridge_solve
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
SPEC = {"type": "csalr", "num_landmarks": 3}
each_path = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


@torch.no_grad()
def by_hand(layer, states, mask=None):
    """One text and one head at a time, on its real tokens alone -> outputs and weights."""
    most, ridge = layer.spec.num_landmarks, layer.spec.ridge
    tensors = (split_heads(part(states), D) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in tensors)
    weights = torch.zeros(*v.shape[:3], v.shape[2], dtype=v.dtype)
    for b in range(states.shape[0]):
        places = (torch.ones(states.shape[1]) if mask is None else mask[b]).nonzero()[:, 0]
        for h in range(HEADS if len(places) else 0):
            qs, ks = q[b, h, places], k[b, h, places]
            mean_q, mean_k = (
                torch.stack([part.mean(0) for part in x.tensor_split(min(most, len(places)))]) for x in (qs, ks)
            )
            coefficients, landmarks, reads = (
                (one @ other.t() / D**0.5).softmax(-1) for one, other in ((qs, mean_k), (mean_q, mean_k), (mean_q, ks))
            )
            inverse = torch.linalg.inv(landmarks + ridge * torch.eye(len(landmarks)).double())
            found = coefficients @ inverse @ reads * (1 + ridge if layer.spec.renormalize else 1)
            weights[b, h][places[:, None], places[None]] = found
    return layer.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights


@each_path
@pytest.mark.parametrize(
    "spec", [SPEC, {**SPEC, "ridge": 0.3, "num_landmarks": 4}, {**SPEC, "renormalize": True}], ids=str
)
def test_equation(implementation, spec):
    for fields in ({}, {"num_key_value_heads": 2}):
        (layer,) = build_layers(spec, **fields)
        states = vectors(4, 6)
        for mask in (None, PADDING):
            real = torch.ones(4, 6).bool() if mask is None else mask
            (result,) = run_layers([layer], states, make_context(6, padding_mask=mask, implementation=implementation))
            output, weights = by_hand(layer, states, mask)
            close(result.output[real].detach(), output[real])
            if implementation == "eager":
                rows = real[:, None, :, None]
                close((result.weights * rows).detach(), weights * rows)


def test_rows_sum_to_one_over_one_plus_ridge():
    states = vectors(2, 9)
    for fields, expected in (({}, 0.5), ({"ridge": 3}, 0.25), ({"ridge": 3, "renormalize": True}, 1.0)):
        (layer,) = build_layers({**SPEC, **fields})
        with torch.no_grad():
            weights = run_layers([layer], states, make_context(9, implementation="eager"))[0].weights
        close(weights.sum(-1), torch.full_like(weights.sum(-1), expected), 1e-12)


def test_exact_attention_is_the_limit():
    """A landmark for each token: A (A + r I)^-1 A tends to A, by r."""
    (layer,) = build_layers({**SPEC, "num_landmarks": 6, "ridge": 1e-9})
    states = vectors(2, 6)
    with torch.no_grad():
        q, k, v = (split_heads(part(states), D) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
        expected = layer.o_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        close(run_layers([layer], states, make_context(6))[0].output, expected, 1e-7)


def test_what_the_solver_solves():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(3, 8, 8, generator=generator, dtype=torch.float64).softmax(-1)
    right = torch.randn(3, 8, 5, generator=generator, dtype=torch.float64)
    found = ridge_solve(matrix, right, 1.0)
    close((matrix + torch.eye(8).double()) @ found, right, 1e-12)
    close(found, torch.linalg.inv(matrix + torch.eye(8).double()) @ right, 1e-12)
    # Two landmarks that read each other alone, as scores in float32 can round to: the smallest solution.
    swap = torch.eye(4)[[1, 0, 2, 3]]
    narrow = right[0, :4].float().requires_grad_()
    found = ridge_solve(swap, narrow, 1.0)
    close(found, torch.linalg.pinv(swap + torch.eye(4)) @ narrow, 1e-5)
    found.sum().backward()
    assert narrow.grad.isfinite().all()


def test_rows_of_a_batch_are_alone():
    (layer,) = build_layers(SPEC)
    states = vectors(2, 9)
    states[1] *= 5
    with torch.no_grad():
        together = run_layers([layer], states, make_context(9))[0].output[:1]
        close(together, run_layers([layer], states[:1], make_context(9))[0].output, 1e-12)


def test_what_is_kept():
    (layer,) = build_layers({**SPEC, "num_landmarks": 8})
    for length in (64, 256):
        sizes = saved_sizes(lambda: run_layers([layer], vectors(1, length), make_context(length)))
        assert sizes[0] <= length * max(WIDTH, 8 * HEADS), sizes[:3]


def test_refusals():
    with pytest.raises(ValueError, match="no causal form"):
        XFormerConfig(**GEOMETRY, attention="csalr", is_decoder=True)
    with pytest.raises(ValueError, match="cannot read a memory"):
        XFormerConfig(**GEOMETRY, cross_attention="csalr")


MIX = {"csalr": {"attention": SPEC, "position": "rotary", "residual": "pre_ln", "num_key_value_heads": 2}}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("case", mixes(MIX, ("encoder",)), ids=str)
def test_contract(case):
    check_contract(case)


@pytest.mark.parametrize("case", mixes({"csalr": {**MIX["csalr"], "num_hidden_layers": 1}}, ("encoder",)), ids=str)
def test_compile(case):
    check_compile(case)

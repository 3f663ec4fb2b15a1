"""CSALR against its equation text by text, the sums of its rows, and exact attention."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_xformers.ops.landmarks import ridge_solve
from tests.attention.score_helpers import HEADS, WIDTH, build_layers, make_context, run_layers, split_heads, vectors
from tests.helpers import close

D = WIDTH // HEADS
SPEC = {"type": "csalr", "num_landmarks": 3}


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

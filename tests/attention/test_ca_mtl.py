"""Conditional block-diagonal attention against its blocks, mixed tasks, and BERT where nothing is learned yet."""

import pytest
import torch

from hf_xformers import XFCAMTLConfig, XFCAMTLForMaskedLM, XFormerConfig, XFormerForMaskedLM
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
    allowed_pairs,
    build_layers,
    make_context,
    run_layers,
    small_blocks,
    softmax_by_rows,
    split_heads,
    vectors,
)
from tests.helpers import close, make_strong, pad, tokens

HEAD = WIDTH // HEADS
LONGEST = GEOMETRY["max_position_embeddings"]
TASKS = torch.tensor([2, 0, 1, 2])
SPEC = {"type": "ca_mtl", "num_tasks": 3, "num_blocks": 7}


@torch.no_grad()
def bias_of_a_text(layer, task, length):
    """M [T, T]: FiLM on W, cut into chunks of rows, put on a diagonal, cut to the text (released code)."""
    z = layer.task_proj(layer.task_table.weight[task])
    gamma, beta = layer.film(z).chunk(2)
    modulated = (1 + gamma) * layer.near + beta
    chunks = modulated.split(-(-LONGEST // 7))
    return torch.block_diag(*chunks)[:length, :length]


def test_chunks_of_the_released_code():
    """L = 8 in m = 3 chunks: (3, 3), (3, 3), (2, 3), laid out as (8, 9) and cut."""
    (layer,) = build_layers({**SPEC, "num_blocks": 3}, max_position_embeddings=8)
    assert layer.near.shape == (8, 3)
    assert [tuple(chunk.shape) for chunk in layer.near.split(3)] == [(3, 3), (3, 3), (2, 3)]
    assert torch.block_diag(*layer.near.split(3)).shape == (8, 9)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("path", ["eager", "blocks"])
def test_equation(path, causal):
    (layer,) = build_layers(SPEC, causal=causal)
    states = vectors(4, 6)
    query, key, value = (split_heads(part(states), HEAD) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    for mask in (None, PADDING):
        # Padding takes no place: a text begins at position 0 wherever it stands.
        starts = [0, 0, 0, 0] if mask is None else [0, 0, 2, 0]
        bias = torch.zeros(4, 1, 6, 6, dtype=torch.float64)
        for row, (task, start) in enumerate(zip(TASKS, starts, strict=True)):
            bias[row, 0, start:, start:] = bias_of_a_text(layer, task, 6 - start)
        positions = torch.arange(6)[None] if mask is None else (mask.long().cumsum(-1) - 1).clamp(min=0)
        given = {"padding_mask": mask, "positions": positions, "inputs": {"tasks": TASKS}}
        context = make_context(6, causal, **given, implementation="eager" if path == "eager" else "sdpa")
        with small_blocks():
            (result,) = run_layers([layer], states, context)
        scores = query @ key.mT / HEAD**0.5 + bias
        weights = softmax_by_rows(scores, allowed_pairs(6, causal, mask))
        expected = layer.o_proj((weights @ value).transpose(1, 2).flatten(2))
        real = torch.ones(4, 6).bool() if mask is None else mask
        close(result.output[real].detach(), expected[real].detach())


def small(**fields):
    attention = {"type": "ca_mtl", "num_tasks": 3, "num_blocks": 6}
    return XFCAMTLConfig(**{**GEOMETRY, "attention": attention, "hidden_dropout_prob": 0.0, **fields})


def test_a_new_model_is_one_without_the_bias():
    torch.manual_seed(0)
    model = XFCAMTLForMaskedLM(small()).double().eval()
    plain = XFormerForMaskedLM(XFormerConfig(**GEOMETRY)).double().eval()
    assert plain.load_state_dict(model.state_dict(), strict=False).missing_keys == []
    ids, mask = pad([tokens(9, high=50), tokens(5, high=50, seed=1)], 9, "left")
    with torch.no_grad():
        found, expected = (
            m(ids, attention_mask=mask, **more).logits for m, more in ((model, {"tasks": TASKS[:2]}), (plain, {}))
        )
    close(found[mask.bool()], expected[mask.bool()])


def test_tasks_of_a_batch():
    """A batch of several tasks is what each text gives alone; tasks differ; every parameter learns."""
    model = make_strong(XFCAMTLForMaskedLM(small()).double()).eval()
    ids, mask = pad([tokens(9, high=50), tokens(5, high=50, seed=1)], 9, "right")
    with torch.no_grad():
        both = model(ids, attention_mask=mask, tasks=torch.tensor([1, 2])).logits
        close(both[:1], model(ids[:1], tasks=torch.tensor([1])).logits)
        close(both[1:, :5], model(ids[1:, :5], tasks=torch.tensor([2])).logits)
        assert not torch.allclose(both[:1], model(ids[:1], tasks=torch.tensor([0])).logits, atol=1e-4)
    model.train()(ids, tasks=torch.tensor([1, 2]), labels=ids).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_what_cannot_be_is_refused():
    model = XFCAMTLForMaskedLM(small(position="none"))
    with pytest.raises(ValueError, match="for 3 tasks: give `tasks`"):
        model(tokens(2, 5, high=50))
    with pytest.raises(ValueError, match=r"`tasks` must be \[batch\]"):
        model(tokens(2, 5, high=50), tasks=torch.zeros(2, 5).long())
    with pytest.raises(ValueError, match="has 25 tokens, but ca_mtl's table has 24"):
        model(tokens(2, 25, high=50), tasks=TASKS[:2])

"""Longformer with global tokens against loops over its definition, and which tokens heads choose."""

import pytest
import torch

from hf_xformers.variants.longformer import (
    XFLongformerConfig,
    XFLongformerForCausalLM,
    XFLongformerForMaskedLM,
    XFLongformerForMultipleChoice,
    XFLongformerForQuestionAnswering,
    XFLongformerForSequenceClassification,
)
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    build_layers,
    make_context,
    run_layers,
    softmax_by_rows,
    split_heads,
    vectors,
)
from tests.helpers import close, make_strong, tokens

SPEC = {"type": "longformer", "attention_window": 4}
DILATED = {"type": "longformer", "attention_window": 4, "attention_dilation": (1, (1, 1, 2, 3), 1)}
SMALL = {**GEOMETRY, "num_hidden_layers": 2, "pad_token_id": 1, "max_position_embeddings": 40}


SIDES = ("none", "right", "left", "empty")


def pad_mask(length, real, side):
    """[B, T] masks of one full row and one with `real` tokens (or none)."""
    if side == "none":
        return None
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1] = False
    if side != "empty":
        mask[1, slice(0, real) if side == "right" else slice(length - real, length)] = True
    return mask


def allowed_by(reads, length, heads, causal, mask=None):
    """[B, H, T, T] boolean: `reads(i, j, head, n)` for positions counted from the first real token of n real ones."""
    masks = torch.ones(1, length, dtype=torch.bool) if mask is None else mask
    allowed = torch.zeros(masks.shape[0], heads, length, length, dtype=torch.bool)
    for row, real in enumerate(masks):
        where = real.nonzero().flatten().tolist()
        for head in range(heads):
            for a in where:
                for b in where:
                    i, j = a - where[0], b - where[0]
                    allowed[row, head, a, b] = reads(i, j, head, len(where)) and not (causal and j > i)
    return allowed


@torch.no_grad()
def by_hand(layer, states, allowed, chosen, real):
    """Two softmaxes with two sets of projections; the rows of global tokens come from the second."""

    def attention(kind, allowed):
        parts = (getattr(layer, f"{name}{kind}") for name in "qkv")
        q, k, v = (split_heads(part(states), layer.head_dim) for part in parts)
        return (softmax_by_rows(q @ k.transpose(2, 3) * layer.head_dim**-0.5, allowed) @ v).transpose(1, 2)

    local = attention("_proj", allowed | (chosen[:, None, None, :] & real[:, None, :, None]))
    own = attention("_global_proj", real[:, None, None, :])
    return layer.o_proj(torch.where(chosen[:, :, None, None], own, local).flatten(2))


def window(gaps=(1,) * HEADS):
    return lambda i, j, h, n: j in [i + gaps[h] * t for t in (-2, -1, 0, 1, 2)]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("spec", [SPEC, DILATED], ids=["window", "gaps"])
def test_equation(spec, side):
    """Rows with different global tokens: inside a window, at the ends, none; some of them padding."""
    layer = build_layers(spec, 3)[1]
    length, states = 15, vectors(2, 15)
    mask = pad_mask(length, 10, side)
    real = torch.ones(2, length, dtype=torch.bool) if mask is None else mask
    gaps = (1, 1, 2, 3) if spec is DILATED else (1,) * HEADS
    allowed = allowed_by(window(gaps), length, HEADS, False, mask).expand(2, -1, -1, -1)
    for places in ([[0], [4, 5, 14]], [[3, 4, 12], []], [[], []], [list(range(15)), [7]]):
        given = torch.zeros(2, length, dtype=torch.long)
        for row, chosen in enumerate(places):
            given[row, chosen] = 1
        expected = by_hand(layer, states, allowed, (given > 0) & real, real)
        for implementation in ("eager", "sdpa"):
            inputs = {"global_attention_mask": given}
            context = make_context(length, padding_mask=mask, implementation=implementation, inputs=inputs)
            output = run_layers([layer], states, context)[0].output
            close(output.detach()[real], expected[real])
            assert output.isfinite().all()


def test_global_projections_start_as_copies():
    model = XFLongformerForMaskedLM(XFLongformerConfig(**SMALL, attention=SPEC))
    for layer in model.model.trunk.layers:
        for name in "qkv":
            own, local = getattr(layer.attention, f"{name}_global_proj"), getattr(layer.attention, f"{name}_proj")
            assert torch.equal(own.weight, local.weight) and own.weight is not local.weight
            assert local.weight.std() > 0.01


# ------------------------------------------------------------------------------------------------ whole models


def model_of(head, **fields):
    torch.manual_seed(0)
    config = XFLongformerConfig(**{**SMALL, "attention": SPEC, "sep_token_id": 2, **fields})
    return make_strong(head(config).double().eval(), amount=0.3)


def test_heads_choose_global_tokens():
    """What a head does without `global_attention_mask` equals the mask that its documentation names."""
    ids = tokens(2, 13, low=5, high=50)
    ids[0, [4, 5, 12]], ids[1, 7] = 2, 2
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    first, question, answer = (torch.zeros_like(ids) for _ in range(3))
    first[0, 2] = first[1, 0] = 1
    question[0, 2:4] = question[1, :7] = 1
    answer[0, 6:] = answer[1, 9:] = 1
    heads = {
        XFLongformerForSequenceClassification: first,
        XFLongformerForQuestionAnswering: question,
        XFLongformerForMultipleChoice: answer,
    }
    for head, expected in heads.items():
        model, given = model_of(head), {"input_ids": ids, "attention_mask": mask}
        more = {"global_attention_mask": expected}
        if head is XFLongformerForMultipleChoice:
            given, more = ({name: tensor[None] for name, tensor in part.items()} for part in (given, more))
        with torch.no_grad():
            chosen, told = model(**given), model(**given, **more)
            other = model(**given, global_attention_mask=torch.zeros_like(given["input_ids"]))
        close(chosen[0], told[0])
        assert (chosen[0] - other[0]).abs().max() > 1e-6
    no_separator = tokens(2, 13, low=5, high=50)
    model = model_of(XFLongformerForQuestionAnswering)
    with torch.no_grad():
        none = model(no_separator, global_attention_mask=torch.zeros_like(no_separator))
        close(model(no_separator).start_logits, none.start_logits)


def test_refusals():
    ids = tokens(2, 9, high=50)
    with pytest.raises(ValueError, match="causal decoder, whose tokens cannot read later ones"):
        model_of(XFLongformerForCausalLM)(ids, global_attention_mask=torch.ones_like(ids))
    encoder = model_of(XFLongformerForMaskedLM, attention={**SPEC, "max_global_tokens": 2})
    with pytest.raises(ValueError, match=r"\[batch, length\] with length 9, got \[2, 8\]"):
        encoder(ids, global_attention_mask=torch.ones(2, 8))
    with pytest.raises(ValueError, match="has 9 tokens, more than `max_global_tokens` 2"):
        encoder(ids, global_attention_mask=torch.ones_like(ids))


def test_compile_with_global_tokens():
    """One graph, where the number of global tokens is bounded."""
    model = model_of(XFLongformerForMaskedLM, attention={**SPEC, "max_global_tokens": 3})
    ids, chosen = tokens(2, 13, high=50), torch.zeros(2, 13, dtype=torch.long)
    chosen[0, 1] = chosen[1, 5] = chosen[1, 6] = 1
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        close(compiled(ids, global_attention_mask=chosen).logits, model(ids, global_attention_mask=chosen).logits)
    torch._dynamo.reset()

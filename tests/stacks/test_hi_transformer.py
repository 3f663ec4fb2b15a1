"""Hi-Transformer against the three Transformers written out sentence by sentence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_xformers import XFormerConfig, XFormerForSequenceClassification, XFormerModel
from hf_xformers.blocks.nesting import make_nesting, sentence_ids_of
from tests.helpers import NO_DROPOUT, close, make_strong, pad, tokens
from tests.stacks.layer_equations import linear, norm

WIDTH, SIZE, HEADS = 4, 16, 2
SIZES = {
    "vocab_size": 99,
    "hidden_size": SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "add_pooler": True,
    "position": "none",
    **NO_DROPOUT,
}


def build(cls=XFormerModel, width=WIDTH, share=False, **more):
    config = XFormerConfig(
        **{
            **SIZES,
            "stack": {"type": "hi_transformer", "segment_length": width},
            "block": {"type": "hi_transformer", "share_sentence_layers": share},
            **more,
        }
    )
    torch.manual_seed(0)
    return make_strong(cls(config).double().eval(), amount=0.3)


# ------------------------------------------------------------------------------------------------ by hand


def transformer(layer, prefix, x):
    """One post-LN Transformer layer on the rows of x [N, D], head by head."""
    attention, heads = getattr(layer, f"{prefix}attention"), []
    for head in range(HEADS):
        part = slice(head * SIZE // HEADS, (head + 1) * SIZE // HEADS)
        q, k, v = (linear(p, x)[:, part] for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        heads.append((q @ k.T / (SIZE // HEADS) ** 0.5).softmax(-1) @ v)
    x = norm(getattr(layer, f"{prefix}attention_residual").norm, x + linear(attention.o_proj, torch.cat(heads, -1)))
    inner = nn.functional.gelu(linear(getattr(layer, f"{prefix}feedforward").up_proj, x))
    outer = linear(getattr(layer, f"{prefix}feedforward").down_proj, inner)
    return norm(getattr(layer, f"{prefix}feedforward_residual").norm, x + outer)


def pooled(module, items):
    weights = (torch.tanh(linear(module.key, items)) @ module.query.weight[0]).softmax(0)
    return weights @ items


def reference(net, sentences):
    """States of all words in order, and the text's vector, for one text given as a list of sentences (ids)."""
    trunk = net.trunk
    words = [trunk.embedding.tokens.weight[ids] + trunk.stack.word_table.weight[: len(ids)] for ids in sentences]
    for index, layer in enumerate(trunk.layers):
        if index == 0:
            first = "first_" if hasattr(layer, "first_attention") else ""
            words = [transformer(layer, first, part) for part in words]
        vectors = torch.stack([pooled(layer.pooling, part) for part in words])
        vectors = transformer(layer, "document_", vectors + trunk.stack.sentence_table.weight[: len(words)])
        words = [
            transformer(layer, "", torch.cat([part, vector[None] + layer.document_mark]))[:-1]
            for part, vector in zip(words, vectors)
        ]
    whole = pooled(net.pooler.sentences, torch.stack([pooled(net.pooler.words, part) for part in words]))
    return torch.cat(words), whole


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("length", [1, 3, 4, 9, 12])
def test_equals_literal(length, share):
    """Sentences of WIDTH words, the last one shorter."""
    net, ids = build(share=share), tokens(2, length)
    with torch.no_grad():
        output = net(input_ids=ids)
        for index, row in enumerate(ids):
            states, vector = reference(net, row.split(WIDTH))
            close(output.last_hidden_state[index], states)
            close(output.pooler_output[index], vector)


@pytest.mark.parametrize("side", ["right", "left"])
def test_sentences_of_their_own(side):
    """`sentence_ids` end sentences, longer ones are cut at WIDTH; padding on either side changes nothing."""
    net = build()
    lengths = ([2, 4, 1], [3, 6], [1])  # of sentences; six words are four and two
    rows = [tokens(sum(parts), seed=index) for index, parts in enumerate(lengths)]
    ids, mask = pad(rows, 11, side, seed=5)
    numbers = torch.full((3, 11), 77)
    for index, parts in enumerate(lengths):
        numbers[index, mask[index].bool()] = torch.repeat_interleave(
            torch.tensor([5, 9, 5])[: len(parts)], torch.tensor(parts)
        )
    with torch.no_grad():
        output = net(input_ids=ids, attention_mask=mask, sentence_ids=numbers)
        for index, parts in enumerate(lengths):
            sentences = [piece for part in rows[index].split(parts) for piece in part.split(WIDTH)]
            states, vector = reference(net, sentences)
            close(output.last_hidden_state[index, mask[index].bool()], states)
            close(output.pooler_output[index], vector)


def test_classifier():
    """The head reads the text's vector."""
    net = build(XFormerForSequenceClassification, num_labels=3)
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "left")
    given = {"input_ids": ids, "attention_mask": mask, "sentence_ids": torch.arange(9).expand(2, -1) // 3}
    with torch.no_grad():
        close(net(**given).logits, net.classifier(net.model(**given).pooler_output))


def test_attention_weights():
    """Of each sentence's words and the text's vector: rows sum to 1, nothing on places without a word."""
    net = build()
    with torch.no_grad():
        weights = net(input_ids=tokens(2, 6), output_attentions=True).attentions
    assert len(weights) == 2
    for layer in weights:
        assert layer.shape == (4, HEADS, WIDTH + 1, WIDTH + 1)
        close(layer.sum(-1), torch.ones(4, HEADS, WIDTH + 1, dtype=torch.float64))
        assert (layer[1::2, :, :, 2:4] == 0).all()


# ------------------------------------------------------------------------------------------------ nesting


def test_nesting_and_back():
    """Every real token has one place, in the order of its sentence, and comes back to where it was."""
    values = torch.arange(2 * 9.0).view(2, 9, 1) + 1
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0, 0, 0]]).bool()
    nesting = make_nesting(values, mask, None, 4)
    nested = nesting.nest(values).view(2, 3, 4)
    expected = torch.tensor([[[2.0, 3, 5, 6], [7, 8, 9, 0], [0] * 4], [[10, 11, 12, 0], [0] * 4, [0] * 4]])
    assert torch.equal(nested, expected) and torch.equal(nesting.words, expected > 0)
    assert torch.equal(nesting.flatten(nested.view(6, 4, 1), 9)[..., 0], values[..., 0] * mask)
    assert torch.equal(nesting.filled, torch.tensor([[True, True, False], [True, False, False]]))


def test_separators():
    ids = torch.tensor([[5, 6, 2, 7, 3, 2, 8], [2, 5, 5, 5, 5, 5, 3]])
    assert sentence_ids_of(ids, (2,)).tolist() == [[0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1]]
    assert sentence_ids_of(ids, [2, 3]).tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]


def test_refusals():
    with pytest.raises(ValueError, match="cannot stand in a decoder"):
        build(is_decoder=True)
    assert build()(input_ids=tokens(1, 41)).last_hidden_state.isfinite().all()  # positions are those of sentences
    with pytest.raises(ValueError, match=r"has 41 sentences .* positions for 40; .*\(`max_position_embeddings`\)"):
        build()(input_ids=tokens(1, 41), sentence_ids=torch.arange(41)[None])
    with pytest.raises(ValueError, match="takes no 4-D mask"):
        build()(input_ids=tokens(1, 4), attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"`sentence_ids` must be \[batch, length\] = \[1, 4\]"):
        build()(input_ids=tokens(1, 4), sentence_ids=torch.zeros(1, 5).long())

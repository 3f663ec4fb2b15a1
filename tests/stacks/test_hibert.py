"""HIBERT: against two Transformers written out sentence by sentence, and what its decoder reads."""

from __future__ import annotations

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForMaskedSentences, XFormerForSequenceClassification, XFormerModel
from hf_xformers.attention.memory_vector import MemoryVector
from tests.helpers import NO_DROPOUT, close, make_strong, pad, tokens
from tests.stacks.test_hi_transformer import SIZES, linear, transformer

WIDTH = 4


def build(cls=XFormerModel, **more):
    stack = {"type": "hibert", "segment_length": WIDTH, **more.pop("stack", {})}
    fields = {**SIZES, **NO_DROPOUT, "num_hidden_layers": 2, "stack": stack, "cross_attention": "memory_vector"}
    fields["decoder"] = {"stack": "plain", "position": "sinusoidal_absolute"}
    torch.manual_seed(0)
    config = XFormerConfig(**{**fields, "pad_token_id": 0, "decoder_start_token_id": 0, **more})
    return make_strong(cls(config).double().eval(), amount=0.3)


def reference(net, sentences):
    """(states of all words, vectors of sentences) of one text, a list of sentences (ids)."""
    trunk = net.trunk
    words = [trunk.embedding.tokens.weight[ids] + trunk.stack.word_table.weight[: len(ids)] for ids in sentences]
    words = [transformer(trunk.layers[0], "", part) for part in words]
    ends = torch.stack([part[-1] for part in words]) + trunk.stack.sentence_table.weight[: len(words)]
    vectors = transformer(trunk.layers[1], "", ends)
    states = [
        torch.cat([part[:-1] + vector, vector.unsqueeze(0)]) for part, vector in zip(words, vectors, strict=True)
    ]
    return torch.cat(states), vectors


def text(*lengths, seed=0):
    ids = tokens(sum(lengths), seed=seed)
    numbers = torch.cat([torch.full((length,), index) for index, length in enumerate(lengths)])
    return ids, numbers


@pytest.mark.parametrize("side", ["right", "left"])
def test_against_two_transformers_by_hand(side):
    net = build()
    lengths = (4, 1, 3), (2, 4), (3,)  # the last has one sentence alone
    rows = [text(*counts, seed=index) for index, counts in enumerate(lengths)]
    ids, mask = pad([ids for ids, _ in rows], 9, side, seed=5)
    numbers = pad([numbers for _, numbers in rows], 9, side)[0]
    with torch.no_grad():
        states = net(input_ids=ids, attention_mask=mask, sentence_ids=numbers).last_hidden_state
        for row, counts in enumerate(lengths):
            expected, _ = reference(net, list(rows[row][0].split(list(counts))))
            close(states[row][mask[row].bool()], expected)


def test_sentences_without_numbers_are_of_equal_length():
    net, ids = build(), tokens(1, 10)
    with torch.no_grad():
        close(net(input_ids=ids).last_hidden_state[0], reference(net, list(ids[0].split(WIDTH)))[0])


def test_pooled_vector_is_of_the_mean_of_sentences():
    net = build(XFormerForSequenceClassification)
    ids, numbers = text(3, 2, 4)
    padded, mask = pad([ids], 12, "left", seed=3)
    with torch.no_grad():
        _, vectors = reference(net.model, list(ids.split([3, 2, 4])))
        expected = linear(net.classifier, torch.tanh(linear(net.model.pooler.dense, vectors.mean(0))))
        shifted = pad([numbers], 12, "left")[0]
        close(net(input_ids=padded, attention_mask=mask, sentence_ids=shifted).logits[0], expected)


def test_a_sentence_is_written_from_its_vector_alone():
    net = build(XFormerForMaskedSentences)
    ids, numbers = text(3, 2, 4)
    places, labels = torch.tensor([[2, 8, -1]]), tokens(1, 3, 4, seed=2)
    labels[0, 0, 3], labels[0, 2] = -100, -100
    states = []
    forward = net.model.trunk.forward

    def spied(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.last_hidden_state.retain_grad()
        states.append(output.last_hidden_state)
        return output

    net.model.trunk.forward = spied
    output = net(input_ids=ids[None], sentence_ids=numbers[None], target_positions=places, labels=labels)
    output.logits[0, 1].sum().backward()
    assert states[0].grad[0].abs().sum(-1).nonzero().flatten().tolist() == [8]
    flat, target = output.logits.flatten(0, 2), labels.flatten()
    close(output.loss, torch.nn.functional.cross_entropy(flat[target != -100], target[target != -100]), 1e-6)
    net.model.trunk.forward = forward
    with torch.no_grad():  # each by itself
        one = net(input_ids=ids[None], sentence_ids=numbers[None], target_positions=places[:, 0], labels=labels[:, 0])
        close(one.logits[0, :3], output.logits[0, 0, :3])
        made = net.generate(
            input_ids=ids[None], sentence_ids=numbers[None], target_positions=places[:, :1], max_new_tokens=4
        )
        again = net(
            input_ids=ids[None], sentence_ids=numbers[None], target_positions=places[:, 0],
            decoder_input_ids=made[:, :-1], use_cache=False,
        )  # fmt: skip
        begun = net(ids[None], sentence_ids=numbers[None], decoder_input_ids=made[:, :2], use_cache=True)
        given = {"decoder_input_ids": made[:, 2:], "past_key_values": begun.past_key_values}
        later = net(ids[None], sentence_ids=numbers[None], **given)
        whole = net(ids[None], sentence_ids=numbers[None], decoder_input_ids=made)
        close(later.logits, whole.logits[:, 2:])
    assert torch.equal(again.logits.argmax(-1), made[:, 1:])


def test_memory_vector_adds_the_mean_of_real_items():
    memory, mask = torch.randn(2, 3, 8, dtype=torch.float64), torch.tensor([[True, False, True], [False] * 3])
    context = type("Context", (), {"memory_padding_mask": mask})()
    added = MemoryVector()(torch.zeros(2, 5, 8, dtype=torch.float64), context, memory=memory).output
    close(added[0, 4], (memory[0, 0] + memory[0, 2]) / 2)
    assert not added[1].any()


def test_wrong_inputs_are_refused():
    net = build(stack={"max_sentences": 2})
    with pytest.raises(
        ValueError, match="has 3 sentences of at most 4 tokens, but stack 'hibert' has positions for 2"
    ):
        net(input_ids=tokens(1, 9))
    with pytest.raises(ValueError, match="takes no 4-D mask"):
        net(input_ids=tokens(1, 4), attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool))
    writer = build(XFormerForMaskedSentences)
    with pytest.raises(ValueError, match="2 sentences in 1 rows do not belong to `target_positions`"):
        writer(input_ids=tokens(1, 8), target_positions=torch.tensor([[3]]), labels=tokens(1, 2, 4))

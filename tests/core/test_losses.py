"""Losses against a loop over tokens."""

import math

import pytest
import torch

from hf_xformers import (
    XFormerConfig,
    XFormerForCausalLM,
    XFormerForMaskedLM,
    XFormerForPreTraining,
    XFormerForSeq2SeqLM,
)
from hf_xformers.core.losses import token_cross_entropy, with_aux_losses
from tests.helpers import NO_DROPOUT, close, make_strong, tokens

SMALL = dict(
    vocab_size=40, hidden_size=16, num_attention_heads=4, num_hidden_layers=1, intermediate_size=16, num_labels=3
)


def by_hand(logits, labels):
    """Sum of -log softmax(logits)[label] over labelled tokens (nats), and their number."""
    total, count = 0.0, 0
    for row, label in zip(logits.detach().flatten(0, -2).double().tolist(), labels.flatten().tolist()):
        if label != -100:
            top = max(row)
            total += math.log(sum(math.exp(x - top) for x in row)) + top - row[label]
            count += 1
    return total, count


def some_labels():
    labels = tokens(2, 5, low=0, high=7)
    labels[0, 1:3] = -100
    return labels


def test_mean_over_labelled_tokens():
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total, count = by_hand(logits, some_labels())
    close(token_cross_entropy(logits, some_labels()), torch.tensor(total / count, dtype=torch.float64))
    for given in (17, torch.tensor(17)):
        close(token_cross_entropy(logits, some_labels(), given), torch.tensor(total / 17, dtype=torch.float64))


def test_pieces_of_a_batch_add_up():
    """Gradient accumulation: with the count of the whole batch, the pieces' losses sum to the whole batch's."""
    logits = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.cat([some_labels(), some_labels().flip(0)])
    labels[3] = -100
    whole = token_cross_entropy(logits, labels)
    count = int((labels != -100).sum())
    close(sum(token_cross_entropy(logits[n : n + 1], labels[n : n + 1], count) for n in range(4)), whole)


def test_auxiliary_losses():
    loss = torch.tensor(1.0)
    assert with_aux_losses(None, {"balance": loss}) is None
    assert with_aux_losses(loss, None) == 1.0 and with_aux_losses(loss, {}) == 1.0
    assert with_aux_losses(loss, {"balance": torch.tensor(0.25), "ponder": torch.tensor(0.5)}) == 1.75


def build(model_class, **fields):
    torch.manual_seed(0)
    return make_strong(model_class(XFormerConfig(**SMALL, **NO_DROPOUT, **fields)).double().eval())


def labels_of(ids):
    labels = ids.clone()
    labels[0, :2] = -100
    return labels


HEADS = {  # what is compared with what
    XFormerForMaskedLM: lambda logits, labels: by_hand(logits, labels),
    XFormerForCausalLM: lambda logits, labels: by_hand(logits[:, :-1], labels[:, 1:]),
    XFormerForSeq2SeqLM: lambda logits, labels: by_hand(logits, labels),
}


@pytest.mark.parametrize("model_class", list(HEADS), ids=lambda cls: cls.__name__)
def test_language_models(model_class):
    model, ids = build(model_class), tokens(2, 6, high=40)
    labels = labels_of(ids)
    output = model(input_ids=ids, labels=labels)
    total, count = HEADS[model_class](output.logits, labels)
    close(output.loss, torch.tensor(total / count, dtype=torch.float64))
    output = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(31))
    close(output.loss, torch.tensor(total / 31, dtype=torch.float64))
    for count in (None, 0, torch.tensor(0)):  # of a batch, and of a whole step
        empty = model(input_ids=ids, labels=torch.full_like(ids, -100), num_items_in_batch=count)
        assert empty.loss == 0.0
        empty.loss.backward()
        assert all((parameter.grad == 0).all() for parameter in model.parameters() if parameter.grad is not None)


def test_labels_that_are_shifted_already():
    model, ids = build(XFormerForCausalLM), tokens(2, 6, high=40)
    labels = labels_of(ids)
    shifted = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], 1)
    close(model(ids, labels=labels, shift_labels=shifted).loss, model(ids, labels=labels).loss)


def test_seq2seq_reads_labels_late():
    """The decoder sees the start token and the labels before each target, padding where there is no target."""
    model, ids, labels = (
        build(XFormerForSeq2SeqLM, decoder_start_token_id=2),
        tokens(2, 6, high=40),
        tokens(2, 4, high=40),
    )
    labels[1, 2:] = -100
    late = torch.cat([torch.full((2, 1), 2), labels[:, :-1]], 1).masked_fill(
        torch.tensor([[0] * 4, [0, 0, 0, 1]]) == 1, 0
    )
    labelled = labels != -100
    output = model(input_ids=ids, labels=labels)
    close(output.logits[labelled], model(input_ids=ids, decoder_input_ids=late).logits[labelled])
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), late)


def test_pretraining_is_a_sum():
    model, ids = build(XFormerForPreTraining), tokens(2, 6, high=40)
    labels, pairs = labels_of(ids), torch.tensor([1, 0])
    output = model(ids, labels=labels, next_sentence_label=pairs)
    words, sentences = by_hand(output.prediction_logits, labels), by_hand(output.seq_relationship_logits, pairs)
    assert abs(output.loss.item() - (words[0] / words[1] + sentences[0] / 2)) < 1e-6
    assert model(ids, labels=labels).loss is None


def test_logits_to_keep():
    for model_class in (XFormerForCausalLM, XFormerForSeq2SeqLM):
        model, ids = build(model_class), tokens(2, 6, high=40)
        more = {"decoder_input_ids": ids} if model_class is XFormerForSeq2SeqLM else {}
        whole = model(input_ids=ids, **more).logits
        close(model(input_ids=ids, logits_to_keep=2, **more).logits, whole[:, -2:])
        close(model(input_ids=ids, logits_to_keep=torch.tensor([1, 4]), **more).logits, whole[:, [1, 4]])


def padded_labels(side):
    """Two targets of 5 and 2 tokens as the labels of a batch."""
    parts = [tokens(1, length, seed=length, low=3, high=40) for length in (5, 2)]
    filler = torch.full((1, 3), -100)
    short = [parts[1], filler] if side == "right" else [filler, parts[1]]
    return parts, torch.cat([parts[0], torch.cat(short, 1)])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("prepared", [False, True])
def test_padded_labels_are_padding_for_the_decoder(side, prepared):
    """Logits, balance losses and capacity are those of the texts alone, with inputs made by the model or a
    collator."""
    experts = {"type": "switch_transformer", "num_experts": 4, "capacity_factor": 1.0, "jitter": 0.0}
    fields = {"feedforward": experts, "decoder_start_token_id": 2}
    model, ids = build(XFormerForSeq2SeqLM, **fields).train(), tokens(2, 6, high=40)
    parts, labels = padded_labels(side)
    given = {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels)} if prepared else {}
    batch = model(input_ids=ids, labels=labels, **given)
    for row, part in enumerate(parts):
        one = labels[row : row + 1]
        alone = model(input_ids=ids[row : row + 1], labels=part)
        given = {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(one)} if prepared else {}
        found = model(input_ids=ids[row : row + 1], labels=one, **given)
        close(batch.logits[row][labels[row] != -100], alone.logits[0])
        for name in alone.aux_losses:
            close(found.aux_losses[name], alone.aux_losses[name])
        close(found.loss, alone.loss)


def test_other_decoder_inputs_are_taken_as_they_are():
    """A prompt without labels is read, whatever the labels are."""
    model, ids = build(XFormerForSeq2SeqLM), tokens(2, 6, high=40)
    labels, read = tokens(2, 4, low=3, high=40), tokens(2, 4, seed=1, low=3, high=40)
    labels[:, :2] = -100
    close(
        model(input_ids=ids, decoder_input_ids=read, labels=labels).logits,
        model(input_ids=ids, decoder_input_ids=read).logits,
    )


def test_left_padding_predicts_no_token():
    """With padding on the left a text has the loss that it has alone, whoever made the labels."""
    model, ids = build(XFormerForCausalLM), tokens(1, 4, low=3, high=40)
    alone = model(input_ids=ids, labels=ids).loss
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    close(model(input_ids=padded, attention_mask=mask, labels=padded.masked_fill(mask == 0, -100)).loss, alone)

"""Causal LM: labels by attention mask, no shift, loss against a loop."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_xformers.objectives import CausalLMObjective
from hf_xformers.objectives.causal_lm import causal_labels


def test_golden_labels_with_pad_equal_to_eos(gpt_tokenizer):
    """Ledger F13: pad id = eos id = 0. The eos of the text stays a target, padding does not."""
    batch = CausalLMObjective().collator(gpt_tokenizer)(
        [{"input_ids": [5, 6, 0]}, {"input_ids": [7, 0, 0, 0], "attention_mask": [1, 1, 0, 0]}]
    )
    assert batch["input_ids"].tolist() == [[5, 6, 0, 0], [7, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[5, 6, 0, -100], [7, 0, -100, -100]]
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert all(value.dtype == torch.int64 for value in batch.values())


def test_no_pad_token_at_all(gpt_tokenizer):
    stub = SimpleNamespace(pad_token_id=None, eos_token_id=None)
    batch = CausalLMObjective().collator(stub, pad_to_multiple_of=4)([{"input_ids": [5, 6]}])
    assert batch["input_ids"].tolist() == [[5, 6, 0, 0]]
    assert batch["labels"].tolist() == [[5, 6, -100, -100]]


def test_loss_with_internal_shift_equals_a_loop(gpt_tokenizer):
    """Guards against a double shift: logits at t are scored with the token at t + 1, padding is not scored."""
    rows = [[3, 4, 5, 0], [6, 7], [8]]
    batch = CausalLMObjective().collator(gpt_tokenizer, pad_to_multiple_of=6)([{"input_ids": row} for row in rows])
    vocabulary = len(gpt_tokenizer)
    logits = torch.randn(3, 6, vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    total, count = 0.0, 0
    for index, row in enumerate(rows):
        for position in range(len(row) - 1):
            scores = logits[index, position]
            total += math.log(sum(math.exp(s) for s in scores.tolist())) - float(scores[row[position + 1]])
            count += 1
    loss = ForCausalLMLoss(logits, batch["labels"], vocabulary)
    assert float(loss) == pytest.approx(total / count, rel=1e-6)  # the library's loss computes in float32
    uniform = ForCausalLMLoss(torch.zeros_like(logits), batch["labels"], vocabulary)
    assert float(uniform) == pytest.approx(math.log(vocabulary), rel=1e-6)


def test_documents_kept_apart_do_not_predict_each_other(gpt_tokenizer):
    """Packed rows with restarting position ids have the targets of the separate documents."""
    packed = {"input_ids": [5, 6, 7, 8, 9], "position_ids": [0, 1, 2, 0, 1]}
    batch = CausalLMObjective().collator(gpt_tokenizer)([packed])
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    shifted = batch["labels"][0, 1:]
    assert shifted[shifted >= 0].tolist() == [6, 7] + [9]
    plain = causal_labels(batch["input_ids"], torch.ones_like(batch["input_ids"]))
    assert plain.tolist() == [[5, 6, 7, 8, 9]]


def test_padding_on_the_left_predicts_nothing(gpt_tokenizer, monkeypatch):
    """The token before a text's first one is padding: no label there, and the loss of the text alone."""
    monkeypatch.setattr(gpt_tokenizer, "padding_side", "left")
    rows = [[3, 4, 5, 6], [7, 8]]
    batch = CausalLMObjective().collator(gpt_tokenizer)([{"input_ids": row} for row in rows])
    assert batch["input_ids"].tolist() == [[3, 4, 5, 6], [gpt_tokenizer.pad_token_id] * 2 + [7, 8]]
    assert batch["labels"].tolist() == [[3, 4, 5, 6], [-100, -100, -100, 8]]


def test_packed_rows_reach_the_model_as_such(gpt_tokenizer):
    """A mask would say that positions are positions alone; without it documents are kept apart."""
    collator = CausalLMObjective().collator(gpt_tokenizer)
    rows = [{"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 0, 1]}, {"input_ids": [9, 3], "position_ids": [0, 1]}]
    assert set(collator(rows)) == {"input_ids", "labels", "position_ids"}
    assert "attention_mask" in collator(rows[1:]), "one text per row"

"""Held-out figures of a large vocabulary: the same in pieces, without ever making all logits."""

import copy

import pytest
import torch
from transformers import Trainer

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM, XFormerForMultiTokenPrediction
from hf_xformers.modeling.head_classes import CLASSES
from hf_xformers.training import head_pieces
from hf_xformers.training.attention_transfer import attention_pairs, transfer_losses
from hf_xformers.training.trainer import XFormerTrainer
from tests.helpers import make_strong
from tests.training.runs import quiet, stacked
from tests.training.test_distillation import rows

VOCAB, TOKENS = 40, 9
FIELDS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
CASES = {
    "causal": (XFormerForCausalLM, {}),
    "masked": (XFormerForMaskedLM, {"head": "transform"}),
    "balanced experts": (XFormerForCausalLM, {"feedforward": "switch"}),
    "clusters": (
        XFormerForCausalLM,
        {name: {"type": "adaptive", "cutoffs": [10, 20]} for name in ("embedding", "head")},
    ),
}


def evaluated(model, folder):
    args = quiet(folder, per_device_eval_batch_size=4)
    trainer = XFormerTrainer(model=model, args=args, data_collator=stacked, eval_dataset=rows(8, TOKENS))
    return {name: value for name, value in trainer.evaluate().items() if "second" not in name and "time" not in name}


@pytest.mark.parametrize("name", CASES)
def test_evaluation_in_pieces(name, tmp_path, monkeypatch):
    cls, changes = CASES[name]
    torch.manual_seed(0)
    model = make_strong(cls(XFormerConfig(vocab_size=VOCAB, **FIELDS, **changes)))
    whole, sizes = evaluated(model, tmp_path), []
    monkeypatch.setattr(head_pieces, "NUMBERS_AT_ONCE", 3 * VOCAB)
    model.lm_head.register_forward_hook(lambda module, given, logits: sizes.append(logits[..., 0].numel()))
    pieces = evaluated(model, tmp_path)
    assert pieces.keys() == whole.keys() and sizes and max(sizes) <= 4  # the first token of each row, then three
    assert pieces == pytest.approx(whole, rel=1e-6)


def test_further_tokens_are_in_every_batch(tmp_path, monkeypatch):
    """Of a batch that is large enough for pieces as of the last one, which is not."""
    torch.manual_seed(0)
    model = make_strong(XFormerForMultiTokenPrediction(XFormerConfig(vocab_size=VOCAB, **FIELDS)))
    whole = evaluated(model, tmp_path)
    monkeypatch.setattr(head_pieces, "NUMBERS_AT_ONCE", 2 * TOKENS * VOCAB)
    assert whole == evaluated(model, tmp_path) and whole["eval_aux_multi_token_prediction"] > 0


HEADS = {
    "ForQuestionAnswering": ("start_positions", torch.tensor(1)),
    "ForSequenceClassification": ("labels", torch.tensor([0.5])),
    "ForTokenClassification": ("labels", torch.arange(TOKENS) % 2),
}


@pytest.mark.parametrize("head", HEADS)
def test_what_is_no_class_has_a_loss_alone(head, tmp_path):
    name, label = HEADS[head]
    further = {"end_positions": torch.tensor(2)} if name == "start_positions" else {}
    data = [{"input_ids": row["input_ids"], name: label, **further} for row in rows(6, TOKENS)]
    model = CLASSES[head](
        XFormerConfig(vocab_size=VOCAB, **FIELDS, num_labels=label.numel() if name == "labels" else 2)
    )
    args = quiet(tmp_path, per_device_eval_batch_size=4)
    found = XFormerTrainer(model=model, args=args, data_collator=stacked, eval_dataset=data).evaluate()
    expected = Trainer(model=model, args=args, data_collator=stacked, eval_dataset=data).evaluate()
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    assert ("eval_accuracy" in found) == (head == "ForTokenClassification")


def test_attention_transfer_predicts_nothing():
    torch.manual_seed(0)
    model = XFormerForCausalLM(XFormerConfig(vocab_size=VOCAB, **FIELDS)).eval()
    source, sizes = copy.deepcopy(model), []
    model.lm_head.register_forward_hook(lambda module, given, logits: sizes.append(tuple(logits.shape)))
    transfer_losses(model, attention_pairs(model, source, [0]), {"input_ids": torch.arange(9)[None]})
    assert sizes == [(1, 1, VOCAB)] and not model.under_a_head
    assert model(torch.arange(9)[None]).logits.shape == (1, 9, VOCAB)

"""The discriminator: its loss by hand, and how it is found."""

import math

import pytest
import torch
from transformers import AutoModelForPreTraining

from hf_xformers import XFormerConfig, XFormerForPreTraining, XFormerForReplacedTokenDetection
from hf_xformers.hub.bundle import auto_map, kept_heads
from tests.helpers import close, make_strong, tokens

SIZES = dict(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)


@torch.no_grad()
def test_loss_by_hand():
    torch.manual_seed(0)
    config = XFormerConfig(**SIZES, classifier_transform="dense", classifier_activation="tanh")
    model = make_strong(XFormerForReplacedTokenDetection(config).double().eval())
    ids, labels = tokens(2, 6, high=40), torch.tensor([[0, 1, 1, 0, 0, -100], [1, 0, 0, 1, 1, 1]])
    mask = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])
    output = model(ids, attention_mask=mask, labels=labels)
    assert output.logits.shape == (2, 6)
    states = model.model(ids, attention_mask=mask).last_hidden_state
    hidden = torch.tanh(states @ model.transform.dense.weight.T + model.transform.dense.bias)
    scores = (hidden @ model.classifier.weight.T + model.classifier.bias)[..., 0]
    close(output.logits, scores)
    losses = []
    for row in range(2):
        for place in range(6):
            if mask[row, place] and labels[row, place] >= 0:
                chance = 1 / (1 + math.exp(-float(scores[row, place])))
                losses.append(-math.log(chance if labels[row, place] else 1 - chance))
    assert len(losses) == 9
    close(output.loss, torch.tensor(sum(losses) / 9, dtype=torch.float64))
    counted = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=22)  # by who sees no padding: 11 here
    close(counted.loss, output.loss / 2)
    nothing = model(ids, labels=torch.full_like(labels, -100))
    assert float(nothing.loss) == 0.0
    with pytest.raises(ValueError, match=r"one for each token of the logits, got \[2, 5\]"):
        model(ids, labels=labels[:, :5])


def test_two_classes_behind_one_auto_class(tmp_path):
    """The code that goes with a saved model is that of its own class; the Auto class makes the first."""
    for made in (XFormerForReplacedTokenDetection, XFormerForPreTraining):
        made(XFormerConfig(**SIZES)).save_pretrained(tmp_path)
        heads = kept_heads(made.from_pretrained(tmp_path).config)
        assert heads == ("Model", made.__name__.removeprefix("XFormer"))
        assert auto_map(XFormerConfig, heads)["AutoModelForPreTraining"].endswith(f".{made.__name__}")
    assert type(AutoModelForPreTraining.from_config(XFormerConfig(**SIZES))) is XFormerForPreTraining

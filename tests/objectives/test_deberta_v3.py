"""Replaced token detection of DeBERTa's third version: shared token vectors whose gradients are apart, a generator
with absolute positions in its last layer, and a judgement of each token beside the text."""

import pytest
import torch
import torch.nn.functional as F

from hf_xformers import XFDebertaConfig, XFDebertaForReplacedTokenDetection, XFDebertaForReplacedTokenPreTraining
from hf_xformers.modeling.replaced_token_pretraining import GENERATOR_LOSS
from tests.helpers import close, make_strong, pad, tokens

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 16,
}
TABLE = "model.trunk.embedding.tokens.weight"


def config(**fields):
    small = {"type": "deberta", "buckets": 8, "max_distance": 16, "share_projections": True, "normalize": True}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return XFDebertaConfig.preset("v3_base", **{**SIZES, **quiet, "position": small, **fields})


@pytest.fixture
def model():
    torch.manual_seed(0)
    return make_strong(XFDebertaForReplacedTokenPreTraining(config()).double().train())


def batch():
    labels = tokens(2, 8, low=5, high=40)
    places = torch.tensor([[1, 4], [3, -1]])
    masked = labels.clone()
    masked[[0, 0, 1], [1, 4, 3]] = 4
    draws = torch.tensor([[0.3, 0.9], [0.6, 0.1]])
    return {"input_ids": masked, "labels": labels, "target_positions": places, "sampling_draws": draws}


def test_generator(model):
    """Half as deep and as wide; its scores are those of the masked language model, absolute positions included."""
    assert model.generator.config.num_hidden_layers == 1 and model.generator.config.hidden_size == 16
    given = batch()
    loss = model(**given).aux_losses[GENERATOR_LOSS]
    scores = model.generator(given["input_ids"]).logits
    wanted = torch.full_like(given["labels"], -100)
    wanted[[0, 0, 1], [1, 4, 3]] = given["labels"][[0, 0, 1], [1, 4, 3]]
    close(loss, F.cross_entropy(scores.flatten(0, 1), wanted.flatten()))
    loss.backward()
    assert model.generator.absolute_positions.weight.grad.abs().max() > 0


def test_the_difference_starts_at_zero():
    torch.manual_seed(0)
    model = XFDebertaForReplacedTokenPreTraining(config()).double().eval()
    assert not model.get_parameter(TABLE).any()
    ids = tokens(2, 6, low=5, high=40)
    alone = model.extract("discriminator").eval()
    assert type(alone) is XFDebertaForReplacedTokenDetection
    assert torch.equal(alone.get_parameter(TABLE), model.generator.get_parameter(TABLE))
    close(alone(ids).logits, model(ids).logits)


@torch.no_grad()
def test_judgement_by_hand():
    torch.manual_seed(0)
    model = make_strong(XFDebertaForReplacedTokenDetection(config()).double().eval())
    ids = tokens(2, 6, low=5, high=40)
    output, states = model(ids).logits, model.model(ids).last_hidden_state
    head = model.context
    for row in range(2):
        for place in range(6):
            both = states[row, place] + states[row, 0]
            normed = (both - both.mean()) / (both.var(correction=0) + 1e-7).sqrt() * head.norm.weight + head.norm.bias
            hidden = F.gelu(head.dense.weight @ normed + head.dense.bias)
            close(output[row, place], model.classifier.weight[0] @ hidden + model.classifier.bias[0])
    padded, mask = pad(list(ids), 9, "left")
    close(model(padded, mask).logits[mask.bool()].view_as(output), output)
    plain = XFDebertaForReplacedTokenDetection(config(pretraining={"replaced_tokens": {"detection_context": False}}))
    assert plain.context is None

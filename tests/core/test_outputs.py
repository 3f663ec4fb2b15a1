"""Outputs whose fields are set at once: the same objects as transformers', however they are made."""

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions as Theirs

from hf_xformers.compat import CACHE
from hf_xformers.core.outputs import TowerOutput
from hf_xformers.core.outputs import XFormerCausalLMOutput as Ours
from hf_xformers.variants import config_class, family
from tests.helpers import tiny_fields

TENSOR = torch.arange(3.0)


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ((), {"logits": TENSOR, "attentions": (TENSOR,)}),
        ((), {"loss": TENSOR.sum(), "logits": TENSOR, "past_key_values": "cache"}),
        ((TENSOR.sum(), TENSOR), {}),
        (({"loss": TENSOR.sum(), "logits": TENSOR},), {}),  # as whoever maps over an output makes it again
        (([("loss", TENSOR.sum()), ("logits", TENSOR)],), {}),
        ((), {}),
    ],
)
def test_as_those_of_transformers(arguments, fields):
    ours, theirs = Ours(*arguments, **fields), Theirs(*arguments, **fields)
    assert list(ours.items()) == list(theirs.items())
    assert ours.to_tuple() == theirs.to_tuple()
    for name in ("loss", "logits", "past_key_values", CACHE, "hidden_states", "attentions"):
        assert getattr(ours, name) is getattr(theirs, name), name
    ours.hidden_states, theirs.hidden_states = (TENSOR,), (TENSOR,)
    assert list(ours) == list(theirs)


def test_made_again_from_its_items():
    first = TowerOutput(last_hidden_state=TENSOR, aux_losses={"balance": TENSOR.sum()})
    again = TowerOutput(dict(first))
    assert again.last_hidden_state is TENSOR and again.aux_losses == first.aux_losses and list(again) == list(first)


@pytest.mark.parametrize(
    ("model_type", "head"),
    [
        ("xf_bert", "Model"),
        ("xf_bert", "ForSequenceClassification"),
        ("xf_gpt2", "ForCausalLM"),
        ("xf_t5", "ForSeq2SeqLM"),
        ("xf_vision_transformer", "ForImageClassification"),
        ("xf_conformer", "ForCTC"),
    ],
)
@torch.no_grad()
def test_tuples_where_the_config_says_so(model_type, head):
    config = config_class(model_type)(**tiny_fields(config_class(model_type)), return_dict=False)
    model = family(model_type)[head](config).eval()
    given = {"input_ids": torch.tensor([[5, 6, 7]])}
    if model.main_input_name == "pixel_values":
        given = {"pixel_values": torch.ones(1, config.num_channels, *config.image_shape)}
    elif model.main_input_name == "input_features":
        given = {"input_features": torch.ones(1, 9, config.num_mel_bins)}
    found, expected = model(**given), model(**given, return_dict=True).to_tuple()
    assert isinstance(found, tuple) and len(found) == len(expected) and torch.equal(found[0], expected[0])

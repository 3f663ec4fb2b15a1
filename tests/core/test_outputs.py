"""Outputs whose fields are set at once: the same objects as transformers', however they are made."""

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions as Theirs

from hf_xformers.compat import CACHE
from hf_xformers.core.outputs import TowerOutput
from hf_xformers.core.outputs import XFormerCausalLMOutput as Ours

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

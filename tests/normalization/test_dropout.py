"""A dropout is called where it drops, or where something stands behind it."""

import torch
from torch import nn

from hf_xformers import XFormerConfig, XFormerModel
from hf_xformers.normalization.residual import Residual
from tests.helpers import tokens

STATES = torch.ones(4, 5, 6)


def dropped(module, states):
    """Through the residual frame that has this dropout."""
    frame = Residual(XFormerConfig())
    frame.dropout = module
    return frame.branch(states, None)


def test_training_and_evaluation():
    module = nn.Dropout(0.5)
    torch.manual_seed(0)
    expected = module(STATES)
    torch.manual_seed(0)
    assert torch.equal(dropped(module, STATES), expected) and not torch.equal(expected, STATES)
    assert dropped(module.eval(), STATES) is STATES


def test_what_stands_behind_it_is_heard_in_evaluation():
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        module, calls = nn.Dropout(0.5).eval(), []
        handle = getattr(module, register)(lambda *given: calls.append(len(given)))
        dropped(module, STATES)
        assert len(calls) == 1, register
        handle.remove()
        dropped(module, STATES)
        assert len(calls) == 1, register

    class Doubling(nn.Dropout):
        def forward(self, states):
            return 2 * states

    assert torch.equal(dropped(Doubling().eval(), STATES), 2 * STATES)


def test_dropouts_alone_may_be_set_to_training():
    """Samples of a model that drops in evaluation differ, those of one that does not are the same."""
    torch.manual_seed(0)
    model = XFormerModel(
        XFormerConfig(vocab_size=20, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    ).eval()
    ids = tokens(1, 4, high=20)
    assert torch.equal(model(ids)[0], model(ids)[0])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    assert not torch.equal(model(ids)[0], model(ids)[0])

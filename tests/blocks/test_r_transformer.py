"""R-Transformer: the windows against torch's recurrent networks, one window at a time."""

import pytest
import torch
from torch import nn

from hf_xformers import XFormerConfig
from tests.attention.score_helpers import make_context, vectors
from tests.helpers import close, randomized

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)


def config(**fields):
    block = {"type": "r_transformer", "window": 3, **fields.pop("block", {})}
    return XFormerConfig(**{**SIZES, "position": "none", "residual": "pre_ln", "block": block, **fields})


def local(**block):
    made = config(block=block)
    return randomized(made.block.build(made, layer_idx=0).local_rnn_0, 0.4)


@pytest.mark.parametrize(("cell", "torch_class"), [("gru", nn.GRU), ("lstm", nn.LSTM), ("rnn", nn.RNN)])
@pytest.mark.parametrize("window", [1, 3, 9])
def test_windows_one_by_one(cell, torch_class, window):
    """Zeros before the text and at padding; gradients as well."""
    module, states = local(cell=cell, window=window), vectors(2, 7)
    reference = torch_class(16, 16, batch_first=True).double()
    reference.load_state_dict(
        {
            "weight_ih_l0": module.input_proj.weight,
            "weight_hh_l0": module.state_proj.weight,
            "bias_ih_l0": module.input_proj.bias,
            "bias_hh_l0": module.state_proj.bias,
        }
    )
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 0]]).bool()
    padded = torch.cat([torch.zeros(2, window - 1, 16, dtype=torch.float64), states * mask[..., None]], dim=1)
    expected = torch.stack([reference(padded[:, t : t + window])[0][:, -1] for t in range(7)], dim=1)
    found = module(states, make_context(7, padding_mask=mask)).output
    close(found, expected)
    probe = vectors(2, 7, seed=3)
    ours = torch.autograd.grad((found * probe).sum(), list(module.parameters()), allow_unused=True)
    theirs = torch.autograd.grad((expected * probe).sum(), list(reference.parameters()))
    # Their order: input weight, state weight, input bias, state bias.
    for one, other in zip(ours, (theirs[0], theirs[2], theirs[1], theirs[3]), strict=True):
        close(torch.zeros_like(other) if one is None else one, other)  # a window of one token has no state to read

"""Separable convolutions as a transition: by loop, in the Universal Transformer, while decoding."""

import pytest
import torch

from hf_xformers import XFormerConfig
from tests.attention.score_helpers import make_context, vectors
from tests.blocks.test_evolved_transformer import separable
from tests.helpers import close, make_strong

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24)
REAL = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0, 0, 0]]).bool()


def config(**fields):
    block = {"type": "separable_convolution", **fields.pop("block", {})}
    return XFormerConfig(**{**SIZES, "position": "none", "block": block, **fields})


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_by_loop(causal):
    made = config(is_decoder=causal)
    torch.manual_seed(0)
    module = make_strong(made.block.build(made, layer_idx=0).transition.double().eval(), amount=0.3)
    states = vectors(2, 9)
    found = module(states, make_context(9, causal, padding_mask=REAL)).output
    for b in range(2):
        inner = separable(module.first, states[b], REAL[b], 2 if causal else 1).relu()
        close(found[b], separable(module.second, inner, REAL[b], 4 if causal else 2))

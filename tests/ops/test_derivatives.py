"""Own backward passes have no second derivative, and say so instead of leaving it out."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerModel
from tests.helpers import tokens

OWN = {
    "delta_net": {"attention": "delta_net", "is_decoder": True},
    "linear": {"attention": "linear_transformer"},
    "linear_causal": {"attention": "linear_transformer", "is_decoder": True},
    "adaptive_span": {"attention": "adaptive_span", "is_decoder": True},
    "power_norm": {"normalization": "power_norm"},
    "experts": {"feedforward": {"type": "switch_transformer", "every": 1}},
    "product_keys": {"feedforward": {"type": "product_key_memory", "layers": (0,)}},
    "reversible": {"stack": "reversible", "residual": "pre_ln"},
}


@pytest.mark.parametrize("name", OWN)
def test_refused(name):
    torch.manual_seed(0)
    config = XFormerConfig(
        vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, **OWN[name]
    )
    model = XFormerModel(config).train()
    states = model.get_input_embeddings()(tokens(1, 9)).detach().requires_grad_()
    total = model(inputs_embeds=states, use_cache=False).last_hidden_state.square().sum()
    with pytest.raises(RuntimeError, match="has no second derivative on this path"):
        torch.autograd.grad(total, states, create_graph=True)

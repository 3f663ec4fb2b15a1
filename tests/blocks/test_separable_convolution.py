"""Separable convolutions as a transition: by loop, in the Universal Transformer, while decoding."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM
from tests.attention.score_helpers import make_context, vectors
from tests.blocks.test_evolved_transformer import separable
from tests.helpers import close, make_strong, pad, tokens

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


@torch.no_grad()
def test_in_a_universal_transformer():
    """One layer at every depth, with a state for each step; halting tokens too."""
    torch.manual_seed(0)
    stack = {"type": "universal", "act": "accumulated"}
    model = make_strong(XFormerForCausalLM(config(is_decoder=True, stack=stack)).double().eval())
    ids, mask = pad([tokens(9, high=50), tokens(3, seed=1, high=50)], 9, "left")
    full = model(ids, attention_mask=mask).logits
    close(full[1, 6:], model(ids[1:, 6:]).logits[0])
    cache, found = None, []
    for begin, end in ((0, 1), (1, 5), (5, 9)):
        output = model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    close(torch.cat(found, 1)[mask.bool()], full[mask.bool()])
    shapes = [{name: tuple(x.shape) for name, x in layer.windows.items()} for layer in cache.layers]
    assert shapes == [{"transition": (2, 2, 16), "transition_inner": (2, 4, 24)}] * 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block": {"kernels": (3,)}}, "two sizes"),
        ({"block": {"kernels": (3, 4)}}, "odd `kernels`, got 4"),
        ({"attention": "linear_transformer", "is_decoder": True}, "no place for in a decoder"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)

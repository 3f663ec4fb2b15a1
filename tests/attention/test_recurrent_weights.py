"""The weights that recurrences imply for earlier values: outputs are made of them, so that gradients reach them."""

import pytest
import torch

from tests.common.cases import CASES
from tests.helpers import close, tokens

RECURRENT = [
    case
    for case in CASES
    for spec in [case.preset.layer(case.preset.num_hidden_layers - 1).attention]
    if case.shape == "decoder" and "mixer" in spec.supports and spec.writes == 1  # else sums are given out
]


@pytest.mark.parametrize("case", RECURRENT, ids=str)
def test_gradients_reach_the_weights(case):
    model = case.build(dtype=torch.float64, attn_implementation="eager").eval()
    ids = tokens(2, 7)
    output = model(ids, output_attentions=True, use_cache=False)
    weights = output.attentions[-1]
    (slope,) = torch.autograd.grad(output.logits.square().sum(), weights)
    assert slope.abs().amax() > 0
    model.set_attn_implementation("sdpa")
    close(model(ids, use_cache=False).logits, output.logits, 1e-8)

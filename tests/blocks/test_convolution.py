"""The convolution beside a layer: against a loop over windows, in its frame, with padding and while decoding."""

import pytest
import torch
from torch.nn import functional as F

from hf_xformers import XFormerConfig, XFormerModel
from tests.attention.score_helpers import make_context, vectors
from tests.helpers import close, make_strong, tokens

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)


def config(**fields):
    block = {"type": "convolution", **fields.pop("block", {})}
    return XFormerConfig(**{**SIZES, "position": "none", "block": block, **fields})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("kernel", "groups"), [(3, 1), (5, 4), (1, 2)])
def test_by_loop(causal, kernel, groups):
    made = config(block={"kernel": kernel, "groups": groups}, is_decoder=causal)
    torch.manual_seed(0)
    module = made.block.build(made, layer_idx=0).convolution.double().eval()
    states, weight, width = vectors(2, 7), module.conv.weight, 16 // groups
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0]]).bool()
    found = module(states, make_context(7, causal, padding_mask=mask)).output
    begin = kernel - 1 if causal else kernel // 2
    for b in range(2):
        for t in range(7):
            expected = module.conv.bias.clone()
            for n in range(kernel):
                place = t - begin + n
                if not (0 <= place < 7 and mask[b, place]):
                    continue
                for channel in range(16):
                    first = channel // width * width
                    expected[channel] += weight[channel, :, n] @ states[b, place, first : first + width]
            close(found[b, t], expected.tanh())


@pytest.mark.parametrize("residual", ["post_ln", "pre_ln"])
@torch.no_grad()
def test_frame(residual):
    """LN(layer(x) + Conv(x)), or layer(x) + Conv(LN(x)), in the layers that are named."""
    torch.manual_seed(0)
    made = config(block={"layers": (1,)}, residual=residual)
    model = make_strong(XFormerModel(made).double().eval())
    assert [hasattr(layer, "convolution") for layer in model.trunk.layers] == [False, True]
    plain = XFormerModel(XFormerConfig(**SIZES, position="none", residual=residual)).double().eval()
    plain.load_state_dict({name: x for name, x in model.state_dict().items() if "convolution" not in name})
    ids = tokens(2, 7, high=50)
    expected, found = (net(ids, output_hidden_states=True).hidden_states for net in (plain, model))
    close(found[1], expected[1])
    layer = model.trunk.layers[1]
    norm, read = layer.convolution_residual.norm, expected[1]
    beside = F.pad(norm(read) if residual == "pre_ln" else read, (0, 0, 1, 1)).transpose(1, 2)
    total = expected[2] + layer.convolution.conv(beside).transpose(1, 2).tanh()
    if residual == "post_ln":
        close(found[2], norm(total))
        return
    before = []  # the recorded state is after the final norm, the sum before it
    plain.trunk.layers[1].register_forward_hook(lambda *call: before.append(call[2][0]))
    plain(ids)
    total = before[0] + layer.convolution.conv(beside).transpose(1, 2).tanh()
    close(model(ids).last_hidden_state, model.trunk.final_norm(total))


def test_dropout_stands_before_the_activation():
    torch.manual_seed(0)
    made = config(hidden_dropout_prob=0.5, block={"activation": "sigmoid"})
    layer = made.block.build(made, layer_idx=0).train()
    with torch.no_grad():
        layer.convolution.conv.weight.zero_()
        layer.convolution.conv.bias.fill_(1.0)
    found = layer.convolution(torch.randn(1, 5, 16), make_context(5)).output.detach()
    assert sorted({round(float(x), 4) for x in found.unique()}) == [0.5, 0.8808]  # sigmoid(0), sigmoid(1 / 0.5)
    assert isinstance(layer.convolution_residual.dropout, torch.nn.Identity)

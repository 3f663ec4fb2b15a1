"""Lite Transformer: its branches one by one, who reads what, and the published sizes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hf_xformers import XFormerConfig
from hf_xformers.variants import config_class, family
from tests.attention.score_helpers import make_context, vectors
from tests.helpers import close

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16)
REAL = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0]]).bool()


def config(**fields):
    block = {"type": "lite_transformer", **fields.pop("block", {})}
    return XFormerConfig(**{**SIZES, "position": "none", "residual": "pre_ln", "block": block, **fields})


def sublayer(layer_idx=0, **fields):
    made = config(**fields)
    torch.manual_seed(0)
    module = made.block.build(made, layer_idx=layer_idx).long_short_range.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.4)
    return module


def run(module, states, causal=False, **fields):
    context = make_context(states.shape[1], causal, **fields)
    module.prepare(context, None)
    return module(states, context).output


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "block",
    [{}, {"conv_type": "lightweight"}, {"conv_glu": False, "conv_weight_softmax": False}, {"attn_channels": 4}],
)
def test_branches_by_loop(causal, block):
    """Both kinds of kernels, in both directions, with padding; attention beside them against torch's own."""
    module, states = sublayer(1, block={**block, "conv_heads": 4}, is_decoder=causal), vectors(2, 7)
    width = block.get("attn_channels", 8)
    found = run(module, states, causal, padding_mask=REAL)
    far, near, conv = states[..., :width], states[..., width:], module.convolution
    inner = conv.up_proj(near)
    if conv.gate_proj is not None:
        inner = inner * torch.sigmoid(conv.gate_proj(near))
    taps, reach, group = 7, 6 if causal else 3, (16 - width) // 4
    for b in range(2):
        for t in range(7):
            kernel = conv.kernel if conv.kernel_proj is None else conv.kernel_proj(inner[b, t]).view(4, taps)
            if block.get("conv_weight_softmax", True):
                kernel = torch.exp(kernel) / torch.exp(kernel).sum(-1, keepdim=True)
            total = torch.zeros(16 - width, dtype=torch.float64)
            for j in range(taps):
                place = t + j - reach
                if 0 <= place < 7 and REAL[b, place]:
                    total += kernel[:, j].repeat_interleave(group) * inner[b, place]
            close(found[b, t, width:], conv.down_proj(total))
    attention = module.attention
    reference = nn.MultiheadAttention(width, 2, batch_first=True).double()
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    reference.load_state_dict(
        {
            "in_proj_weight": torch.cat([part.weight for part in parts]),
            "in_proj_bias": torch.cat([part.bias for part in parts]),
            "out_proj.weight": attention.o_proj.weight,
            "out_proj.bias": attention.o_proj.bias,
        }
    )
    later = torch.ones(7, 7).triu(1).bool() if causal else None
    expected = reference(far, far, far, key_padding_mask=~REAL, attn_mask=later)[0]
    close(found[REAL][..., :width], expected[REAL])


def test_channels_are_apart():
    """What attention writes does not depend on the channels of the convolution, and the other way round."""
    inputs = vectors(1, 6).requires_grad_()
    found = run(sublayer(), inputs)
    for written, unread in ((slice(0, 8), slice(8, 16)), (slice(8, 16), slice(0, 8))):
        (slope,) = torch.autograd.grad(found[..., written].sum(), inputs, retain_graph=True)
        assert slope[..., unread].abs().max() == 0
        assert slope.abs().max() > 0


def test_identity_and_reach():
    module = sublayer(block={"conv_type": "lightweight", "conv_glu": False})
    conv = module.convolution
    with torch.no_grad():
        for projection in (conv.up_proj, conv.down_proj):
            nn.init.eye_(projection.weight)
            nn.init.zeros_(projection.bias)
        conv.kernel.copy_(torch.tensor([-1e3, 0.0, -1e3]))  # the whole softmax on the tap in the middle
    states = vectors(1, 6)
    close(run(module, states)[..., 8:], states[..., 8:])
    for causal in (False, True):
        for layer_idx, taps in ((0, 3), (1, 7), (2, 15), (3, 31), (9, 31)):
            module, inputs = sublayer(layer_idx, is_decoder=causal), vectors(1, 65).requires_grad_()
            (slope,) = torch.autograd.grad(run(module, inputs, causal)[0, 32, 8:].sum(), inputs)
            first, last = (32 - taps + 1, 32) if causal else (32 - taps // 2, 32 + taps // 2)
            assert (slope[0].abs().amax(-1) > 0).nonzero().flatten().tolist() == list(range(first, last + 1))


def test_literal_path_and_kernels():
    """The same result where weights are wanted; kernels are distributions."""
    module, states = sublayer(1), vectors(2, 9)
    context = make_context(9, output_attentions=True)
    module.prepare(context, None)
    literal = module(states, context)
    close(literal.output, run(module, states))
    assert literal.weights.shape == (2, 2, 9, 9)
    close(module.convolution.kernels(states[..., 8:]).sum(-1), torch.ones(2, 9, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("width", "parameters", "operations"), [(496, 17.3e6, 527e6), (200, 2.9e6, 90e6)], ids=["large", "small"]
)
def test_published_sizes(width, parameters, operations):
    """Wu et al. 2020, table 2: without the embedding, for a sentence of 30 tokens on each side. Multiplications are
    counted where they happen: in projections, in scores and their sums, and under the taps."""
    preset = config_class("xf_lite_transformer")(
        hidden_size=width, intermediate_size=width, vocab_size=10, is_encoder_decoder=True
    )
    model = family("xf_lite_transformer")["Model"](preset).eval()
    counted = [x.numel() for name, x in model.named_parameters() if "embedding" not in name]
    assert sum(counted) == pytest.approx(parameters, rel=0.02)
    # The formula: 69 D^2 (3.75 in an encoder layer, 7.75 in a decoder layer, 6 of each), kernels, biases and norms.
    taps = 3 + 7 + 15 + 3 * 31
    assert sum(x.numel() for name, x in model.named_parameters() if x.ndim == 2 and "embedding" not in name) == (
        69 * width**2 + 2 * taps * 4 * width // 2
    )
    total = 0

    def count(module, given, output):
        nonlocal total
        total += output.numel() * module.in_features

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(count)
    ids = torch.ones(1, 30, dtype=torch.long)
    with torch.no_grad():
        model(input_ids=ids, decoder_input_ids=ids)
    total += 12 * 2 * 30 * 30 * width // 2 + 6 * 2 * 30 * 30 * width + 2 * 30 * width // 2 * taps
    assert total == pytest.approx(operations, rel=0.02)


def test_gradients_of_every_parameter():
    made = config()
    torch.manual_seed(0)
    layer = made.block.build(made, layer_idx=0).double()
    context = make_context(5)
    layer.prepare(context, None)
    output = layer(vectors(2, 5), context=context, step=0)[0]
    F.mse_loss(output, vectors(2, 5, seed=4)).backward()
    assert all(
        x.grad is not None and x.grad.abs().max() > 0 for name, x in layer.named_parameters() if "k_proj.b" not in name
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block": {"attn_channels": 16}}, "leave channels for both"),
        ({"block": {"conv_heads": 3}}, "3 `conv_heads` cannot share"),
        ({"block": {"kernel_sizes": (4,)}}, "odd `kernel_sizes`, got 4"),
        ({"block": {"attn_channels": 9, "conv_heads": 7}}, "2 heads cannot share"),
        ({"position": "rotary"}, "set `head_dim=4`"),
        ({"position": "deberta"}, "makes its terms for"),
        ({"attention": "longformer"}, "not made for"),
        ({"attention": "linear_transformer", "is_decoder": True}, "no place for in a decoder"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)
    config(block={"kernel_sizes": (4, 2)}, is_decoder=True, position="rotary", head_dim=4)

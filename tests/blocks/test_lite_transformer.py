"""Lite Transformer: its branches one by one, and the published sizes."""

import pytest
import torch
from torch import nn

from hf_xformers import XFormerConfig
from hf_xformers.variants import config_class, family
from tests.attention.score_helpers import make_context, vectors
from tests.helpers import close, randomized

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16)
REAL = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0]]).bool()


def config(**fields):
    block = {"type": "lite_transformer", **fields.pop("block", {})}
    return XFormerConfig(**{**SIZES, "position": "none", "residual": "pre_ln", "block": block, **fields})


def sublayer(layer_idx=0, **fields):
    made = config(**fields)
    return randomized(made.block.build(made, layer_idx=layer_idx).long_short_range, 0.4)


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


def test_kernels_of_a_decoder_may_be_even():
    config(block={"kernel_sizes": (4, 2)}, is_decoder=True, position="rotary", head_dim=4)

"""Kimi delta attention against transformers' module with the same weights, on whole texts and in steps."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

from tests.attention.score_helpers import build_layers, in_pieces, make_context, run_layers

LENGTH, PIECES = 75, (66, 1, 1, 1, 1, 1, 1, 1, 1, 1)


def take(layer, **weights):
    """Sets all parameters of `layer` by name."""
    state = {name: tensor.detach().double() for name, tensor in weights.items()}
    layer.load_state_dict(state, strict=True)


def check(ours, theirs, config, width):
    """Outputs of a whole text and of a prompt and nine tokens; theirs compute in float32 inside."""
    torch.manual_seed(1)
    states = torch.randn(2, LENGTH, width, dtype=torch.float64)
    with torch.no_grad():
        found = run_layers([ours], states, make_context(LENGTH, True))[0].output
        expected = theirs(states.float())
        expected = expected[0] if isinstance(expected, tuple) else expected
        torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=1e-5)
        pieces, _ = in_pieces([ours], states, None, PIECES)
        torch.testing.assert_close(pieces, found, rtol=1e-10, atol=1e-10)
        cache, start, steps = DynamicCache(config=config), 0, []
        for size in PIECES:
            out = theirs(states[:, start : start + size].float(), cache)
            steps.append(out[0] if isinstance(out, tuple) else out)
            start += size
        torch.testing.assert_close(pieces.float(), torch.cat(steps, 1), rtol=1e-5, atol=1e-5)


def randomized(module):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return module.eval()


def test_kimi_delta_attention_is_that_of_kimi_linear():
    module = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    width, heads, head = 32, 4, 8
    config = module.KimiLinearConfig(
        hidden_size=width, num_hidden_layers=1, num_attention_heads=heads, rms_norm_eps=1e-5,
        layer_types=["linear_attention"], linear_num_heads=heads, linear_head_dim=head,
    )  # fmt: skip
    theirs = randomized(module.KimiLinearDeltaAttention(config, 0))
    spec = {"type": "kimi_delta_attention", "norm_eps": 1e-5}
    (ours,) = build_layers(spec, causal=True, hidden_size=width)
    gates = dict(theirs.forget_gate.named_parameters())
    downs = {"decay_down_proj": "f_a_proj", "decay_up_proj": "f_b_proj"}
    take(ours, **{
        **{f"{name}.weight": getattr(theirs, name).weight for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
        **{f"{name}.weight": gates[f"{own}.weight"] for name, own in downs.items()},
        "decay.A_log": gates["A_log"].view(-1), "decay.dt_bias": gates["dt_bias"],
        "beta_proj.weight": theirs.b_proj.weight, "gate_down_proj.weight": theirs.g_a_proj.weight,
        "gate_up_proj.weight": theirs.g_b_proj.weight, "short_conv.weight": theirs.conv1d.weight[:, 0],
        "output_norm.weight": theirs.o_norm.weight,
    })  # fmt: skip
    check(ours, theirs, config, width)

"""Mechanisms whose state decays against transformers' modules with the same weights, on whole texts and in steps."""

import pytest
import torch
from transformers import initialization
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


@pytest.mark.parametrize("heads", [(2, 4), (4, 4)])
def test_gated_delta_net_is_that_of_qwen3_next(heads):
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    keys, values, width, head, value = *heads, 32, 8, 6
    config = module.Qwen3NextConfig(
        hidden_size=width, linear_num_key_heads=keys, linear_num_value_heads=values, linear_key_head_dim=head,
        linear_value_head_dim=value, num_hidden_layers=1, layer_types=["linear_attention"], rms_norm_eps=1e-5,
    )  # fmt: skip
    theirs = randomized(module.Qwen3NextGatedDeltaNet(config, 0))
    spec = {"key_heads": keys, "value_heads": values, "key_width": head, "value_width": value}
    (ours,) = build_layers({"type": "gated_delta_net", "norm_eps": 1e-5, **spec}, causal=True, hidden_size=width)
    shared = values // keys
    mixed = theirs.in_proj_qkvz.weight.view(keys, -1, width)
    q, k, v, z = (x.flatten(0, 1) for x in mixed.split([head, head, shared * value, shared * value], 1))
    beta, decay = (x.flatten(0, 1) for x in theirs.in_proj_ba.weight.view(keys, -1, width).split([shared, shared], 1))
    take(ours, **{
        "q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "gate_proj.weight": z, "beta_proj.weight": beta,
        "decay_proj.weight": decay, "decay.A_log": theirs.A_log, "decay.dt_bias": theirs.dt_bias,
        "short_conv.weight": theirs.conv1d.weight[:, 0], "output_norm.weight": theirs.norm.weight,
        "o_proj.weight": theirs.out_proj.weight,
    })  # fmt: skip
    check(ours, theirs, config, width)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_mamba2_is_the_mixer(groups, bias):
    module = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    width, heads, head, state = 16, 8, 4, 6
    config = module.Mamba2Config(
        hidden_size=width, num_heads=heads, head_dim=head, state_size=state, n_groups=groups, use_bias=bias,
        use_conv_bias=True, num_hidden_layers=1, chunk_size=16,
    )  # fmt: skip
    theirs = randomized(module.Mamba2Mixer(config, 0))
    (ours,) = build_layers(
        {"type": "mamba2", "key_heads": groups, "value_heads": heads, "key_width": state, "value_width": head,
         "norm_eps": config.layer_norm_epsilon, "bias": bias},
        causal=True, hidden_size=width,
    )  # fmt: skip
    sizes, weights = [heads * head, heads * head, groups * state, groups * state, heads], {}
    names = ("gate_proj", "v_proj", "k_proj", "q_proj", "decay_proj")
    for kind in ("weight", "bias") if bias else ("weight",):
        parts = getattr(theirs.in_proj, kind).split(sizes)
        weights |= {f"{name}.{kind}": part for name, part in zip(names, parts, strict=True)}
        weights[f"o_proj.{kind}"] = getattr(theirs.out_proj, kind)
    take(ours, **weights, **{
        "short_conv.weight": theirs.conv1d.weight[:, 0], "short_conv.bias": theirs.conv1d.bias,
        "decay.A_log": theirs.A_log, "decay.dt_bias": theirs.dt_bias, "skip.D": theirs.D,
        "output_norm.weight": theirs.norm.weight,
    })  # fmt: skip
    check(ours, theirs, config, width)


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


@pytest.mark.parametrize("index", [0, 2])
def test_lightning_attention_is_that_of_minimax(index):
    module = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    width, heads, head = 32, 4, 8
    config = module.MiniMaxConfig(
        hidden_size=width, num_hidden_layers=3, num_attention_heads=heads, head_dim=head, block_size=16,
        layer_types=["linear_attention"] * 3,
    )  # fmt: skip
    theirs = randomized(module.MiniMaxLightningAttention(config, index))
    ours = build_layers("lightning_attention", 3, causal=True, hidden_size=width, num_hidden_layers=3)[index]
    q, k, v = (x.flatten(0, 1) for x in theirs.qkv_proj.weight.view(heads, 3, head, width).unbind(1))
    take(ours, **{
        "q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "gate_proj.weight": theirs.output_gate.weight,
        "output_norm.weight": theirs.norm.weight, "o_proj.weight": theirs.out_proj.weight,
        "decay.log_decay": -theirs.slope_rate.flatten(),
    })  # fmt: skip
    made = ours.decay.log_decay.clone()
    ours.decay.initialize(ours.config, initialization)
    torch.testing.assert_close(ours.decay.log_decay, made, rtol=1e-6, atol=0)
    take_cache = module.MiniMaxCache()

    def run(states, cache=None):
        return theirs(states, None, None, None if cache is None else take_cache)[0]

    check(ours, run, config, width)

"""LongT5's transient global attention against a loop over tokens, its limits, and transformers."""

import torch
from transformers import LongT5Config
from transformers.models.longt5.modeling_longt5 import LongT5TransientGlobalAttention

from hf_xformers import XFormerConfig, XFormerModel
from hf_xformers.ops.side_keys import joined
from tests.attention.score_helpers import GEOMETRY, build_layers, make_context, run_layers, vectors
from tests.helpers import close, tokens

SPEC = {"type": "transient_global", "window_size": 2, "block_size": 3, "num_buckets": 4, "max_distance": 3}


def test_weights_of_tokens():
    """The weights of tokens are what is left by the summaries."""
    (layer,) = build_layers(SPEC, 1)
    states = vectors(1, 10)
    weights = run_layers([layer], states, make_context(10, implementation="eager"))[0].weights
    assert weights.shape == (1, 4, 10, 10)
    assert (weights.sum(-1) < 1).all() and (weights[..., 0, 3:] == 0).all()


def test_transformers_layer():
    config = LongT5Config(
        d_model=16, d_kv=4, num_heads=4, local_radius=2, global_block_size=4, relative_attention_num_buckets=4,
        relative_attention_max_distance=3, dropout_rate=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = LongT5TransientGlobalAttention(config, has_relative_attention_bias=True).double().eval()
    spec = {**SPEC, "block_size": 4, "bias": False, "scale": 1.0}
    (ours,) = build_layers(spec, 1, normalization="rms_norm", layer_norm_eps=1e-6)
    with torch.no_grad():
        theirs.relative_attention_bias.weight.zero_()
        for mine, other in zip("qkvo", (theirs.q, theirs.k, theirs.v, theirs.o), strict=True):
            getattr(ours, f"{mine}_proj").weight.copy_(other.weight)
        theirs.global_input_layer_norm.weight.copy_(ours.summary_norm.weight)
        theirs.global_relative_attention_bias.weight.copy_(ours.block_bias.weight)
    mask = torch.arange(15)[None] < torch.tensor([15, 7, 9])[:, None]
    states = vectors(3, 15) * 0.5
    expected = theirs(states, mask=mask.long())[0]
    output = run_layers([ours], states, make_context(15, padding_mask=mask))[0].output
    close(output[mask].detach(), expected[mask].detach(), 1e-5)  # their layer norm counts in float32


def test_norms_of_single_layers():
    """Layers may normalise their summaries in different ways."""
    other = {1: {"normalization": "rms_norm"}}
    model = XFormerModel(XFormerConfig(**GEOMETRY, attention=SPEC, position="none", per_layer_config=other))
    summaries = [type(layer.attention.summary_norm) for layer in model.trunk.layers]
    assert summaries[0] is summaries[2] is not summaries[1]
    assert model(tokens(2, 9, high=50)).last_hidden_state.isfinite().all()


def test_union_of_softmaxes():
    scores, values = torch.randn(2, 3, 4, 7).double(), torch.randn(2, 3, 7, 5).double()
    scores[0, 0, 0] = -torch.inf
    parts = [(scores[..., :3], values[:, :, :3]), (scores[..., 3:], values[:, :, 3:])]
    found = joined(*(((s.softmax(-1).nan_to_num(0.0)) @ v, s.logsumexp(-1)) for s, v in parts))
    close(found, scores.softmax(-1).nan_to_num(0.0) @ values)

"""Poolingformer against loops over its two levels, its limits, and Longformer's window in transformers."""

import torch
from transformers import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.attention.poolingformer import PoolingformerAttention
from hf_xformers.core.cache import make_cache
from tests.attention.score_helpers import GEOMETRY, WIDTH, build_layers, make_context, run_layers, vectors
from tests.helpers import close, make_strong, tokens


def spec(**fields):
    given = {"window1": 2, "window2": 7, "pool_kernel": 3, "pool_stride": 2, "two_level_layers": (0,)}
    return {"type": "poolingformer", **given, **fields}


def test_windows_over_everything_are_two_dense_attentions():
    """kernel = stride = 1: exact attention over the output of exact attention."""
    (layer,) = build_layers(spec(pool_type="mean", pool_kernel=1, pool_stride=1, window1=20, window2=20))
    (dense,) = build_layers("dense")
    states, identity = vectors(2, 11), torch.eye(WIDTH, dtype=torch.float64)

    def attend(*names):
        for target, source in zip("qkv", names, strict=True):
            getattr(dense, f"{target}_proj").load_state_dict(getattr(layer, f"{source}_proj").state_dict())
        dense.o_proj.weight.data.copy_(identity)
        dense.o_proj.bias.data.zero_()
        return lambda x: run_layers([dense], x, make_context(11))[0].output

    y = attend("q", "k", "v")(states)
    z = attend("q_pool", "k_pool", "v_pool")(y)
    close(run_layers([layer], states, make_context(11))[0].output, layer.o_proj(y + z))


def test_the_first_level_is_longformers_window():
    config = LongformerConfig(hidden_size=WIDTH, num_attention_heads=4, attention_window=[4], vocab_size=9)
    theirs = LongformerSelfAttention(config, 0).double().eval()
    (layer,) = build_layers(spec(window1=2, two_level_layers=()))
    assert not isinstance(layer, PoolingformerAttention)
    with torch.no_grad():
        for name, target in (("q", "query"), ("k", "key"), ("v", "value")):
            getattr(layer, f"{name}_proj").load_state_dict(getattr(theirs, target).state_dict())
        layer.o_proj.weight.copy_(torch.eye(WIDTH))
        layer.o_proj.bias.zero_()
        states, zeros = vectors(2, 12), torch.zeros(2, 12, dtype=torch.float64)
        expected = theirs(states, zeros, is_index_masked=zeros > 1, is_index_global_attn=zeros > 1)[0]
        close(run_layers([layer], states, make_context(12))[0].output, expected, 1e-6)


def test_layers_with_two_levels():
    def levels(layers, **fields):
        config = XFormerConfig(
            **{**GEOMETRY, "num_hidden_layers": layers}, attention={"type": "poolingformer", **fields}
        )
        return [layer for layer in range(layers) if config.attention.has_two_levels(config, layer)]

    assert levels(12) == [5, 6, 7] and levels(1) == [0] and levels(2) == [1] and len(levels(24)) == 6
    assert levels(4, two_level_layers=(0, 3)) == [0, 3]


def test_constant_state():
    """What is kept stays within the windows, and decoding far beyond them equals one pass, with left padding."""
    torch.manual_seed(0)
    config = XFormerConfig(**{**GEOMETRY, "max_position_embeddings": 40}, is_decoder=True, attention=spec())
    model = make_strong(XFormerForCausalLM(config).double().eval(), amount=0.3)
    ids, mask = tokens(3, 33, high=50), torch.ones(3, 33, dtype=torch.long)
    mask[1, :3], mask[2, :8] = 0, 0
    cache, found = make_cache(config), []
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        for begin, end in [(0, 5), (5, 6), (6, 7), (7, 16), *((at, at + 1) for at in range(16, 33))]:
            given = {"attention_mask": mask[:, :end], "past_key_values": cache, "use_cache": True}
            found.append(model(ids[:, begin:end], **given).logits)
    close(torch.cat(found, 1)[mask.bool()], expected[mask.bool()])
    assert [layer.keys.shape[2] for layer in cache.layers] == [2] * 3
    assert cache.layers[0].pooled.keys.shape[2] == 8

"""Poolingformer against loops over its two levels, its limits, and Longformer's window in transformers."""

import pytest
import torch
from transformers import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM
from hf_xformers.attention.poolingformer import PoolingformerAttention
from hf_xformers.core.cache import make_cache
from tests.attention.pattern_helpers import SIDES, pad_mask
from tests.attention.score_helpers import (
    GEOMETRY,
    WIDTH,
    build_layers,
    check_contract,
    make_context,
    mixes,
    run_layers,
    softmax_by_rows,
    split_heads,
    vectors,
)
from tests.helpers import close, make_strong, tokens


def spec(**fields):
    given = {"window1": 2, "window2": 7, "pool_kernel": 3, "pool_stride": 2, "two_level_layers": (0,)}
    return {"type": "poolingformer", **given, **fields}


def heads(layer, x, name):
    return split_heads(getattr(layer, f"{name}_proj")(x), layer.head_dim).repeat_interleave(
        1 if name.startswith("q") else layer.num_key_value_groups, 1
    )


def weights_of(layer, window, values, name):
    """Of the real tokens [n, d] of a window, counted from its first; the middle one may be beyond the text."""
    if layer.spec.pool_type == "mean":
        return torch.full((len(window),), 1 / len(window), dtype=torch.float64)
    table = {"k": layer.key_pool, "v": layer.value_pool}[name]
    middle = (layer.spec.pool_kernel - 1) // 2
    centre = window[middle] if middle < len(window) else torch.zeros_like(window[0])
    return torch.softmax((table[values] @ centre)[: len(window)], 0)


@torch.no_grad()
def one_text(layer, x, causal):
    """The equations for one text [1, n, D] without padding, token by token."""
    s, n = layer.spec, x.shape[1]
    order = torch.arange(n)
    near = (order[:, None] - order).abs() <= s.window1
    near = near & (order <= order[:, None]) if causal else near
    q, k, v = (heads(layer, x, name) for name in "qkv")
    scale = layer.head_dim**-0.5
    y = (softmax_by_rows(q @ k.mT * scale, near) @ v).transpose(1, 2).flatten(2)
    given = x if s.level2_input == "hidden" else y
    q, k, v = (heads(layer, given, name if s.share_projections else f"{name}_pool") for name in "qkv")
    z = torch.zeros_like(q)
    for head in range(q.shape[1]):
        own = head // layer.num_key_value_groups
        for i in range(n):
            group, pooled = i // s.pool_stride, []
            for p in range(-(-n // s.pool_stride)):
                window = list(range(p * s.pool_stride, p * s.pool_stride + s.pool_kernel))
                # In a decoder all tokens of a window stand before, or at, the first token of the query's group.
                late = causal and window[-1] > group * s.pool_stride
                if abs(p - group) > s.window2 // s.pool_stride or late:
                    continue
                made = []
                for tensor, name in ((k, "k"), (v, "v")):
                    inside = tensor[0, head, [t for t in window if t < n]]
                    if s.pool_type == "max":
                        made.append(inside.amax(0))
                    else:
                        made.append(weights_of(layer, inside, own, name) @ inside)
                pooled.append(made)
            if pooled:
                keys, values = (torch.stack(each) for each in zip(*pooled, strict=True))
                z[0, head, i] = torch.softmax(keys @ q[0, head, i] * scale, 0) @ values
    return layer.o_proj(y + z.transpose(1, 2).flatten(2))


CASES = {
    "ldconv": {},
    "mean, stride 1": {"pool_type": "mean", "pool_kernel": 2, "pool_stride": 1},
    "max, no overlap": {"pool_type": "max", "pool_kernel": 3, "pool_stride": 3},
    "mix, shared": {
        "level2_input": "hidden",
        "share_projections": True,
        "pool_kernel": 5,
        "pool_stride": 3,
        "window2": 8,
    },
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_two_levels(name, causal):
    (layer,) = build_layers(spec(**CASES[name]), 1, causal, num_key_value_heads=2, num_hidden_layers=1)
    for length, real in ((13, 8), (1, 1)):
        states = vectors(2, length)
        for side in SIDES if length > 1 else ("none",):
            mask, found = pad_mask(length, real, side), {}
            for implementation in ("eager", "sdpa"):
                given = states.clone().requires_grad_()
                context = make_context(length, causal, padding_mask=mask, implementation=implementation)
                output = run_layers([layer], given, context)[0].output
                for row in range(2):
                    kept = torch.ones(length, dtype=torch.bool) if mask is None else mask[row]
                    if kept.any():
                        close(
                            output[row : row + 1, kept].detach(), one_text(layer, states[row : row + 1, kept], causal)
                        )
                real_outputs = output if mask is None else output[mask]
                (found[implementation],) = torch.autograd.grad(real_outputs.sin().sum(), given)
            close(found["sdpa"], found["eager"], 1e-8)
            assert found["sdpa"].isfinite().all()


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


def test_uniform_weights_are_the_mean():
    fields = {"pool_kernel": 4, "pool_stride": 3}
    (learned,), (mean,) = (build_layers(spec(pool_type=kind, **fields)) for kind in ("ldconv", "mean"))
    learned.key_pool.data.zero_()
    learned.value_pool.data.zero_()
    mean.load_state_dict({k: v for k, v in learned.state_dict().items() if not k.endswith("_pool")})
    states = vectors(2, 11)
    close(*(run_layers([layer], states, make_context(11))[0].output for layer in (learned, mean)))


@pytest.mark.parametrize("causal", [False, True])
def test_receptive_field(causal):
    """A token changes nothing farther than w1 + w2 + kappa - 1 tokens, and nothing before it in a decoder."""
    torch.manual_seed(0)
    kind = XFormerForCausalLM if causal else XFormerForMaskedLM
    config = XFormerConfig(**{**GEOMETRY, "num_hidden_layers": 1}, is_decoder=causal, attention=spec(window2=6))
    model = make_strong(kind(config).double().eval(), amount=0.3)
    embeds = model.get_input_embeddings()(tokens(1, 24, high=50)).detach()
    changed = embeds.clone()
    changed[0, 11] += torch.randn(WIDTH, dtype=torch.float64)
    with torch.no_grad():
        difference = (model(inputs_embeds=changed).logits - model(inputs_embeds=embeds).logits).abs().amax(-1)[0]
    reached = (difference > 0).nonzero().flatten().tolist()
    assert 8 <= max(abs(t - 11) for t in reached) <= 10
    assert not causal or min(reached) == 11


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


@pytest.mark.parametrize(
    "fields, changes, message",
    [
        ({"window2": 1}, {}, r"`window2` \(1\) must be at least `window1` \(2\)"),
        ({"pool_stride": 4}, {}, "`pool_stride` 4 above `pool_kernel` 3"),
        ({"pool_kernel": 0}, {}, "`pool_kernel` >= 1"),
        ({"two_level_layers": (3,)}, {}, "names layer 3; the 3 layers"),
        ({"window2": 4}, {"is_decoder": True}, "no room for a pooled key of 3 tokens"),
        ({"share_projections": True}, {"head_dim": 6}, "leave `head_dim` out"),
    ],
)
def test_refusals(fields, changes, message):
    with pytest.raises(ValueError, match=message):
        XFormerConfig(**GEOMETRY, attention=spec(**fields), **changes)


CONTRACT = mixes(
    {
        "rotary": {
            "attention": spec(two_level_layers=[0, 1]),
            "position": "rotary",
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
        }
    }
)


@pytest.mark.parametrize("case", CONTRACT, ids=str)
def test_contract(case):
    check_contract(case)

"""Learned sinks and output gates against their equations, GPT-OSS and Qwen3-Next, and in every mechanism."""

import pytest
import torch
from transformers import GptOssConfig, Qwen3NextConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM, XFormerForSeq2SeqLM
from hf_xformers.core.components import SLOTS
from tests.attention.pattern_helpers import SIDES, pad_mask
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    WIDTH,
    build_layers,
    check_contract,
    make_context,
    mixes,
    run_layers,
    split_heads,
    vectors,
)
from tests.helpers import close, make_strong, tokens

SINKS = {"learned_sinks": True}
WINDOW = {"type": "sliding_window", "window_size": 3, "sinks": 1}
ATTENTIONS = {"dense": ({"type": "dense"}, 99, 0), "band": ({"type": "band_attention", "window_size": 3}, 3, 0)}
ATTENTIONS["window"] = (WINDOW, 3, 1)


@torch.no_grad()
def one_text(layer, x, causal, reach, first):
    """Token by token and head by head, for one text [1, n, D] without padding."""
    width, n = layer.head_dim, x.shape[1]
    q, k, v = (split_heads(proj(x), width) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    k, v = (t.repeat_interleave(layer.num_key_value_groups, 1) for t in (k, v))
    output = torch.zeros_like(q)
    gates = None if layer.gate_proj is None else 1 / (1 + torch.exp(-layer.gate_proj(x)[0]))
    for head in range(q.shape[1]):
        for i in range(n):
            total, read = torch.zeros(()).double(), torch.zeros(width).double()
            if layer.sinks is not None:
                total = layer.sinks[head].exp()
            for j in range(n):
                near = j <= i and i - j < reach if causal else abs(i - j) <= reach
                if near or (j < first and (j <= i or not causal)):
                    power = torch.exp(q[0, head, i] @ k[0, head, j] * layer.scaling)
                    total, read = total + power, read + power * v[0, head, j]
            output[0, head, i] = read / total
            if gates is not None:
                own = gates[i].view(layer.num_heads, -1)[head]  # one number, or one for each element
                output[0, head, i] *= own
    return layer.o_proj(output.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_equation(name, causal):
    spec, reach, first = ATTENTIONS[name]
    for fields in (SINKS, {"output_gate": "head"}, {**SINKS, "output_gate": "element"}):
        (layer,) = build_layers({**spec, **fields}, 1, causal, num_key_value_heads=2)
        states = vectors(2, 9)
        for side in SIDES:
            mask, found = pad_mask(9, 5, side), {}
            for implementation in ("eager", "sdpa"):
                given = states.clone().requires_grad_()
                context = make_context(9, causal, padding_mask=mask, implementation=implementation)
                (result,) = run_layers([layer], given, context)
                for row in range(2):
                    kept = torch.ones(9, dtype=torch.bool) if mask is None else mask[row]
                    if kept.any():
                        expected = one_text(layer, states[row : row + 1, kept], causal, reach, first)
                        close(result.output[row : row + 1, kept].detach(), expected)
                loss = (result.output if mask is None else result.output[mask]).sin().sum()
                learned = [
                    part for part in (layer.sinks, getattr(layer.gate_proj, "weight", None)) if part is not None
                ]
                found[implementation] = torch.autograd.grad(loss, (given, *learned))
            for fast, literal in zip(found["sdpa"], found["eager"], strict=True):
                close(fast, literal, 1e-8)
                assert fast.isfinite().all()


def test_limits():
    """A sink that is far below all scores is none; one far above takes everything."""
    (layer,), (plain,) = build_layers({"type": "dense", **SINKS}), build_layers("dense")
    states, context = vectors(1, 6), make_context(6)
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if name != "sinks"})
    for value, factor in ((-1e4, 1.0), (1e4, 0.0)):
        with torch.no_grad():
            layer.sinks.fill_(value)
            bias = layer.o_proj.bias
            found, expected = (run_layers([each], states, context)[0].output for each in (layer, plain))
        close(found - bias, (expected - bias) * factor)


def copied(ours, theirs):
    with torch.no_grad():
        for name in "qkvo":
            getattr(ours, f"{name}_proj").load_state_dict(getattr(theirs, f"{name}_proj").state_dict())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_gpt_oss(kind, implementation):
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "head_dim": 4, "num_key_value_heads": 2}
    config = GptOssConfig(
        **sizes, num_hidden_layers=1, layer_types=[kind], sliding_window=3,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = make_strong(GptOssAttention(config, 0).double()).eval()
    spec = {"type": "dense"} if kind == "full_attention" else {"type": "band_attention", "window_size": 3}
    (ours,) = build_layers({**spec, **SINKS}, 1, True, num_key_value_heads=2)
    copied(ours, theirs)
    states = vectors(2, 8)
    with torch.no_grad():
        theirs.sinks.copy_(torch.randn(HEADS))
        ours.sinks.copy_(theirs.sinks)
        order = torch.arange(8)
        seen = (order[:, None] >= order) & (order[:, None] - order < (99 if kind == "full_attention" else 3))
        mask = torch.zeros(8, 8).double().masked_fill(~seen, -1e30)[None, None]
        identity = (torch.ones(1, 8, 2).double(), torch.zeros(1, 8, 2).double())
        expected = theirs(states, identity, mask)[0]
        found = run_layers([ours], states, make_context(8, True, implementation=implementation))[0].output
    close(found, expected, 1e-8)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_qwen3_next(implementation):
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "head_dim": 4, "num_key_value_heads": 2}
    config = Qwen3NextConfig(**sizes, num_hidden_layers=1, layer_types=["full_attention"], rms_norm_eps=1e-5)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = make_strong(Qwen3NextAttention(config, 0).double()).eval()
    spec = {"type": "dense", "bias": False, "output_gate": "element", "query_key_norm": "head"}
    norm = {"type": "rms_norm", "from_zero": True}
    (ours,) = build_layers(spec, 1, True, num_key_value_heads=2, normalization=norm)
    with torch.no_grad():
        query, gate = theirs.q_proj.weight.unflatten(0, (HEADS, 2, -1)).unbind(1)  # of each head, one after the other
        ours.q_proj.weight.copy_(query.flatten(0, 1))
        ours.gate_proj.weight.copy_(gate.flatten(0, 1))
        for name in ("k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            getattr(ours, name).load_state_dict(getattr(theirs, name).state_dict())
        mask = torch.zeros(8, 8).double().masked_fill(torch.ones(8, 8).triu(1).bool(), -1e30)[None, None]
        identity = (torch.ones(1, 8, 2).double(), torch.zeros(1, 8, 2).double())
        states = vectors(2, 8)
        expected = theirs(states, identity, mask)[0]
        found = run_layers([ours], states, make_context(8, True, implementation=implementation))[0].output
    close(found, expected, 1e-5)  # their norms count in float32


KINDS = {name: SLOTS["attention"].get(name) for name in SLOTS["attention"] if name not in ("conditional", "feedback")}


@pytest.mark.parametrize(
    ("name", "field"),
    [(name, "output_gate") for name, kind in KINDS.items() if kind.hands_out_heads]
    + [(name, "learned_sinks") for name, kind in KINDS.items() if kind.learns_sinks],
)
def test_every_mechanism_that_says_so(name, field):
    """Gates and sinks learn, and decoding token by token gives what the whole text does."""
    kind, value = KINDS[name], {"output_gate": "head", "learned_sinks": True}[field]
    causal = kind.causal and name != "axial_transformer"  # whose decoder is another stack
    config = XFormerConfig(**{**GEOMETRY, "position": "none"}, attention={"type": name, field: value})
    model = make_strong((XFormerForCausalLM if causal else XFormerForMaskedLM)(config).double())
    ids = tokens(2, 9, high=50)
    model(ids, labels=ids).loss.backward()
    for layer in model.model.trunk.layers:
        own = layer.attention.sinks if field == "learned_sinks" else layer.attention.gate_proj.weight
        assert own.grad.abs().sum() > 0
    if causal:
        model.eval()
        with torch.no_grad():
            whole = model(ids).logits
            past = model(ids[:, :6], use_cache=True).past_key_values
            later = [model(ids[:, [i]], past_key_values=past).logits for i in range(6, 9)]
        close(torch.cat(later, 1), whole[:, 6:], 1e-6)


@pytest.mark.parametrize(
    ("attention", "fields", "message"),
    [
        ({"type": "linformer", "output_gate": "head"}, {}, "as `output_gate` 'head' needs"),
        ({"type": "longformer", **SINKS}, {}, "attention 'longformer' has no place for `learned_sinks`"),
        ({"type": "dense", **SINKS}, {"position": "t5_relative_bias"}, "position 't5_relative_bias' has no place"),
        ({"type": "dense", "output_gate": "token"}, {}, "output_gate"),
    ],
)
def test_refusals(attention, fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        XFormerConfig(**{**GEOMETRY, **fields, "attention": attention})


def test_in_cross_attention_and_not_divided():
    spec = {"type": "dense", **SINKS, "output_gate": "element"}
    config = XFormerConfig(**GEOMETRY, is_encoder_decoder=True, attention=spec, cross_attention=spec)
    assert not config.attention.context_parallel and SLOTS["attention"].get("dense")().context_parallel
    model, ids = make_strong(XFormerForSeq2SeqLM(config)), tokens(2, 5, high=50)
    model(ids, labels=ids).loss.backward()
    layer = model.model.decoder.layers[0].cross_attention
    assert layer.sinks.grad.abs().sum() > 0 and layer.gate_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "case",
    mixes({"sinks_and_gate": {"attention": {**WINDOW, **SINKS, "output_gate": "element"}, "position": "rotary"}}),
    ids=str,
)
def test_contract(case):
    check_contract(case)

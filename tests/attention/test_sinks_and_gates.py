"""Learned sinks and output gates against their equations, GPT-OSS and Qwen3-Next, and in every mechanism."""

import pytest
import torch
from transformers import GptOssConfig, Qwen3NextConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM, XFormerForSeq2SeqLM
from hf_xformers.core.components import SLOTS
from tests.attention.score_helpers import GEOMETRY, HEADS, WIDTH, build_layers, make_context, run_layers, vectors
from tests.helpers import close, make_strong, tokens

SINKS = {"learned_sinks": True}
WINDOW = {"type": "sliding_window", "window_size": 3, "sinks": 1}
ATTENTIONS = {"dense": ({"type": "dense"}, 99, 0), "band": ({"type": "band_attention", "window_size": 3}, 3, 0)}
ATTENTIONS["window"] = (WINDOW, 3, 1)


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
    [(name, "output_gate") for name, kind in KINDS.items() if "parts" in kind.head_options]
    + [(name, "learned_sinks") for name, kind in KINDS.items() if "sink" in kind.head_options],
)
def test_every_mechanism_that_says_so(name, field):
    """Gates and sinks learn, and decoding token by token gives what the whole text does."""
    kind, value = KINDS[name], {"output_gate": "head", "learned_sinks": True}[field]
    causal = "causal" not in kind.why_not and name != "axial_transformer"  # whose decoder is another stack
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


def test_in_cross_attention_and_not_divided():
    spec = {"type": "dense", **SINKS, "output_gate": "element"}
    config = XFormerConfig(**GEOMETRY, is_encoder_decoder=True, attention=spec, cross_attention=spec)
    assert "context_parallel" in SLOTS["attention"].get("dense")().supports - config.attention.supports
    model, ids = make_strong(XFormerForSeq2SeqLM(config)), tokens(2, 5, high=50)
    model(ids, labels=ids).loss.backward()
    layer = model.model.decoder.layers[0].cross_attention
    assert layer.sinks.grad.abs().sum() > 0 and layer.gate_proj.weight.grad.abs().sum() > 0

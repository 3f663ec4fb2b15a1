"""Contracts between components: declared on base classes, so that a new component works without touching others."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import hf_xformers
from hf_xformers import XFormerConfig, XFormerForMaskedLM
from hf_xformers.attention.dense import DenseSpec
from hf_xformers.attention.shared.spec import AttentionSpec
from hf_xformers.blocks.window_state import WindowCacheLayer
from hf_xformers.core.cache import make_cache, stateful_part
from hf_xformers.core.components import SLOTS, Spec, build_spec, register
from hf_xformers.core.hand_overs import HandOver
from hf_xformers.core.parallel_plans import tensor_parallel_plan
from hf_xformers.feedforward.dense import ReLUSpec
from hf_xformers.normalization.base import NormSpec
from hf_xformers.position.rotary import RotarySpec

PACKAGE = Path(hf_xformers.__file__).parent
ROOMS = ("core", "blocks", "embedding", "feedforward", "heads", "modeling", "normalization", "stacks")
# Attributes that were declared by nobody and found by name; here, in the objects of other libraries, they may be.
FOREIGN = {"__len__", "padding_side", "is_fast", "tensor_data_names", "_hf_hook", "embed_scale", "use_mtp"}
FOREIGN |= {"to", "__dict__", "_fields"}  # of anything that a call may hold (core/elsewhere.py)
SMALL = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


@pytest.fixture
def add(monkeypatch):
    """Registers a spec class for one test."""
    for slot in SLOTS.values():
        list(slot)  # its room is imported once, and for good
        monkeypatch.setattr(slot, "_specs", dict(slot._specs))
    return lambda slot, cls: register(slot, cls.__name__)(cls)(**{})


def sources():
    for room in ROOMS:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            yield path.relative_to(PACKAGE), path.read_text()


def test_no_contract_is_looked_up_by_name():
    found = [
        f"{path}:{node.lineno} {node.args[1].value}"
        for path, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr")
        if isinstance(node.args[1], ast.Constant) and node.args[1].value not in FOREIGN
    ]
    assert not found, f"declare it on the base class that owns it: {found}"


def test_no_rule_asks_for_a_component_by_its_name():
    asked = re.compile(r"config\.\w+\.type (?:==|!=|in|not in) ")
    found = [f"{path}: {line.strip()}" for path, text in sources() for line in text.split("\n") if asked.search(line)]
    assert not found, f"declare a capability on the base class: {found}"


@pytest.mark.parametrize("base, names", [(Spec, ("supports", "splits")), (AttentionSpec, ("acts", "head_options"))])
def test_what_is_declared_is_explained(base, names):
    slots = SLOTS if base is Spec else ("attention",)
    specs = [build_spec(slot, name) for slot in slots for name in SLOTS[slot]]
    explained = set(re.findall(r"`(\w+)`", base.__doc__))
    for name in names:
        assert set().union(*(getattr(spec, name) for spec in specs)) <= explained, name


def test_capabilities_of_an_attention(add):
    class Another(DenseSpec):
        gives = frozenset({HandOver.TOKEN_MAP})

    class Bare(DenseSpec):
        keeps_keys_alone = False
        acts = DenseSpec.acts - {"values"}

        def takes_global_tokens(self):
            return False

    another, bare = add("attention", Another), add("attention", Bare)
    assert XFormerConfig(**SMALL, attention=another, block="no_ffn").block.type == "no_ffn"
    XFormerConfig(**SMALL, is_decoder=True, attention=another, block="cpe")
    for fields in (
        {"block": "no_ffn"},
        {"block": "cpe", "is_decoder": True},
        {"stack": "global_tokens"},
        {"position": RotarySpec(values=True)},
        {"stack": "feedback", "is_decoder": True},
        {"stack": "segment_recurrent"},
    ):
        with pytest.raises(ValueError, match="Bare"):
            XFormerConfig(**SMALL, attention=bare, **fields)


def test_whose_state_a_cache_keeps(add):
    """The stack's before the block's before the attention's."""

    class Window(DenseSpec):
        def cache_layer(self, config, layer_idx):
            return WindowCacheLayer()

    plain = XFormerConfig(**SMALL, is_decoder=True)
    attention = XFormerConfig(**SMALL, is_decoder=True, attention=add("attention", Window))
    block = XFormerConfig(**SMALL, is_decoder=True, block="cpe")
    segments = {"attention": "transformer_xl", "position": "none"}
    stack = XFormerConfig(**SMALL, is_decoder=True, stack="compressive", **segments)
    parts = [stateful_part(config) for config in (plain, attention, block, stack)]
    assert parts == ["", "attention 'Window'", "block 'cpe'", "stack 'compressive'"]
    limited = XFormerConfig(
        **SMALL, is_decoder=True, stack={"type": "segment_recurrent", "memory_length": 5}, **segments
    )
    assert [layer.limit for layer in make_cache(limited).layers] == [5, 5]
    endless = XFormerConfig(**SMALL, is_decoder=True, **segments)
    assert [layer.limit for layer in make_cache(endless).layers] == [None, None]


def test_a_feed_forward_says_how_it_splits(add):
    class Whole(ReLUSpec):
        splits = frozenset()

    plans = [
        tensor_parallel_plan(XFormerConfig(**SMALL, feedforward=feedforward))
        for feedforward in ("relu", "swiglu", add("feedforward", Whole))
    ]
    names = [sorted({name.rpartition(".")[2] for name in plan if "feedforward" in name}) for plan in plans]
    assert names == [["down_proj", "up_proj"], ["down_proj", "gate_proj", "up_proj"], []]


def test_a_sublayer_is_one(add):
    class Naked(ReLUSpec):
        def build(self, config, **where):
            return nn.Linear(config.hidden_size, config.hidden_size)

    with pytest.raises(TypeError, match=r"feedforward of layer 0 is a Linear.*let it derive from"):
        XFormerForMaskedLM(XFormerConfig(**SMALL, feedforward=add("feedforward", Naked)))


class Centred(nn.Module):
    """Takes off the mean over real tokens."""

    def forward(self, hidden_states, mask=None):
        real = hidden_states if mask is None else hidden_states[mask]
        return hidden_states - real.reshape(-1, real.shape[-1]).mean(0)


def test_a_norm_over_tokens_is_given_the_mask(add):
    """Inside layers and after the last one: what stands at padding does not count."""

    class Centre(NormSpec):
        over_tokens = True

        def build(self, config, **where):
            return Centred()

    norm = add("normalization", Centre)
    torch.manual_seed(0)
    model = XFormerForMaskedLM(XFormerConfig(**SMALL, normalization=norm, residual="pre_ln")).eval()
    ids = torch.randint(1, 20, (2, 6))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    changed = ids.masked_fill(mask == 0, 3)
    with torch.no_grad():
        first, second = (model(input_ids=x, attention_mask=mask).logits[mask == 1] for x in (ids, changed))
    torch.testing.assert_close(first, second)
    with pytest.raises(ValueError, match="Centre"):
        XFormerConfig(**SMALL, normalization=norm, embedding={"type": "factorized", "width": 8}, head="transform")


@pytest.mark.parametrize("residual", ["post_ln", "admin", "rezero", "bare"])
def test_the_mask_decoder_takes_frames_that_read_the_stream(residual):
    """Where a sublayer reads the residual stream itself, the keys that the decoder hands over are what it reads."""
    config = XFormerConfig(**SMALL, position="deberta", stack="enhanced_mask_decoder", residual=residual)
    assert config.residual.enters_as_is
    torch.manual_seed(0)
    model = XFormerForMaskedLM(config).eval()
    ids, table = torch.randint(1, 20, (2, 6)), torch.randn(config.max_position_embeddings, 16)
    with torch.no_grad():
        plain, told = model(input_ids=ids).logits, model(input_ids=ids, absolute_positions=table).logits
    assert torch.isfinite(told).all()
    if residual != "rezero":  # whose layers are the identity at the start
        assert not torch.allclose(plain, told)
    model.model.trunk.stack.passes = 1
    with torch.no_grad():  # one pass that reads H + 0 from H is the plain last layer
        torch.testing.assert_close(model(input_ids=ids, absolute_positions=torch.zeros_like(table)).logits, plain)

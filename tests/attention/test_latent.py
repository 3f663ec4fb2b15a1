"""Multi-head latent attention against DeepSeek's classes of transformers, and the state that it promises."""

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.attention.multi_head_latent_attention import LatentAttention
from hf_xformers.core.cache import make_cache
from hf_xformers.position.base import Turns
from hf_xformers.position.rotary import RotaryPosition, RotarySpec
from tests.attention.references.recent import LATENT
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    WIDTH,
    build_layers,
    in_pieces,
    make_context,
    run_layers,
    state_size,
    vectors,
)
from tests.helpers import close, make_strong, tokens

LENGTH = 11
SPEC = {"type": "multi_head_latent_attention", **LATENT}


def copied(ours, theirs):
    """transformers' weights under our names: what goes up to keys and values stands by head, [keys | values]."""
    state = {
        name: tensor for name, tensor in theirs.state_dict().items() if name.split(".")[0] in ("q_proj", "o_proj")
    }
    names = {"kv_a_proj_with_mqa": "kv_down_proj", "kv_a_layernorm": "kv_down_norm", "q_a_proj": "q_down_proj",
             "q_a_layernorm": "q_down_norm", "q_b_proj": "q_proj"}  # fmt: skip
    for name, tensor in theirs.state_dict().items():
        module, leaf = name.split(".")
        if module in names:
            state[f"{names[module]}.{leaf}"] = tensor
    up = theirs.kv_b_proj.weight.unflatten(0, (HEADS, -1))
    state["k_proj.weight"], state["v_proj.weight"] = (x.flatten(0, 1) for x in up.split((3, 5), dim=1))
    ours.load_state_dict(state)


@pytest.mark.parametrize("rank", [None, 6])
@pytest.mark.parametrize("version", ["v2", "v3", "v3 halves", "v3 yarn"])
@torch.no_grad()
def test_deepseek(version, rank):
    config_class, module = {"v2": (DeepseekV2Config, DeepseekV2Attention)}.get(
        version, (DeepseekV3Config, DeepseekV3Attention)
    )
    config = config_class(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=rank, attention_bias=True,
        **LATENT,
    )  # fmt: skip
    config._attn_implementation = "eager"
    scale = {}
    if version == "v3 halves":
        config.rope_interleave = False
    if version == "v3 yarn":  # scores are that much larger, whatever turns their queries and keys
        config.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale_all_dim": 0.7}
        scale = {"scale": (0.1 * 0.7 * torch.tensor(40.0).log().item() + 1) ** 2 * 7**-0.5}
    torch.manual_seed(0)
    theirs = make_strong(module(config, 0).double(), amount=0.3).eval()
    (ours,) = build_layers({**SPEC, "q_lora_rank": rank, "bias": True, **scale}, 1, True)
    copied(ours, theirs)
    places = torch.arange(LENGTH)[None]
    layout = "half" if version == "v3 halves" else "interleaved"
    tables = RotaryPosition(4, RotarySpec(layout=layout)).rotation(places, vectors(1, 1))
    angles = places[..., None] * 1e4 ** (-torch.arange(2) / 2)
    if version == "v2":
        where = {"position_embeddings": torch.polar(torch.ones_like(angles), angles)}
    else:
        where = {"position_embeddings": tuple(torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))}
    states = vectors(2, LENGTH)
    order = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    expected = theirs(states, attention_mask=order, **where)[0]
    for implementation in ("eager", "sdpa"):
        context = make_context(LENGTH, True, implementation=implementation)
        context.keep(Turns(tables, tables), "global")
        close(run_layers([ours], states, context)[0].output, expected, 2e-6)  # angles are in float32


def test_state_is_the_latents():
    """c + r numbers for each token, of whatever type the pieces were that it was read in."""
    (layer,) = build_layers(SPEC, 1, True)
    with torch.no_grad():
        for pieces in ((9,), (4, 1, 4)):
            _, cache = in_pieces([layer], vectors(2, 9), None, pieces)
            assert state_size(cache) == 2 * 9 * (LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"])


@pytest.mark.parametrize("padded", [False, True])
def test_steps_make_no_keys(padded, monkeypatch):
    """A step of decoding reads latents as they are, and gives what written-out keys and values give."""
    (layer,) = build_layers({**SPEC, "q_lora_rank": 6}, 1, True)
    mask = None
    if padded:
        mask = torch.ones(2, 9, dtype=torch.bool)
        mask[0, :3], mask[1, 2:4] = False, False
    expected, _ = in_pieces([layer], vectors(2, 9), mask, (5, 3, 1))  # with gradients keys are made
    monkeypatch.setattr(LatentAttention, "written_out", lambda *_: pytest.fail("keys and values were made"))
    with torch.no_grad():
        cache = make_cache(layer.config)
        cache.update(*(x[:, :, :5] for x in stored(layer, vectors(2, 9))), 0)
        for begin, end in ((5, 8), (8, 9)):
            context = make_context(end - begin, True, past=begin, padding_mask=None if mask is None else mask[:, :end])
            output = run_layers([layer], vectors(2, 9)[:, begin:end], context, cache=cache)[0].output
            close(output, expected[:, begin:end], 1e-12)


def stored(layer, states):
    """What a cache holds of a text, without rotation."""
    return layer.project_latent(states, make_context(states.shape[1], True), None, 0)[1:]


@torch.no_grad()
def test_adapters_are_called():
    """A projection that is more than its weight is called, and decoding is right with it."""
    (layer,) = build_layers(SPEC, 1, True)
    layer.k_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    whole = run_layers([layer], vectors(1, 6), make_context(6, True))[0].output
    close(in_pieces([layer], vectors(1, 6), None, (3, 1, 1, 1))[0], whole)


@torch.no_grad()
def test_generation():
    """Greedy and with beams, in a batch padded on the left, with a rotation that follows the length as well."""
    for scaling in (None, {"type": "dynamic", "factor": 2.0}):
        position = {"type": "rotary", "layout": "interleaved", "scaling": scaling}
        config = XFormerConfig(**{**GEOMETRY, "max_position_embeddings": 6}, position=position, attention=SPEC,
                               is_decoder=True, pad_token_id=0, eos_token_id=49)  # fmt: skip
        torch.manual_seed(0)
        model = make_strong(XFormerForCausalLM(config).double()).eval()
        ids, mask = tokens(2, 5, high=49), torch.ones(2, 5, dtype=torch.long)
        mask[0, :2] = 0
        for beams in (1, 2):
            fields = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, num_beams=beams)
            found = [model.generate(ids, use_cache=cached, **fields) for cached in (True, False)]
            if scaling is None:  # otherwise a longer text turns what deeper layers have read
                assert torch.equal(*found)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_key_value_heads": 2}, "one latent, got `num_key_value_heads` 2; leave that out"),
        ({"cross_attention": SPEC}, "cannot read a memory"),
        ({"position": "deberta"}, "has no place for"),
        ({"attention": {**SPEC, "qk_rope_head_dim": 3}}, "head width 3 is 3; choose an even"),
        ({"attention": {**SPEC, "kv_lora_rank": 0}}, "`kv_lora_rank` >= 1, got 0"),
        ({"attention": {**SPEC, "query_key_norm": "head"}}, "cannot normalize them"),
    ],
)
def test_refusals(fields, words):
    with pytest.raises(ValueError, match=words):
        XFormerConfig(**{**GEOMETRY, "attention": SPEC, "position": "rotary", **fields})

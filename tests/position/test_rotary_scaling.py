"""Rotary scalings against transformers' own functions."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_xformers import XFormerConfig, XFormerForCausalLM, build_spec
from hf_xformers.core.components import SLOTS, names
from hf_xformers.position.rotary import RotaryPosition
from hf_xformers.position.rotary_scaling import SCALINGS, build_scaling
from tests.helpers import NO_DROPOUT, make_strong

WIDTH, THETA, LENGTH = 16, 10000.0, 64
FIELDS = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 32},
    "longrope": {
        "short_factor": [1.0 + 0.1 * i for i in range(WIDTH // 2)],
        "long_factor": [2.0 + 0.7 * i for i in range(WIDTH // 2)],
        "original_max_position_embeddings": 20,
        "factor": 5.0,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "proportional": {"proportion": 0.5, "factor": 2.0},
}
MORE = {
    "yarn": (
        {"attention_factor": 0.7},
        {"beta_fast": 3.0, "beta_slow": 0.5, "truncate": False},
        {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"factor": None},
    ),
    "longrope": ({"factor": None}, {"attention_factor": 1.25}, {"factor": 1.0}),
    "linear": (),
    "dynamic": (),
    "llama3": (),
    "proportional": ({"proportion": 0.25},),
}
CASES = [(name, {**FIELDS[name], **more}) for name in FIELDS for more in ({}, *MORE[name])]


def ours(name, fields, tokens):
    scaling = build_scaling({"type": name, **fields})
    scaling.check_width(WIDTH)
    return scaling.frequencies(THETA, WIDTH, LENGTH, torch.tensor([tokens])), scaling.amplitude(LENGTH)


def test_every_type_is_tried():
    assert set(SCALINGS) == set(FIELDS) == set(ROPE_INIT_FUNCTIONS)


@pytest.mark.parametrize("tokens", [10, 64, 300])
@pytest.mark.parametrize(("name", "fields"), CASES)
def test_transformers(name, fields, tokens):
    """The same numbers, to the last bit but one."""
    given = {"partial_rotary_factor" if key == "proportion" else key: value for key, value in fields.items()}
    parameters = {"rope_type": name, "rope_theta": THETA, **given}
    config = LlamaConfig(
        hidden_size=4 * WIDTH, num_attention_heads=4, max_position_embeddings=LENGTH, rope_parameters=parameters
    )
    expected, factor = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), seq_len=tokens)
    found, amplitude = ours(name, fields, tokens)
    torch.testing.assert_close(found[0], expected, rtol=3e-7, atol=0)
    assert amplitude == pytest.approx(factor, rel=1e-12)


def position(**fields):
    return RotaryPosition(WIDTH, build_spec("position", {"type": "rotary", **fields}), LENGTH)


def test_rows_are_scaled_by_their_own_length():
    """What is longer beside a text in a batch changes nothing in it."""
    module = position(scaling={"type": "dynamic", "factor": 4.0})
    rows = torch.stack([torch.arange(100), torch.arange(100).clamp(max=69)])
    like = torch.zeros(1)
    both = module.rotation(rows, like)
    for row in range(2):
        alone = module.rotation(rows[row : row + 1], like)
        assert torch.equal(both.cos[row], alone.cos[0])
    assert not torch.equal(both.cos[0, :, :70], both.cos[1, :, :70])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_tables_have_the_amplitude(layout):
    module = position(scaling={"type": "yarn", **FIELDS["yarn"]}, layout=layout)
    tables = module.rotation(torch.arange(5)[None], torch.zeros(1))
    factor = 0.1 * math.log(8.0) + 1
    torch.testing.assert_close(tables.cos**2 + tables.sin**2, torch.full_like(tables.cos, factor**2))


def test_local_rotation_has_its_own_theta_and_scaling():
    module = position(theta=1e6, scaling={"type": "linear", "factor": 8.0}, local_theta=100.0)
    places, like = torch.arange(30)[None], torch.zeros(1)
    local = module.rotation(places, like, local=True)
    assert torch.equal(local.cos, position(theta=100.0).rotation(places, like).cos)
    wide = position(theta=1e6, scaling={"type": "linear", "factor": 8.0}).rotation(places, like)
    assert torch.equal(module.rotation(places, like).cos, wide.cos)
    assert not position().has_local and module.has_local


def test_config_keeps_the_scaling():
    for name, fields in FIELDS.items():
        made = {"type": "rotary", "scaling": {"type": name, **fields}, "local_scaling": "proportional"}
        config = XFormerConfig(hidden_size=32, num_attention_heads=2, position=made)
        again = XFormerConfig.from_dict(config.to_dict())
        assert again.position == config.position
        stored = config.to_dict()["position"]["scaling"]
        assert {key: stored[key] for key in ("type", *fields)} == {"type": name, **fields}


GROWING = {
    "longrope": {
        "type": "longrope",
        "short_factor": (1.0,) * 4,
        "long_factor": (4.0, 2.0, 3.0, 5.0),
        "original_max_position_embeddings": 8,
    },
    "dynamic": {"type": "dynamic", "factor": 4.0},
}
FORMS = {
    "conditional": {"stack": "conditional_computation", "feedforward": "conditional"},
    "synthesizer": {"attention": {"type": "synthesizer", "kind": "random+dot", "max_length": 24}},
    "talking_heads": {"attention": {"type": "talking_heads", "num_key_heads": 2, "dynamic": ("m2l", "x2w")}},
    "multi_head_latent_attention": {"attention": {"type": "multi_head_latent_attention", "qk_rope_head_dim": 8}},
    "sliding_window": {"attention": {"type": "sliding_window", "sinks": 0, "window_size": 4}},
}


def growing(attention, scaling):
    fields = {"attention": attention, **FORMS.get(attention, {})}
    return XFormerConfig(
        **{"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
        **{"intermediate_size": 16, "max_position_embeddings": 8, "is_decoder": True, "pad_token_id": 0},
        **NO_DROPOUT,
        **fields,
        position={"type": "rotary", "scaling": GROWING[scaling]},
    )


TURNING = [
    name
    for name in names("attention")
    if "rotation" in (spec := SLOTS["attention"].get(name)).acts
    and "causal" not in spec.why_not
    and spec.keeps_rotated is not True
    and name != "ca_mtl"  # its table of biases has no places beyond the pretraining
]


@pytest.mark.parametrize("scaling", GROWING)
@pytest.mark.parametrize("attention", TURNING)
@torch.no_grad()
def test_caches_turn_keys_anew(attention, scaling):
    """Every mechanism: pieces that pass the length of pretraining end as the whole text at once does, beside padding
    (one layer, as the states of earlier tokens of a shorter text were others)."""
    torch.manual_seed(0)
    model = make_strong(XFormerForCausalLM(growing(attention, scaling)).double().eval())
    ids = torch.randint(3, 40, (2, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    expected, past, done = model(ids, attention_mask=mask, use_cache=False).logits, None, 0
    for size in (6, 1, 1, 4, 1, 3):
        seen = done + size
        found = model(ids[:, done:seen], attention_mask=mask[:, :seen], past_key_values=past, use_cache=True)
        past, done = found.past_key_values, seen
    torch.testing.assert_close(found.logits[:, -1], expected[:, -1], rtol=0, atol=1e-10)

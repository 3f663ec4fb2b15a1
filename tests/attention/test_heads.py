"""Normalised queries and keys, capped scores, biases of single projections, and rotations of single layers."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerModel
from hf_xformers.core.components import SLOTS
from hf_xformers.ops.block_sparse.attention import block_sparse_attention, block_sparse_reference
from hf_xformers.ops.block_sparse.patterns import band, full, global_
from tests.helpers import close, make_strong, tokens

TINY = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40)
ATTENTIONS = {name: SLOTS["attention"].get(name) for name in SLOTS["attention"]}


def config(**changes):
    fields = {**TINY, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "position": "none"}
    return XFormerConfig(**{**fields, **changes})


def padded(lengths=(7, 5)):
    ids, length = tokens(len(lengths), max(lengths), high=50), max(lengths)
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long()}


@pytest.mark.parametrize("name", [name for name, spec in ATTENTIONS.items() if "norm" in spec.head_options])
def test_norms_of_all_mechanisms_are_read(name):
    """Other weights of either norm change the result, and decoding token by token gives the same."""
    spec = ATTENTIONS[name]
    stack = {"conditional": "conditional_computation"}.get(name, "plain")
    causal = "causal" not in spec.why_not and stack == "plain" and name != "axial_transformer"
    made = config(
        attention={"type": name, "query_key_norm": "head"},
        is_decoder=causal,
        normalization="rms_norm",
        stack=stack,
        block="bp_transformer" if name == "bp_transformer" else "vanilla",
    )
    model = make_strong(XFormerForCausalLM(made) if causal else XFormerModel(made)).eval()
    given = padded((9, 9))
    with torch.no_grad():
        first = model(**given)[0]
        if causal:
            past = model(given["input_ids"][:, :6], use_cache=True).past_key_values
            later = [model(given["input_ids"][:, [i]], past_key_values=past).logits for i in range(6, 9)]
            close(torch.cat(later, 1), first[:, 6:], 2e-4)
        for norm in ("q_norm", "k_norm"):
            part = getattr(
                model.base_model.trunk.layers[0 if name in ("lazyformer", "axial_transformer") else 1].attention, norm
            )
            kept = part.weight.clone()
            part.weight.mul_(torch.linspace(0.2, 3.0, len(kept)))
            assert float((model(**given)[0] - first).abs().max()) > 1e-4, norm
            part.weight.copy_(kept)


@pytest.mark.parametrize(
    "fields",
    [
        {"pattern": full(), "causal": True},
        {"pattern": band(3, 2)},
        {"pattern": band(2, 0) | global_(first=2)},
        {"pattern": [band(1, 1), full(), band(0, 4), full()]},
    ],
    ids=["causal", "band", "global", "heads"],
)
def test_engine_caps_scores(fields):
    """Outputs and gradients of the tiles are those of the dense equation."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 13, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    padding = torch.arange(13) < torch.tensor([[13], [8]])
    options = {"key_padding_mask": padding, "scale": 2.0, "score_cap": 1.5, **fields}
    results = []
    for function in (block_sparse_attention, block_sparse_reference):
        output = function(query, key, value, **options)
        output = output if isinstance(output, torch.Tensor) else output[0]
        gradients = torch.autograd.grad((output * torch.linspace(-1, 2, 4)).sum(), (query, key, value))
        results.append((output, *gradients))
    for own, expected in zip(*results, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-10)
    assert not torch.allclose(
        results[0][0], block_sparse_attention(query, key, value, **{**options, "score_cap": None})
    )
    few = block_sparse_attention(query[:, :, -1:], key, value, query_offset=12, **options)
    torch.testing.assert_close(few, results[1][0][:, :, -1:], rtol=1e-9, atol=1e-10)


def test_layers_choose_their_rotation():
    """Three layers: as all, local, none; each is that of a model that has no other."""
    position = {"type": "rotary", "theta": 1000.0, "local_theta": 7.0}
    layers = {
        1: {"attention": {"type": "dense", "angles": "local"}},
        2: {"attention": {"type": "dense", "angles": "none"}},
    }
    model = make_strong(XFormerModel(config(num_hidden_layers=3, position=position, per_layer_config=layers))).eval()
    given, found = padded((6, 6)), {}
    for index, layer in enumerate(model.trunk.layers):
        layer.attention.register_forward_hook(
            lambda _, args, output, index=index: found.update({index: (args[0], output.output)})
        )
    with torch.no_grad():
        model(**given)
    for index, plain in enumerate(({"theta": 1000.0}, {"theta": 7.0}, None)):
        own = XFormerModel(config(position="none" if plain is None else {"type": "rotary", **plain})).eval()
        attention = own.trunk.layers[0].attention
        attention.load_state_dict(model.trunk.layers[index].attention.state_dict())
        states, expected = found[index]
        context = own.trunk.make_context(states)
        own.trunk.position.share(context, states)
        attention.prepare(context, None)
        with torch.no_grad():
            close(attention(states, context).output, expected, 1e-5)


@pytest.mark.parametrize("scaling", [{"type": "dynamic", "factor": 3.0}, "longrope"])
@pytest.mark.parametrize("attention", ["dense", {"type": "band_attention", "window_size": 5}])
def test_caches_turn_keys_by_the_length_so_far(scaling, attention):
    """Beyond the length that frequencies depend on, a decoded token reads keys as the whole text has them. One layer:
    above it, states of earlier tokens are those of the shorter text that they were made in."""
    if scaling == "longrope":
        scaling = {
            "type": "longrope",
            "short_factor": [1, 1.5, 2, 3],
            "long_factor": [2, 4, 7, 9],
            "original_max_position_embeddings": 6,
        }
    made = config(
        is_decoder=True,
        num_hidden_layers=1,
        max_position_embeddings=6,
        position={"type": "rotary", "scaling": scaling},
        attention=attention,
    )
    model = make_strong(XFormerForCausalLM(made)).eval()
    ids = tokens(2, 12, high=50)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    with torch.no_grad():
        past = model(ids[:, :4], attention_mask=mask[:, :4], use_cache=True).past_key_values
        for end in range(5, 13):
            step = model(ids[:, end - 1 : end], attention_mask=mask[:, :end], past_key_values=past).logits[:, -1]
            close(step, model(ids[:, :end], attention_mask=mask[:, :end]).logits[:, -1], 2e-6)


def test_logits_are_capped():
    plain = make_strong(XFormerForCausalLM(config(is_decoder=True)), amount=0.5).eval()
    capped = XFormerForCausalLM(config(is_decoder=True, head={"type": "linear", "cap": 0.7})).eval()
    capped.load_state_dict(plain.state_dict())
    given = padded()
    with torch.no_grad():
        logits, found = plain(**given).logits, capped(**given).logits
    close(found, 0.7 * torch.tanh(logits / 0.7), 1e-6)
    assert float(logits.abs().max()) > 1

"""Normalised queries and keys in every mechanism, and rotations of single layers."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerModel
from hf_xformers.core.components import SLOTS
from tests.helpers import close, make_strong, tokens

TINY = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40)
ATTENTIONS = {name: SLOTS["attention"].get(name) for name in SLOTS["attention"]}
FIRST = ("lazyformer", "axial_transformer", "cross_layer_attention")  # whose first layer alone has all norms


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
            part = getattr(model.base_model.trunk.layers[0 if name in FIRST else 1].attention, norm)
            kept = part.weight.clone()
            part.weight.mul_(torch.linspace(0.2, 3.0, len(kept)))
            assert float((model(**given)[0] - first).abs().max()) > 1e-4, norm
            part.weight.copy_(kept)


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

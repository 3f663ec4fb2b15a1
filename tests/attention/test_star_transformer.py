"""Star-Transformer against its equations as loops over tokens, and against fastNLP by weight copy."""

import importlib.util
from pathlib import Path

import pytest
import torch

from hf_xformers.variants.star_transformer import (
    XFStarTransformerConfig,
    XFStarTransformerForSequenceClassification,
    XFStarTransformerModel,
)
from tests.attention.score_helpers import GEOMETRY
from tests.helpers import close, make_strong

NO_POSITIONS = {"position": "none", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
D = GEOMETRY["hidden_size"] // GEOMETRY["num_attention_heads"]


def build(cls=XFStarTransformerModel, implementation="sdpa", **fields):
    torch.manual_seed(0)
    config = XFStarTransformerConfig(**{**GEOMETRY, **NO_POSITIONS, **fields})
    config._attn_implementation = implementation
    return make_strong(cls(config).double().eval(), amount=0.5)


def vectors(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def attend(query, keys, part, zeros=0):
    """MHA of one vector over a list of vectors; zeros: further keys whose key and value are zero."""
    q, k, v = part.q_proj(query), [part.k_proj(x) for x in keys], [part.v_proj(x) for x in keys]
    k, v = k + [torch.zeros_like(q)] * zeros, v + [torch.zeros_like(q)] * zeros
    found = []
    for at in range(0, len(q), D):
        scores = torch.stack([(q[at : at + D] * x[at : at + D]).sum() / D**0.5 for x in k])
        shares = scores.exp() / scores.exp().sum()
        found.append(sum(share * x[at : at + D] for share, x in zip(shares, v)))
    return part.o_proj(torch.cat(found))


@torch.no_grad()
def by_hand(model, tokens, border="ring"):
    """States [T, D] of one text after all layers, and the relay that a pooler starts from."""
    layers, count = model.trunk.layers, len(tokens)
    states, relay = list(tokens), sum(tokens) / count
    for number, layer in enumerate(layers):
        part, frame = layer.attention, layer.attention_residual
        if number:
            found = attend(relay, [relay, *states], part.relay)
            relay = part.relay.norm(found.clamp(min=0))
        new = []
        for i in range(count):
            around = (
                {(i - 1) % count, (i + 1) % count} - {i} if border == "ring" else {i - 1, i + 1} & set(range(count))
            )
            keys = [states[j] for j in around] + [states[i], tokens[i], relay]
            new.append(
                frame.norm(attend(states[i], keys, part, 2 - len(around) if border == "zeros" else 0).clamp(min=0))
            )
        states = new
    return torch.stack(states), relay


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("border", ["ring", "open", "zeros"])
def test_equations(border, implementation):
    model = build(
        implementation=implementation, attention={"type": "star_transformer", "border": border}, add_pooler=False
    )
    for count in (1, 2, 3, 6):
        given = vectors(1, count, 16)
        expected, _ = by_hand(model, given[0], border)
        with torch.no_grad():
            close(model(inputs_embeds=given).last_hidden_state[0], expected)
            for side in (slice(0, count), slice(3, 3 + count)):
                padded, mask = vectors(2, count + 3, 16, seed=1), torch.zeros(2, count + 3, dtype=torch.long)
                padded[0, side], mask[0, side] = given[0], 1
                found = model(inputs_embeds=padded, attention_mask=mask).last_hidden_state
                close(found[0, side], expected)
                assert found.isfinite().all()


def test_classification_reads_the_relay():
    """max_i h_i + s, with the relay's last step."""
    model = build(XFStarTransformerForSequenceClassification)
    given, pooler = vectors(1, 5, 16), model.model.pooler
    states, relay = by_hand(model.model, given[0])
    with torch.no_grad():
        last = pooler.relay.norm(attend(relay, [relay, *states], pooler.relay).clamp(min=0))
        expected = states.amax(0) + last
        mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
        padded = torch.cat([vectors(1, 2, 16, seed=2) * 100, given], 1)
        for found in (model(inputs_embeds=given).logits, model(inputs_embeds=padded, attention_mask=mask).logits):
            close(found[0], model.classifier(expected))


def fastnlp():
    """fastNLP's own module, from its file alone: the package around it needs more than tests have."""
    found = importlib.util.find_spec("fastNLP")
    if found is None:
        pytest.skip("FastNLP is not installed")
    path = Path(found.submodule_search_locations[0]) / "modules/torch/encoder/star_transformer.py"
    spec = importlib.util.spec_from_file_location("fastnlp_star_transformer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.StarTransformer


def test_parity_with_fastnlp():
    layers, heads, length = 3, GEOMETRY["num_attention_heads"], 7
    theirs = make_strong(fastnlp()(16, layers, heads, D, dropout=0.0).double().eval(), amount=0.3)
    model = build(
        layer_norm_eps=1e-6,
        attention={
            **{"type": "star_transformer", "border": "zeros", "relay_activation": "leaky_relu"},
            **{"relay_norm": False, "norm_inputs": True},
        },
        residual={"type": "no_residual", "activation": "leaky_relu", "norm": False},
    )

    def copy(ours, other):
        for mine, old in (("q_proj", "WQ"), ("k_proj", "WK"), ("v_proj", "WV"), ("o_proj", "WO")):
            linear, conv = getattr(ours, mine), getattr(other, old)
            linear.weight.copy_(conv.weight[:, :, 0, 0])
            linear.bias.copy_(conv.bias)

    given = vectors(2, length, 16)
    with torch.no_grad():
        for number in range(layers):
            part = model.trunk.layers[number].attention
            copy(part, theirs.ring_att[number])
            part.input_norm.load_state_dict(theirs.norm[number].state_dict())
            copy(
                model.trunk.layers[number + 1].attention.relay if number + 1 < layers else model.pooler.relay,
                theirs.star_att[number],
            )
        nodes, relay = theirs(given, torch.ones(2, length))
        output = model(inputs_embeds=given)
        types = model.trunk.embedding.types
        assert types is None
        close(output.last_hidden_state, nodes)
        close(output.pooler_output, nodes.amax(1) + relay)

"""DeBERTa's enhanced mask decoder, step by step with the layers' own parts."""

import pytest
import torch

from hf_xformers.variants.deberta import XFDebertaConfig, XFDebertaForMaskedLM, XFDebertaModel
from tests.helpers import close, make_strong, tokens

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=24)


def build(**fields):
    torch.manual_seed(0)
    config = XFDebertaConfig(**SIZES, max_position_embeddings=12, **fields)
    return make_strong(XFDebertaForMaskedLM(config).double().eval(), amount=0.3)


def run_last(layer, table, query_states, key_states):
    """Post-LN layer: queries of one sequence, keys and values of another, by the equation with all pairs."""
    attention, terms = layer.attention, layer.attention.position_terms
    heads = lambda x: x.view(*x.shape[:-1], 4, 4).transpose(-2, -3)  # noqa: E731
    q, k = heads(attention.q_proj(query_states)), heads(attention.k_proj(key_states))
    v, length = heads(attention.v_proj(key_states)), query_states.shape[1]
    index = (torch.arange(length)[:, None] - torch.arange(length)[None]).clamp(-12, 11) + 12
    kr, qr = heads(terms.key_proj(table)), heads(terms.query_proj(table))  # [H, 2k, d]
    scores = (
        q @ k.mT + torch.einsum("bhid,hijd->bhij", q, kr[:, index]) + torch.einsum("bhjd,hijd->bhij", k, qr[:, index])
    )
    mixed = (torch.softmax(scores / 12**0.5, -1) @ v).transpose(1, 2).flatten(2)
    states = layer.attention_residual.norm(query_states + attention.o_proj(mixed))
    inner = layer.feedforward
    return layer.feedforward_residual.norm(states + inner.down_proj(inner.activation(inner.up_proj(states))))


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_by_hand(passes):
    model = build(stack={"type": "enhanced_mask_decoder", "passes": passes})
    ids = tokens(2, 7, high=50)
    with torch.no_grad():
        found = model(ids).logits
        trunk = model.model.trunk
        below = trunk(ids, output_hidden_states=True).hidden_states[2]  # without the input, the plain stack
        states = below + model.absolute_positions.weight[:7]
        for _ in range(passes):
            states = run_last(trunk.layers[2], trunk.position.table.weight, states, below)
        close(found, model.lm_head(states))


def test_absolute_positions_matter_there_alone():
    """The encoder knows distances only; the masked language model tells apart the same text further on."""
    model = build()
    ids = tokens(1, 4, high=50)
    here, there = torch.arange(4)[None], torch.arange(5, 9)[None]
    with torch.no_grad():
        base = model.model
        close(base(ids, position_ids=there).last_hidden_state, base(ids, position_ids=here).last_hidden_state)
        gap = model(ids, position_ids=there).logits - model(ids, position_ids=here).logits
    assert gap.abs().max() > 1e-3


def test_other_heads_have_no_table():
    assert not any("absolute" in name for name in XFDebertaModel(XFDebertaConfig(**SIZES)).state_dict())


def test_plain_stack_and_refusals():
    assert build(stack="plain").absolute_positions is None
    model, ids = build(), tokens(1, 13, high=50)
    for tokens_of, given in ((ids, {}), (ids[:, :4], {"position_ids": torch.arange(10, 14)[None]})):
        with pytest.raises(ValueError, match="12 absolute positions"):
            model(tokens_of, **given)
    mask = torch.arange(13)[None] < 5
    close(model(ids, attention_mask=mask.long()).logits[:, :5], model(ids[:, :5]).logits)  # padding has no position

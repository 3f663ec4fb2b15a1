"""What models of several inputs are made of is here: two streams that read each other, a side encoder, and learned
queries, each from existing components, and each by its equation."""

import torch
from torch import nn

from hf_xformers import XFormerConfig
from hf_xformers.modeling_tower import XFormerTower
from hf_xformers.variants.xformer import XFormerForMaskedLM, XFormerForSeq2SeqLM, XFormerModel
from tests.helpers import NO_DROPOUT, close, make_strong, tokens

SIZES = {
    "vocab_size": 99,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
    "residual": "pre_ln",
    **NO_DROPOUT,
}


def tower(cross=True, seed=0, **changes):
    torch.manual_seed(seed)
    return make_strong(XFormerTower(XFormerConfig(**{**SIZES, **changes}), cross=cross).double().eval(), seed + 1)


def mixed(attention, query, memory, real):
    """Softmax attention, head by head."""
    q, k, v = (getattr(attention, f"{name}_proj")(x) for name, x in zip("qkv", (query, memory, memory)))
    heads = []
    for part in range(2):
        own = slice(8 * part, 8 * part + 8)
        scores = q[..., own] @ k[..., own].mT / 8**0.5
        heads.append(scores.masked_fill(~real[:, None], -torch.inf).softmax(-1) @ v[..., own])
    return attention.o_proj(torch.cat(heads, dim=-1))


def by_equation(layer, x, memory, real, memory_real):
    """One layer that reads a memory."""
    entered = layer.attention_residual.norm(x)
    x = x + mixed(layer.attention, entered, entered, real)
    x = x + mixed(layer.cross_attention, layer.cross_attention_residual.norm(x), memory, memory_real)
    inner = layer.feedforward.up_proj(layer.feedforward_residual.norm(x))
    return x + layer.feedforward.down_proj(nn.functional.gelu(inner))


@torch.no_grad()
def test_cross_attention_both_ways():
    """Co-attention (ViLBERT, LXMERT): in every layer each stream reads the other's states of the layer below."""
    image, text = tower(seed=1), tower(seed=2)
    x, y = torch.randn(2, 5, 16, dtype=torch.float64), torch.randn(2, 7, 16, dtype=torch.float64)
    x_real, y_real = torch.ones(2, 5).bool(), torch.ones(2, 7).bool()
    x_real[0, 3:], y_real[1, 4:] = False, False
    one = image.make_context(x, x_real.long(), encoder_attention_mask=y_real)
    other = text.make_context(y, y_real.long(), encoder_attention_mask=x_real)
    a, b, c, d = x, y, x, y
    for step in range(2):
        for layer, context in ((image.layers[step], one), (text.layers[step], other)):
            layer.prepare(context, None)
        a, b = (
            image.layers[step](a, b, context=one, step=step)[0],
            text.layers[step](b, a, context=other, step=step)[0],
        )
        c, d = (
            by_equation(image.layers[step], c, d, x_real, y_real),
            by_equation(text.layers[step], d, c, y_real, x_real),
        )
    close(a[x_real], c[x_real])
    close(b[y_real], d[y_real])


@torch.no_grad()
def test_a_side_encoder():
    """What an encoder of n-grams or images says is added to the states of the tokens it is about (ZEN), or stands
    beside the text that a decoder reads (video and speech translation)."""
    torch.manual_seed(0)
    model = make_strong(XFormerForMaskedLM(XFormerConfig(**SIZES)).double().eval())
    side = make_strong(XFormerModel(XFormerConfig(**{**SIZES, "num_hidden_layers": 1})).double().eval(), 5)
    ids, grams = tokens(2, 9), tokens(2, 4, seed=8)
    about = (
        torch.rand(2, 9, 4, generator=torch.Generator().manual_seed(0)) < 0.3
    ).double()  # which n-gram covers what
    said = side(grams).last_hidden_state
    given = model.get_input_embeddings()(ids) + about @ said
    logits = model(inputs_embeds=given).logits
    close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)
    assert (logits - model(ids).logits).abs().max() > 1e-3
    untouched = about.sum(-1) == 0
    close(given[untouched], model.get_input_embeddings()(ids)[untouched])

    config = XFormerConfig(**SIZES, is_encoder_decoder=True, decoder_start_token_id=1, pad_token_id=0)
    writer = make_strong(XFormerForSeq2SeqLM(config).double().eval(), 6)
    encoded = writer.get_encoder()(ids)
    encoded.last_hidden_state = torch.cat([encoded.last_hidden_state, said], dim=1)
    mask = torch.ones(2, 13).long()
    mask[0, 9:] = 0  # the first text comes without
    both = writer(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=ids[:, :3]).logits
    alone = writer(ids, decoder_input_ids=ids[:, :3]).logits
    close(both[0], alone[0])
    assert (both[1] - alone[1]).abs().max() > 1e-3


def test_learned_queries():
    """A fixed number of vectors that are learned read a memory of any length (DETR's objects, Chimera's memory)."""
    reader = tower(seed=4, num_hidden_layers=1, position="none").train()
    queries = nn.Parameter(torch.randn(3, 16, dtype=torch.float64))
    memory, real = torch.randn(2, 8, 16, dtype=torch.float64), torch.ones(2, 8).bool()
    real[1, 5:] = False
    found = reader(
        inputs_embeds=queries.expand(2, -1, -1), encoder_hidden_states=memory, encoder_attention_mask=real.long()
    ).last_hidden_state
    every = torch.ones(2, 3).bool()
    expected = by_equation(reader.layers[0], queries.expand(2, -1, -1), memory, every, real)
    close(found, reader.final_norm(expected))
    order = torch.randperm(8)
    again = reader(
        inputs_embeds=queries.expand(2, -1, -1),
        encoder_hidden_states=memory[:, order],
        encoder_attention_mask=real[:, order].long(),
    ).last_hidden_state
    close(again, found)  # a memory is a set
    found.square().sum().backward()
    assert queries.grad.abs().sum() > 0

"""HAN: against the equations by loops, the model of single sentences, and generation that keeps the context."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache

from hf_xformers import XFormerConfig, XFormerForSeq2SeqLM
from hf_xformers.stacks.han_nmt import HierarchicalContext
from tests.helpers import NO_DROPOUT, close, gradients, make_strong, tokens
from tests.stacks.layer_equations import linear, norm

SIZE, HEADS = 16, 2
FIELDS = {
    "vocab_size": 99,
    "hidden_size": SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "position": "sinusoidal_absolute",
    "is_encoder_decoder": True,
    "pad_token_id": 0,
    "eos_token_id": None,
    "decoder_start_token_id": 0,
    **NO_DROPOUT,
}


def build(side="encoder", size=3, **more):
    torch.manual_seed(0)
    stack = {"type": "han_nmt", "side": side, "context_size": size}
    return make_strong(
        XFormerForSeq2SeqLM(XFormerConfig(**{**FIELDS, "stack": stack, **more})).double().eval(), 1, 0.3
    )


def read(module, query, keys):
    """One query [D] reads keys [N, D], head by head; the weights of each head."""
    found, weights = [], []
    for head in range(HEADS):
        part = slice(head * SIZE // HEADS, (head + 1) * SIZE // HEADS)
        q, k, v = (linear(getattr(module, f"{n}_proj"), x)[..., part] for n, x in zip("qkv", (query, keys, keys)))
        weights.append((k @ q / (SIZE // HEADS) ** 0.5).softmax(-1))
        found.append(weights[-1] @ v)
    return linear(module.o_proj, torch.cat(found)), torch.stack(weights)


def by_hand(module, states, sentences):
    """States [T, D] and the sentences before, [T_j, D] each -> ([T, D], sentence weights [T, H, K])."""
    out, shares = [], []
    for h in states:
        words = torch.stack([read(module.word_attention, norm(module.word_norm, h), s)[0] for s in sentences])
        query, keys = norm(module.sentence_norm, h), norm(module.summary_norm, words)
        d, weights = read(module.sentence_attention, query, keys)
        d = d + linear(module.down_proj, linear(module.up_proj, norm(module.inner_norm, d)).relu())
        gate = torch.sigmoid(linear(module.gate_proj, torch.cat([h, d])))
        out.append(norm(module.output_norm, (1 - gate) * h + gate * d))
        shares.append(weights)
    return torch.stack(out), torch.stack(shares)


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return make_strong(HierarchicalContext(XFormerConfig(**FIELDS)).double().eval(), 1, 0.3)


def test_module_against_loops(module):
    states, before = (torch.randn(*shape, SIZE, dtype=torch.float64) for shape in ((2, 5), (2, 3, 4)))
    mask = torch.tensor([[[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]], [[0] * 4] * 3]).bool()
    with torch.no_grad():
        output = module(states, before, mask)
        expected, _ = by_hand(module, states[0], [before[0, 0], before[0, 2][[0, 2]]])
        close(output[0], expected)
        assert torch.equal(output[1], states[1])  # no sentence before
        _, alone = by_hand(module, states[0], [before[0, 0]])
        assert torch.equal(alone, torch.ones_like(alone))  # K = 1: all weight on the one sentence
        order = [2, 0, 1]
        close(module(states, before[:, order], mask[:, order]), output)  # sentences have no positions


def test_gradient_of_missing_sentences_is_finite(module):
    states = torch.randn(1, 3, SIZE, dtype=torch.float64)
    before = torch.randn(1, 2, 4, SIZE, dtype=torch.float64, requires_grad=True)
    module(states, before, torch.zeros(1, 2, 4, dtype=torch.bool)).sum().backward()
    assert not before.grad.any()


def context(batch=2, count=3, length=4, seed=3, name=""):
    ids = tokens(batch, count, length, seed=seed)
    mask = torch.ones_like(ids)
    mask[0, 0], mask[0, 2, 2:] = 0, 0
    return {f"{name}context_input_ids": ids, f"{name}context_attention_mask": mask}


def inputs(side):
    found = context()
    return {**found, **context(length=3, seed=4, name="decoder_")} if side != "encoder" else found


@pytest.mark.parametrize("side", ["encoder", "decoder", "both"])
def test_without_context_it_is_the_model_of_single_sentences(side):
    net = build(side)
    plain = XFormerForSeq2SeqLM(XFormerConfig(**FIELDS)).double().eval()
    report = plain.load_state_dict(net.state_dict(), strict=False)
    assert not report.missing_keys and all("stack.context" in key for key in report.unexpected_keys)
    ids, target = tokens(2, 6), tokens(2, 5, seed=2)
    given = inputs(side)
    with torch.no_grad():
        expected = plain(input_ids=ids, decoder_input_ids=target).logits
        close(net(input_ids=ids, decoder_input_ids=target).logits, expected)
        nothing = {name: torch.zeros_like(x) if "mask" in name else x for name, x in given.items()}
        close(net(input_ids=ids, decoder_input_ids=target, **nothing).logits, expected)
        some = net(input_ids=ids, decoder_input_ids=target, **given).logits
    assert ((some - expected).abs() > 1e-6).flatten(1).any(-1).all()


@pytest.mark.parametrize("side", ["encoder", "both"])
def test_states_of_sentences_before_are_those_of_the_same_layers(side):
    experts = {"type": "hash_layers", "num_experts": 3} if side == "both" else "gelu"  # which read ids
    net, ids, given = build(side, feedforward=experts), tokens(2, 6), inputs(side)
    trunk = net.model.trunk
    with torch.no_grad():
        output = trunk(input_ids=ids, **given).last_hidden_state[:, :6]
        own = trunk(input_ids=ids).last_hidden_state
        for row in range(2):
            rows = zip(given["context_input_ids"][row], given["context_attention_mask"][row].bool())
            before = [trunk(input_ids=x[m][None]).last_hidden_state[0] for x, m in rows if m.any()]
            close(output[row], by_hand(trunk.stack.context, own[row], before)[0])


def test_decoder_reads_translations_through_their_own_sources():
    net, given = build("both"), inputs("both")
    ids, target = tokens(2, 6), tokens(2, 5, seed=2)
    module, model = net.model.decoder.stack.context, net.model
    with torch.no_grad():
        seen = []
        handle = model.decoder.stack.register_forward_hook(lambda m, i, out: seen.append(out.hidden_states))
        model(input_ids=ids, decoder_input_ids=target, **given)
        handle.remove()
        memory = model.trunk(input_ids=ids, **given).last_hidden_state
        own = model.decoder(input_ids=target, encoder_hidden_states=memory[:, :6]).last_hidden_state
        for row in range(2):
            before = []
            for j in range(3):
                mask = given["context_attention_mask"][row, j].bool()
                if not mask.any():
                    continue
                source = model.trunk(input_ids=given["context_input_ids"][row, j][mask][None]).last_hidden_state
                real = given["decoder_context_attention_mask"][row, j].bool()
                written = given["decoder_context_input_ids"][row, j][real][None]
                before.append(model.decoder(input_ids=written, encoder_hidden_states=source).last_hidden_state[0])
            close(seen[0][row], by_hand(module, own[row], before)[0])


@pytest.mark.parametrize("side", ["encoder", "both"])
@pytest.mark.parametrize("beams", [1, 2])
def test_generation_keeps_the_context(side, beams):
    net, given, ids = build(side), inputs(side), tokens(2, 6)
    options = {"max_new_tokens": 5, "num_beams": beams, "do_sample": False}
    with torch.no_grad():
        made = net.generate(input_ids=ids, **given, **options)
        assert torch.equal(made, net.generate(input_ids=ids, **given, **options, use_cache=False))
        if beams == 1:
            logits = net(input_ids=ids, decoder_input_ids=made[:, :-1], **given).logits
            assert torch.equal(logits.argmax(-1), made[:, 1:])


def test_sentences_of_other_rows_and_padding_decide_nothing():
    net, given, ids, target = build("both"), inputs("both"), tokens(2, 6), tokens(2, 5, seed=2)
    with torch.no_grad():
        both = net(input_ids=ids, decoder_input_ids=target, **given).logits
        one = {name: x[:1] for name, x in given.items()}
        close(net(input_ids=ids[:1], decoder_input_ids=target[:1], **one).logits, both[:1])
        other = dict(given)
        for name in ("context_input_ids", "decoder_context_input_ids"):
            mask = given[name.replace("input_ids", "attention_mask")].bool()
            other[name] = given[name].masked_fill(~mask, 7)
        close(net(input_ids=ids, decoder_input_ids=target, **other).logits, both)
    loss = net(input_ids=ids, labels=target, **given).loss
    assert all(gradient.isfinite().all() for gradient in gradients(net, loss).values())


def test_sentences_of_another_batch_are_refused():
    net = build("both", size=2)
    with pytest.raises(ValueError, match=r"does not belong to a batch of 2 texts with at most 2 sentences before"):
        net(input_ids=tokens(2, 6), labels=tokens(2, 3), **context(count=3))
    with pytest.raises(ValueError, match="does not belong to a batch of 2 texts"):
        net(input_ids=tokens(2, 6), labels=tokens(2, 3), context_input_ids=tokens(1, 2, 4))
    given = {"input_ids": tokens(2, 6), "decoder_input_ids": tokens(2, 3), **inputs("both")}
    with pytest.raises(ValueError, match="sentences before .* which the given Cache has no place for"):
        plain = Cache(layer_class_to_replicate=DynamicLayer)
        build("both")(**given, past_key_values=EncoderDecoderCache(plain, DynamicCache()))
    memory = net.model.trunk(input_ids=tokens(2, 6))
    with pytest.raises(ValueError, match="was not made with `context_input_ids`"):
        net(encoder_outputs=memory, labels=tokens(2, 3), context_input_ids=tokens(2, 2, 4))

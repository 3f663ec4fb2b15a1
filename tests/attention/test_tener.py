"""TENER: its equation in loops, and characters of words."""

import math

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.embedding.word_characters import CharacterEncoder
from hf_xformers.variants import config_class, family
from tests.helpers import NO_DROPOUT, close, make_strong, tokens

FIELDS = {
    **{"vocab_size": 60, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8},
    **NO_DROPOUT,
}


def model(spec=None, **changes):
    spec = {"type": "tener", **(spec or {})}
    config = XFormerConfig(**{**FIELDS, "attention": spec, "position": "none", **changes})
    torch.manual_seed(0)
    return make_strong(family("xformer")["Model"](config).double().eval(), amount=0.4)


def sinusoid(distance, width):
    angles = [distance * 10000 ** (-2 * i / width) for i in range(width // 2)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)


def by_loops(query, key, value, u, v, heads, scale=1.0):
    """[T, D] each -> what heads side by side read, [T, D]."""
    length, width = query.shape[0], query.shape[1] // heads
    output = torch.zeros_like(value)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        for t in range(length):
            q, scores = query[t, part], []
            for s in range(length):
                r = sinusoid(t - s, width)
                k = key[s, part]
                scores.append(scale * (q @ k + q @ r + u[head] @ k + v[head] @ r))
            weights = torch.stack(scores).softmax(0)
            output[t, part] = sum(weight * value[s, part] for s, weight in enumerate(weights))
    return output


def attended(attention, states):
    """What the attention of a model makes of states [B, T, D] that come as they are."""
    built = model()
    context = built.trunk.make_context(states)
    attention.prepare(context, None)
    return attention(states, context).output


@pytest.mark.parametrize("spec", [{}, {"scale": 0.4}])
def test_equation(spec):
    built = model(spec)
    attention = built.trunk.layers[0].attention
    assert attention.k_proj is None and attention.o_proj is None and attention.r_proj is None
    states = torch.randn(1, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    biases = (attention.content_bias, attention.position_bias)
    query, value = attention.q_proj(states)[0], attention.v_proj(states)[0]
    expected = by_loops(query, states[0], value, *biases, heads=2, scale=spec.get("scale", 1.0))
    close(attended(attention, states)[0], expected)
    ids = tokens(2, 9, high=60)
    fast = built(ids).last_hidden_state
    built.config._attn_implementation = "eager"
    close(built(ids).last_hidden_state, fast)


def test_heads_of_another_width():
    assert model({"key_projection": True, "output_projection": True}, head_dim=4, num_key_value_heads=1)


def test_character_encoder():
    """A word's vector by the equations, whatever padding follows it, and whoever stands beside it."""
    torch.manual_seed(1)
    encoder = make_strong(CharacterEncoder(12, 2, 10, 0.0, 1e-5).double().eval(), amount=0.4)
    word = torch.tensor([7, 9, 9, 30])
    states = encoder.characters(word)
    biases = (encoder.content_bias, encoder.position_bias)
    read = by_loops(encoder.q_proj(states), states, encoder.v_proj(states), *biases, heads=2)
    states = encoder.attention_norm(states + read)
    states = encoder.feedforward_norm(states + encoder.down_proj(torch.relu(encoder.up_proj(states))))
    expected = states.max(0).values
    close(encoder(word[None])[0], expected)
    padded = torch.zeros(2, 3, 9, dtype=torch.long)
    padded[..., 0] = 1
    padded[1, 2, :4] = word
    close(encoder(padded)[1, 2], expected)


def test_characters_beside_words():
    built = model(embedding="word_characters")
    ids = tokens(1, 4, high=60)
    spelt = torch.randint(2, 258, (1, 4, 5), generator=torch.Generator().manual_seed(0))
    one, other = spelt.clone(), spelt.clone()
    other[0, 2, 1] = (other[0, 2, 1] + 1) % 200 + 2
    outputs = [built.trunk.embedding(built.trunk.embedding.lookup(ids), None, None, built.trunk.position,
                                     character_ids=c)[0] for c in (one, other)]  # fmt: skip
    changed = (outputs[0] - outputs[1]).abs().amax(-1) > 0
    assert changed.tolist() == [False, False, True, False]
    with pytest.raises(ValueError, match=r"\[batch, length, characters\]"):
        built(ids, character_ids=spelt[:, :3])
    apart = torch.tensor([0, 0, 0, *range(1, ids.shape[1])])  # padding between tokens
    real = torch.tensor([[1, 0, 0, *[1] * (ids.shape[1] - 1)]])
    found = built(ids[:, apart], attention_mask=real, character_ids=spelt[:, apart]).last_hidden_state
    close(found[real == 1], built(ids, character_ids=spelt).last_hidden_state[0])
    absent = built(ids).last_hidden_state
    mark = torch.zeros(1, 4, 3, dtype=torch.long)  # a token that is all padding counts as one that is not spelt
    close(built(ids, character_ids=mark).last_hidden_state, absent)


def test_words_and_characters_weigh_alike_at_the_start():
    """The characters' reading, which a norm has brought to 1, does not drown the words' vectors."""
    torch.manual_seed(0)
    fields = {"vocab_size": 200, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    embedding = family("tener")["Model"](config_class("tener")(**fields)).eval().trunk.embedding
    ids = torch.arange(5, 105)[None]
    spelt = torch.randint(2, 258, (1, 100, 6))
    with torch.no_grad():
        tokens = embedding.lookup(ids)
        join, half = embedding.join, tokens.shape[-1]
        by_words = tokens @ join.weight[:, :half].T
        by_characters = embedding.character_encoder(spelt) @ join.weight[:, half:].T
    assert 1 / 3 < float(by_words.std() / by_characters.std()) < 3

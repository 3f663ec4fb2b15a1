"""Complex embeddings and attention against torch's complex numbers."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerModel
from tests.attention.score_helpers import (
    HEADS,
    WIDTH,
    allowed_pairs,
    build_layers,
    make_context,
    run_layers,
    small_blocks,
    softmax_by_rows,
    vectors,
)
from tests.helpers import close, make_strong, tokens

SLOTS = {
    "embedding": "complex_order",
    "position": "none",
    "attention": "complex_order",
    "normalization": "complex_parts",
    "feedforward": "complex_parts",
}
SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
FIELDS = {**SIZES, **SLOTS, "tie_word_embeddings": False}


def as_complex(states):
    real, imaginary = states.chunk(2, dim=-1)
    return torch.complex(real, imaginary)


def model():
    torch.manual_seed(0)
    return make_strong(XFormerModel(XFormerConfig(**FIELDS)).double().eval(), amount=0.3)


def test_embedding():
    embedding = model().trunk.embedding
    ids, positions = tokens(2, 7, high=50), torch.arange(3, 10)[None]
    amplitude, frequency = embedding.tokens(ids).chunk(2, dim=-1)
    found = as_complex(embedding(embedding.lookup(ids), None, positions, None))
    close(found.real, (amplitude * torch.exp(1j * frequency * positions[..., None])).real)
    close(found.imag, (amplitude * torch.exp(1j * frequency * positions[..., None])).imag)
    close(found.abs(), amplitude.abs().expand_as(found.real))
    later = as_complex(embedding(embedding.lookup(ids), None, positions + 5, None))
    close(later.real, (found * torch.exp(1j * frequency * 5)).real)


def test_start():
    torch.manual_seed(0)
    table = XFormerModel(XFormerConfig(**FIELDS)).trunk.embedding.tokens.weight
    expected = torch.tensor([10000.0 ** (-2 * (c // 2) / 8) for c in range(8)])
    close(table[:, 8:], expected.expand(50, -1), 1e-6)
    assert 0.015 < table[:, :8].std() < 0.025


def by_hand(layer, states, memory, product, allowed):
    """In complex128, head by head."""
    d = WIDTH // HEADS // 2

    def heads(projection, x):
        z = as_complex(x)
        bias = torch.complex(projection.bias, projection.bias)
        return (z @ projection.weight.t().to(z.dtype) + bias).view(*x.shape[:2], HEADS, d).transpose(1, 2)

    query, key, value = heads(layer.q_proj, states), heads(layer.k_proj, memory), heads(layer.v_proj, memory)
    scores = (query @ (key if product == "bilinear" else key.conj()).transpose(-1, -2)).abs() / d**0.5
    mixed = (softmax_by_rows(scores, allowed).to(value.dtype) @ value).transpose(1, 2).flatten(2)
    output = mixed @ layer.o_proj.weight.t().to(mixed.dtype) + torch.complex(layer.o_proj.bias, layer.o_proj.bias)
    return torch.cat([output.real, output.imag], dim=-1)


@pytest.mark.parametrize("product", ["bilinear", "hermitian"])
@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_attention(product, kind):
    cross, causal = kind == "cross", kind == "decoder"
    (layer,) = build_layers({"type": "complex_order", "product": product}, causal=causal, cross=cross)
    states = vectors(2, 7)
    memory = vectors(2, 5, seed=4) if cross else states
    allowed = torch.ones(1, 1, 7, 5).bool() if cross else allowed_pairs(7, causal)
    want = by_hand(layer, states, memory, product, allowed)
    probe = vectors(2, 7, seed=9)
    slopes = torch.autograd.grad((want * probe).sum(), list(layer.parameters()))
    for implementation, rows in (("eager", 64), ("sdpa", 64), ("sdpa", 2)):
        context = make_context(7, causal, implementation=implementation)
        with small_blocks(rows):
            (result,) = run_layers([layer], states, context, memory=memory if cross else None)
            close(result.output, want, 1e-8)
            found = torch.autograd.grad((result.output * probe).sum(), list(layer.parameters()))
        for one, other in zip(found, slopes, strict=True):
            close(one, other, 1e-7)


def test_common_frequency_hermitian_depends_on_distance():
    """Oracle of the survey's ledger: with the key conjugated and one frequency for all words, a shift changes no score."""
    torch.manual_seed(0)
    (layer,) = build_layers({"type": "complex_order", "product": "hermitian", "bias": False})
    amplitude = vectors(1, 6)[..., : WIDTH // 2]
    frequency = 0.37

    def weights(shift):
        z = amplitude * torch.exp(1j * frequency * (torch.arange(6).double() + shift))[None, :, None]
        states = torch.cat([z.real, z.imag], dim=-1)
        return run_layers([layer], states, make_context(6, implementation="eager"))[0].weights

    close(weights(0), weights(11), 1e-8)


def test_without_frequencies_it_is_real_and_blind_to_order():
    made = model()
    with torch.no_grad():
        made.trunk.embedding.tokens.weight[:, 8:] = 0.0
    ids = tokens(1, 6, high=50)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    with torch.no_grad():
        close(made(ids[:, order]).last_hidden_state, made(ids).last_hidden_state[:, order])


def test_norm_and_feedforward_act_on_parts():
    layer = model().trunk.layers[0]
    states = vectors(2, 3)
    halves = states.chunk(2, dim=-1)
    norm = layer.attention_residual.norm
    close(norm(states), torch.cat([norm.norm(half) for half in halves], dim=-1))
    inner = layer.feedforward.inner
    expected = [inner.down_proj(torch.relu(inner.up_proj(half))) for half in halves]
    close(layer.feedforward(states, None).output, torch.cat(expected, dim=-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings=False"),
        ({"position": "rotary", "attention": "dense"}, "position 'none'"),
        ({"type_vocab_size": 2}, "no token types"),
        ({"feedforward": {"type": "complex_parts", "inner": "complex_parts"}}, "dense feed-forward"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        XFormerConfig(**{**FIELDS, **change})


def test_resizing():
    """More words: the old ones keep amplitudes, frequencies and logits."""
    torch.manual_seed(0)
    made = XFormerForCausalLM(XFormerConfig(**FIELDS)).eval()
    ids = tokens(2, 6, high=50)
    with torch.no_grad():
        before = made(ids).logits
        made.resize_token_embeddings(60, mean_resizing=False)
        after = made(ids).logits
    assert after.shape[-1] == 60
    close(after[..., :50], before, 1e-6)


def test_loading_keeps_the_table(tmp_path):
    torch.manual_seed(0)
    made = make_strong(XFormerForCausalLM(XFormerConfig(**FIELDS)).eval())
    made.save_pretrained(tmp_path)
    loaded = XFormerForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.get_input_embeddings().weight, made.get_input_embeddings().weight)

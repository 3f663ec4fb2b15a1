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

    def linear(name, z):
        """z W + c in complex numbers; the modules' biases a and b make c = (a + i a) + i (b + i b)."""
        real, imaginary = getattr(layer, f"{name}_proj"), getattr(layer, f"{name}_imaginary", None)
        weight, bias = real.weight.to(z.dtype), real.bias * (1 + 1j)
        if imaginary is not None:
            weight, bias = weight + 1j * imaginary.weight, bias + 1j * (1 + 1j) * imaginary.bias
        return z @ weight.t() + bias

    def heads(name, x):
        return linear(name, as_complex(x)).view(*x.shape[:2], HEADS, d).transpose(1, 2)

    query, key, value = heads("q", states), heads("k", memory), heads("v", memory)
    scores = (query @ (key if product == "bilinear" else key.conj()).transpose(-1, -2)).abs() / d**0.5
    mixed = (softmax_by_rows(scores, allowed).to(value.dtype) @ value).transpose(1, 2).flatten(2)
    output = linear("o", mixed)
    return torch.cat([output.real, output.imag], dim=-1)


@pytest.mark.parametrize("weights", ["shared_real", "full"])
@pytest.mark.parametrize("product", ["bilinear", "hermitian"])
@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_attention(product, kind, weights):
    cross, causal = kind == "cross", kind == "decoder"
    spec = {"type": "complex_order", "product": product, "weights": weights}
    (layer,) = build_layers(spec, causal=causal, cross=cross)
    assert weights == "shared_real" or layer.q_imaginary.weight.abs().max() > 0.01
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


def test_complex_weights_start_as_real_ones(tmp_path):
    """The imaginary ones at 0; they learn, and are saved."""
    torch.manual_seed(0)
    spec = {"type": "complex_order", "weights": "full"}
    made = XFormerForCausalLM(XFormerConfig(**{**FIELDS, "attention": spec}, is_decoder=True)).double().eval()
    simple = XFormerForCausalLM(XFormerConfig(**FIELDS, is_decoder=True)).double().eval()
    missing = simple.load_state_dict(made.state_dict(), strict=False)
    assert not missing.missing_keys and len(missing.unexpected_keys) == 16  # weight and bias of 4 maps in 2 layers
    ids = tokens(2, 7, high=50)
    close(made(ids).logits, simple(ids).logits, 1e-12)
    made(ids, labels=ids).loss.backward()
    slopes = {name: p.grad for name, p in made.named_parameters() if "_imaginary.weight" in name}
    assert len(slopes) == 8 and all(slope.abs().max() > 0 for slope in slopes.values())
    make_strong(made, amount=0.3)
    made.save_pretrained(tmp_path)
    again = XFormerForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    close(again(ids).logits, made(ids).logits, 1e-12)
    past = made(ids[:, :4], use_cache=True)
    rest = made(ids[:, 4:], past_key_values=past.past_key_values).logits
    close(torch.cat([past.logits, rest], 1), made(ids).logits, 1e-10)


def test_norm_and_feedforward_act_on_parts():
    layer = model().trunk.layers[0]
    states = vectors(2, 3)
    halves = states.chunk(2, dim=-1)
    norm = layer.attention_residual.norm
    close(norm(states), torch.cat([norm.norm(half) for half in halves], dim=-1))
    inner = layer.feedforward.inner
    expected = [inner.down_proj(torch.relu(inner.up_proj(half))) for half in halves]
    close(layer.feedforward(states, None).output, torch.cat(expected, dim=-1))


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

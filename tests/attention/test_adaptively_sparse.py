"""Adaptively sparse attention against alpha-entmax of the written-out scores, and its limit, softmax attention."""

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.ops import entmax_attention
from hf_xformers.position.t5_relative_bias import T5RelativeBias, T5RelativeBiasSpec
from hf_xformers.variants import family
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    PADDING,
    WIDTH,
    allowed_pairs,
    build_layers,
    make_context,
    run_layers,
    saved_sizes,
    small_blocks,
    split_heads,
    vectors,
)
from tests.helpers import close

D = WIDTH // HEADS
SPECS = {
    "learned": "adaptively_sparse",
    "shared": {"type": "adaptively_sparse", "share_alpha": True},
    "bounded": {"type": "adaptively_sparse", "alpha_min": 1.5},
    **{f"alpha {a}": {"type": "adaptively_sparse", "alpha": a} for a in (1, 1.3, 1.5, 2)},
}
each_path = pytest.mark.parametrize("implementation", ["eager", "sdpa", "tiles"], indirect=True)


@pytest.fixture
def implementation(request, monkeypatch):
    """The literal path; blocks of queries, which short texts take; or tiles of heads, however short the text."""
    if request.param != "tiles":
        return request.param
    monkeypatch.setattr(entmax_attention, "WORTH_A_TILE", 0)
    monkeypatch.setattr(entmax_attention, "LEAST_ROWS", 1)
    return "sdpa"


def weights_of(scores, allowed, alpha):
    """Row by row, by bisection for tau in sum_j [(alpha - 1) s_j - tau]_+^(1 / (alpha - 1)) = 1."""
    found = torch.zeros(scores.shape, dtype=torch.float64)
    allowed = allowed.expand(scores.shape)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in scores.shape[:-1])).tolist():
        seen, a = allowed[tuple(place)], float(alpha[place[1] % len(alpha)])
        if not seen.any():
            continue
        row = scores[tuple(place)][seen]
        if a == 1:
            found[(*place, seen)] = torch.softmax(row, -1)
            continue
        low, high = float((a - 1) * row.max()) - 1, float((a - 1) * row.max())
        for _ in range(70):
            middle = (low + high) / 2
            total = sum(max((a - 1) * s - middle, 0.0) ** (1 / (a - 1)) for s in row.tolist())
            low, high = (middle, high) if total >= 1 else (low, middle)
        found[(*place, seen)] = torch.tensor(
            [max((a - 1) * s - low, 0.0) ** (1 / (a - 1)) for s in row.tolist()], dtype=torch.float64
        )
    return found


@torch.no_grad()
def by_hand(layer, states, allowed, memory=None, bias=0.0):
    read = states if memory is None else memory
    q, k, v = (split_heads(p(x), D) for p, x in ((layer.q_proj, states), (layer.k_proj, read), (layer.v_proj, read)))
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    spec = layer.spec
    alpha = [spec.alpha] if spec.alpha else (1 + torch.sigmoid(layer.shape)).clamp(min=spec.alpha_min).tolist()
    weights = weights_of(q @ k.mT / D**0.5 + bias, allowed, alpha)
    return layer.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights


@each_path
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_equation(name, implementation, causal):
    (layer,) = build_layers(SPECS[name], causal=causal, num_key_value_heads=2, strong=0.8)
    states = vectors(4, 6)
    for mask in (None, PADDING):
        with small_blocks():
            context = make_context(6, causal, padding_mask=mask, implementation=implementation)
            (result,) = run_layers([layer], states, context)
        output, weights = by_hand(layer, states, allowed_pairs(6, causal, mask))
        close(result.output.detach(), output, 1e-9)
        if implementation == "eager":
            close(result.weights.detach(), weights, 1e-9)
    if name in ("learned", "alpha 1.5", "alpha 2"):
        assert ((weights == 0) & allowed_pairs(6, causal, mask)).any()


@each_path
def test_cross_attention_and_bias(implementation):
    (layer,) = build_layers("adaptively_sparse", cross=True, is_encoder_decoder=True)
    states, memory = vectors(4, 4), vectors(4, 6, seed=1)
    context = make_context(4, memory_padding_mask=PADDING, implementation=implementation)
    found = run_layers([layer], states, context, memory)[0].output
    close(found.detach(), by_hand(layer, states, PADDING[:, None, None, :], memory)[0], 1e-9)
    position = T5RelativeBias(XFormerConfig(**GEOMETRY), T5RelativeBiasSpec(num_buckets=8, max_distance=10)).double()
    (layer,) = build_layers("adaptively_sparse")
    context = make_context(6, padding_mask=PADDING, implementation=implementation)
    context.shared["score_bias"] = position
    bias = position.block(context.query_index, context.key_index).detach()
    expected = by_hand(layer, states := vectors(4, 6), allowed_pairs(6, False, PADDING), bias=bias)[0]
    with small_blocks():
        close(run_layers([layer], states, context)[0].output.detach(), expected, 1e-9)


@pytest.mark.parametrize("implementation", ["sdpa", "tiles"], indirect=True)
@pytest.mark.parametrize("name", ["learned", "shared", "alpha 1.5", "alpha 2"])
def test_gradients(name, implementation):
    """Those of the fast paths are those of the literal one, alpha's included."""
    (layer,) = build_layers(SPECS[name], causal=True, strong=0.8)
    found = []
    for path in ("eager", implementation):
        layer.zero_grad()
        states = vectors(4, 6).requires_grad_()
        context = make_context(6, True, padding_mask=PADDING, implementation=path)
        with small_blocks():
            run_layers([layer], states, context)[0].output[PADDING].square().sum().backward()
        found.append({"states": states.grad} | {key: value.grad.clone() for key, value in layer.named_parameters()})
    for key, value in found[0].items():
        close(found[1][key], value, 1e-8)
        assert value.isfinite().all()
    assert name not in ("learned", "shared") or found[1]["shape"].all()


def test_softmax_is_the_limit():
    (layer,), (dense,) = build_layers({"type": "adaptively_sparse", "alpha": 1}), build_layers("dense")
    dense.load_state_dict(layer.state_dict())
    states, context = vectors(4, 6), {"padding_mask": PADDING}
    close(*(run_layers([one], states, make_context(6, **context))[0].output for one in (layer, dense)))
    (near,) = build_layers("adaptively_sparse")
    near.load_state_dict({**layer.state_dict(), "shape": torch.full((HEADS,), -40.0)})  # held at `alpha_min`
    outputs = [run_layers([one], states, make_context(6, **context))[0].output for one in (near, dense)]
    close(*outputs, 3e-2)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-5


def test_alphas_of_each_head_and_layer():
    """Drawn as N(0, 1), apart for each kind of attention; as many as heads, or one; none where alpha is given."""
    for name, count in (("learned", HEADS), ("shared", 1), ("alpha 1.5", 0)):
        (layer,) = build_layers(SPECS[name])
        assert sum(p.numel() for key, p in layer.named_parameters() if "proj" not in key) == count
    fields = {**GEOMETRY, "num_attention_heads": 16, "is_encoder_decoder": True}
    model_class = family("xf_adaptively_sparse_transformer")["ForSeq2SeqLM"]
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**fields))
    drawn = torch.stack([p for name, p in model.named_parameters() if name.endswith("attention.shape")])
    assert drawn.shape == (9, 16) and 0.8 < drawn.std() < 1.2 and len(drawn.flatten().unique()) == drawn.numel()


def test_what_is_kept():
    """Nothing in proportion to T x T."""
    kept = []
    for length in (512, 1024):
        (layer,) = build_layers("adaptively_sparse", causal=True)
        kept.append(sum(saved_sizes(lambda: run_layers([layer], vectors(1, length), make_context(length, True)))))
    assert kept[1] < 2.3 * kept[0]


def test_refusals():
    for fields, message in (
        ({"alpha_min": 1.0}, "`alpha_min` from 1.001 to 2, got 1.0; an alpha of 1 has no derivative"),
        ({"alpha": 1.5, "share_alpha": True}, "learns none to share; leave `share_alpha` out"),
    ):
        with pytest.raises(ValueError, match=message):
            XFormerConfig(**GEOMETRY, attention={"type": "adaptively_sparse", **fields})

"""The Gaussian prior: by a loop over pairs, in its limits, as further columns of queries and keys, and what is
refused."""

import math

import pytest
import torch
from torch.nn import functional as F

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.core.weight_decay import declared_undecayed
from hf_xformers.variants import config_class
from tests.attention.score_helpers import GEOMETRY, HEADS, vectors
from tests.helpers import close
from tests.position.term_helpers import D_HEAD, build, check_scores, projected, run

LEFT = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1, 1]]).bool()


def softplus(number):
    return math.log1p(math.exp(-abs(number))) + max(number, 0.0)


def numbers(layer, name):
    """[H] numbers, by the definition of softplus."""
    raw = getattr(layer.position_terms, name).detach().tolist()
    return [softplus(x) for x in raw * (HEADS // len(raw))]


def set_raw(layer, name, values):
    with torch.no_grad():
        getattr(layer.position_terms, name).copy_(torch.tensor(values, dtype=torch.float64))


@pytest.mark.parametrize("mask", [None, LEFT, LEFT.flip(-1)], ids=["whole", "left", "right"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fields", [{}, {"offset": False}, {"per_head": False}], ids=str)
def test_by_the_formula(causal, fields, mask):
    """-|w d^2 + b| for every pair; gradients of w and b, too, through an equation of tensors."""

    def scores(layer, module, query, key):
        terms = layer.position_terms
        w = F.softplus(terms.raw_scale).expand(HEADS)
        b = torch.zeros(HEADS).double() if terms.raw_offset is None else -F.softplus(terms.raw_offset).expand(HEADS)
        rows = [
            torch.stack([torch.stack([-(w[h] * (i - j) ** 2 + b[h]).abs() for j in range(9)]) for i in range(9)])
            for h in range(HEADS)
        ]
        return query @ key.mT / D_HEAD**0.5 + torch.stack(rows)

    check_scores({"type": "gaussian_transformer", **fields}, scores, causal, mask=mask)


def test_form_of_the_prior():
    """The same along diagonals; |b| at the token itself; zero, the largest, in a ring around it."""
    layer, _, _ = build("gaussian_transformer")
    inverse = lambda x: math.log(math.expm1(x))  # noqa: E731
    set_raw(layer, "raw_scale", [inverse(x) for x in (0.1, 0.5, 1.0, 0.02)])
    set_raw(layer, "raw_offset", [inverse(x) for x in (2.5, 0.5, 4.0, 0.01)])
    found = layer.position_terms.by_distance(torch.arange(-9, 10)).detach()
    close(found, found.flip(-1))
    close(found[:, 9], -torch.tensor([2.5, 0.5, 4.0, 0.01]).double())
    assert found[0].argmax() in (4, 14) and abs(found[0, 4]) < 1e-9  # sqrt(2.5 / 0.1) = 5
    assert found[1].argmax() in (8, 10) and found[2].argmax() in (7, 11)  # 1 and 2
    assert found[3].argmax() == 9  # |b| <= w / 2: nobody is preferred to the token itself


def test_limits():
    states = vectors(2, 9)
    plain, none, _ = build("none")
    layer, module, _ = build("gaussian_transformer")
    plain.load_state_dict(layer.state_dict(), strict=False)
    for name in ("raw_scale", "raw_offset"):
        set_raw(layer, name, [-60.0] * HEADS)
    close(run(layer, module, states)[0], run(plain, none, states)[0])
    set_raw(layer, "raw_scale", [500.0] * HEADS)  # nobody but the token itself
    close(run(layer, module, states)[0], layer.o_proj(layer.v_proj(states)))


@pytest.mark.parametrize("causal", [False, True])
def test_without_offset_it_is_two_further_columns(causal):
    """-w (i - j)^2 = -w j^2 + 2 w i j and a number of the row, which a softmax does not see."""
    layer, module, _ = build({"type": "gaussian_transformer", "offset": False}, causal)
    states, place = vectors(2, 9), torch.arange(9).double()
    query, key, value = projected(layer, states)
    w = torch.tensor(numbers(layer, "raw_scale"), dtype=torch.float64)[:, None]
    of_queries = torch.stack((-w.expand(-1, 9), 2 * w * place), dim=-1).expand(2, -1, -1, -1)
    of_keys = torch.stack((place**2, place), dim=-1).expand(2, HEADS, -1, -1)
    query, key = torch.cat((query / D_HEAD**0.5, of_queries), -1), torch.cat((key, of_keys), -1)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=1.0)
    close(run(layer, module, states, causal)[0], layer.o_proj(mixed.transpose(1, 2).flatten(2)))


def test_numbers_stay_in_single_precision():
    """In bfloat16 neither 1 / 4096 times a square nor a square beyond 256 could be told from its neighbours."""
    config = XFormerConfig(**{**GEOMETRY, "max_position_embeddings": 4096, "position": "gaussian_transformer"})
    model = XFormerForCausalLM(config).to(torch.bfloat16)
    terms = model.model.trunk.layers[0].attention.position_terms
    assert terms.raw_scale.dtype == terms.raw_offset.dtype == torch.float32
    line = terms.by_distance(torch.arange(5000))
    assert line.dtype == torch.float32 and (line[:, 1:].diff(dim=-1) < 0).all() and line.isfinite().all()
    assert {name.rpartition(".")[2] for name in declared_undecayed(model)} >= {"raw_scale", "raw_offset"}


@pytest.mark.parametrize("length", [128, 512, 2048, 4096])
def test_start(length):
    """By default a head starts to lose 1 at a distance of the root of the longest text, and far tokens stay finite."""
    config = config_class("xf_gaussian_transformer")(max_position_embeddings=length, is_decoder=True)
    terms = config.position.build_terms(config, layer_idx=0)
    from transformers import initialization as init

    terms.initialize(config, init)
    line = terms.by_distance(torch.tensor([0, 1, round(length**0.5), length - 1]))
    expected = torch.tensor([-0.5 / length, -0.5 / length, -1.0, -float(length)])
    torch.testing.assert_close(line, expected.expand(12, -1), rtol=0.06, atol=1e-6)


def test_cross_attention_has_none():
    config = XFormerConfig(**{**GEOMETRY, "position": "gaussian_transformer", "is_encoder_decoder": True})
    cross = config.tower("decoder").cross_attention.build(config.tower("decoder"), layer_idx=0, cross=True)
    assert cross.position_terms is None

"""The Gaussian prior: by a loop over pairs, in half precision, and at its start."""

import pytest
import torch
from torch.nn import functional as F

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.core.weight_decay import declared_undecayed
from hf_xformers.variants import config_class
from tests.attention.score_helpers import GEOMETRY, HEADS
from tests.position.term_helpers import D_HEAD, check_scores

LEFT = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1, 1]]).bool()


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

"""T5's bias: buckets as transformers has them, and in a model by a loop over the formula."""

import math

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForSeq2SeqLM, XFormerModel
from hf_xformers.position.t5_relative_bias import relative_buckets
from tests.helpers import close, make_strong, tokens


def bucket(distance, bidirectional, buckets, far):
    """Raffel et al. 2020, section 2.1, and its released code: one distance (key - query) at a time."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
        steps = abs(distance)
    else:
        steps = max(-distance, 0)
    exact = buckets // 2
    if steps < exact:
        return first + steps
    share = math.log(steps / exact) / math.log(far / exact)
    return first + min(exact + int(share * (buckets - exact) + 1e-9), buckets - 1)


def test_same_as_transformers():
    """The buckets that T5 checkpoints were trained with, rounding included."""
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-1000, 1001)
    for bidirectional in (True, False):
        for buckets, far in ((32, 128), (8, 20), (16, 64), (6, 100)):
            theirs = T5Attention._relative_position_bucket(distances, bidirectional, buckets, far)
            ours = relative_buckets(distances, bidirectional=bidirectional, num_buckets=buckets, max_distance=far)
            assert torch.equal(ours, theirs)


GEOMETRY = dict(
    vocab_size=40,
    hidden_size=16,
    num_attention_heads=2,
    num_hidden_layers=2,
    intermediate_size=16,
    position={"type": "t5_relative_bias", "num_buckets": 8, "max_distance": 10},
)


def build(model_class, **fields):
    torch.manual_seed(0)
    return make_strong(model_class(XFormerConfig(**{**GEOMETRY, **fields})).double().eval(), amount=0.3)


@pytest.mark.parametrize("model_class", [XFormerModel, XFormerForCausalLM])
def test_block(model_class):
    """The bias of any block of pairs, at any offset, is read from one table per tower."""
    position = build(model_class).base_model
    position = getattr(position, "model", position).trunk.position
    causal = model_class is XFormerForCausalLM
    rows, columns = torch.tensor([4, 9, 0]), torch.tensor([2, 4, 30, 7])
    matrix = position.block(rows, columns)
    assert matrix.shape == (2, 3, 4)
    for h in range(2):
        for i, row in enumerate(rows.tolist()):
            for j, column in enumerate(columns.tolist()):
                place = bucket(column - row, not causal, 8, 10)
                assert matrix[h, i, j] == position.table.weight[place, h]


def test_towers_have_their_own_tables():
    """One direction in the decoder, two in the encoder, none in cross-attention."""
    model = build(XFormerForSeq2SeqLM)
    names = [name for name, _ in model.named_parameters() if "position" in name]
    assert names == ["model.trunk.position.table.weight", "model.decoder.position.table.weight"]
    assert model.model.trunk.position.bidirectional and not model.model.decoder.position.bidirectional
    ids, target = tokens(1, 6, high=40), tokens(1, 4, seed=1, high=40)
    with torch.no_grad():
        before = model(ids, decoder_input_ids=target, output_attentions=True)
        model.model.decoder.position.table.weight.normal_()
        after = model(ids, decoder_input_ids=target, output_attentions=True)
    close(after.cross_attentions[0].sum(-1), torch.ones_like(after.cross_attentions[0].sum(-1)))
    assert (before.decoder_attentions[0] - after.decoder_attentions[0]).abs().max() > 1e-3


def test_odd_buckets_in_a_decoder():
    XFormerConfig(position={"type": "t5_relative_bias", "num_buckets": 7}, is_decoder=True)

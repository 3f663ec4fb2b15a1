"""Learned positions: the rows that are read, the limit of the table, padding on the left."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM, XFormerForSeq2SeqLM, XFormerModel
from tests.helpers import close, make_strong, tokens

LIMIT = 8
GEOMETRY = dict(
    vocab_size=40,
    hidden_size=16,
    num_attention_heads=2,
    num_hidden_layers=1,
    intermediate_size=16,
    max_position_embeddings=LIMIT,
)


def build(model_class, **fields):
    torch.manual_seed(0)
    return make_strong(model_class(XFormerConfig(**GEOMETRY, **fields)).double().eval())


def test_rows_are_added():
    for offset in (0, 2):
        spec = {"type": "learned_absolute", "offset": offset}
        model = build(XFormerModel, position=spec).eval()
        table = model.trunk.position.table.weight
        assert table.shape == (LIMIT + offset, 16)
        ids = tokens(2, 5, high=40)
        hidden = model.trunk.embedding(
            model.trunk.embedding.lookup(ids), None, torch.arange(5)[None], model.trunk.position
        )
        close(hidden, model.get_input_embeddings()(ids) + table[offset : offset + 5])


def test_positions_count_real_tokens():
    """Left padding moves nothing: the first real token stands at position 0."""
    model = build(XFormerForMaskedLM)
    ids = tokens(1, 5, high=40)
    padded = torch.cat([tokens(1, 3, seed=4, high=40), ids], 1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        close(model(padded, attention_mask=mask).logits[:, 3:], model(ids).logits)
        explicit = model(padded, attention_mask=mask, position_ids=torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4]])).logits
        close(explicit[:, 3:], model(ids).logits)


@pytest.mark.parametrize("model_class", [XFormerForMaskedLM, XFormerForCausalLM])
def test_too_long(model_class):
    """One token too many is a ValueError that says what to do; as many as there are rows is fine."""
    model = build(model_class)
    model(tokens(1, LIMIT, high=40))
    with pytest.raises(ValueError, match=r"9 tokens.*'learned_absolute'.*covers 8 \(`max_position_embeddings`\)"):
        model(tokens(1, LIMIT + 1, high=40))
    with pytest.raises(ValueError, match="9 tokens"):
        model(tokens(1, 2, high=40), position_ids=torch.tensor([[0, LIMIT]]))


def test_too_long_with_a_cache():
    model = build(XFormerForCausalLM)
    cache = model(tokens(1, LIMIT, high=40), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="9 tokens"):
        model(tokens(1, 1, high=40), past_key_values=cache)


def test_too_long_on_either_side():
    model = build(XFormerForSeq2SeqLM)
    short, long = tokens(1, 3, high=40), tokens(1, LIMIT + 1, high=40)
    for sides in ((long, short), (short, long)):
        with pytest.raises(ValueError, match="9 tokens"):
            model(input_ids=sides[0], decoder_input_ids=sides[1])


def test_padding_may_exceed_the_table():
    """What counts are the real tokens, not the width of the batch."""
    model = build(XFormerForMaskedLM)
    ids = tokens(1, 4, high=40)
    wide = torch.cat([ids, torch.zeros(1, 10, dtype=torch.long)], 1)
    mask = torch.tensor([[1] * 4 + [0] * 10])
    with torch.no_grad():
        close(model(wide, attention_mask=mask).logits[:, :4], model(ids).logits)
        wide, mask = wide.roll(10, 1), mask.roll(10, 1)
        close(model(wide, attention_mask=mask).logits[:, 10:], model(ids).logits)

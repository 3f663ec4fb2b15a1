"""What a mechanism says of its weights, `AttentionSpec.weighs`, with each value of each of its fields."""

import dataclasses
import typing

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerModel
from hf_xformers.core.components import SLOTS, names
from tests.helpers import close, make_strong, pad, tiny_fields, tokens


def choices(field):
    """Values of a field that is one of a few words or a switch; none of a number."""
    if field.type is bool:
        return [not field.default]
    return [value for value in typing.get_args(field.type) if isinstance(value, str) and value != field.default]


def variants(name):
    fields = [field for field in dataclasses.fields(SLOTS["attention"].get(name)) if field.name != "type"]
    return [{}, *({field.name: value} for field in fields for value in choices(field))]


@pytest.mark.parametrize("name", names("attention"))
def test_weights_sum_to_one(name):
    """Not negative, and 1 in all over what a query sees, if it says so."""
    ids, mask = pad([tokens(13), tokens(6, seed=1)], 13, "right")
    for shape in ("encoder", "decoder"):
        for given in variants(name):
            torch.manual_seed(0)
            fields = tiny_fields(XFormerConfig, shape, attention={"type": name, **given})
            try:
                model = XFormerModel(XFormerConfig(**fields, attn_implementation="eager")).double().eval()
            except ValueError:  # it needs other company
                continue
            layer = model.config.layer(0)
            if layer.attention.weighs(layer):
                with torch.no_grad():
                    found = make_strong(model)(ids, attention_mask=mask, output_attentions=True).attentions[0]
                rows = found.transpose(1, 2)[mask.bool()]
                assert (rows >= 0).all(), given
                close(rows.sum(-1), torch.ones_like(rows[..., 0]))

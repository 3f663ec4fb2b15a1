"""One field of a config at a time: a model of transformers with another value there is followed, or refused. A field
of many families is tried in two; `test_architectures.py` shows of all that its value comes back."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from transformers import PreTrainedConfig

from hf_xformers.conversion import from_transformers, lookup, to_transformers
from tests.conversion.architectures import LENGTH, architectures
from tests.conversion.test_architectures import assert_same
from tests.conversion.test_configs import another

FAMILIES = (
    *("gemma", "granite", "cohere", "cohere2", "olmo3", "smollm3", "stablelm", "phi", "starcoder2"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "diffllama"),
    *("qwen3_next", "qwen3_5_text", "olmo_hybrid", "kimi_linear", "mamba2", "falcon_h1", "minimax"),
)
# Further fields that their models read, or that older files have.
KEYS = {
    "head_dim": 12,
    "partial_rotary_factor": 0.75,
    "rope_theta": 77.0,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "tie_word_embeddings": None,
    "is_decoder": True,
    "chunk_size_feed_forward": 2,
    "position_embedding_type": "relative_key",
    "pruned_heads": {0: [1]},
}
ENTRIES = {str(entry): entry for entry in architectures().values() if str(entry) in FAMILIES}


def all_changes(entry):
    """(field, another value of it) for every field."""
    start = entry.config()
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    for field in dataclasses.fields(type(start)):
        if field.name in inherited or field.name in ("use_cache", "vocab_size") or field.name.endswith("_token_id"):
            continue
        value = entry.other_values.get(field.name)
        value = another(field.name, getattr(start, field.name), str(field.type)) if value is None else value
        yield field.name, value
    for name, value in KEYS.items():
        yield name, value if name != "tie_word_embeddings" else not start.tie_word_embeddings


def of_two_families(fields):
    """Of each family, the fields that less than two before it have."""
    seen = collections.Counter()
    for name, own in fields.items():
        chosen = [field for field in own if seen[field] < 2]
        seen.update(chosen)
        yield name, {field: own[field] for field in chosen}


CHANGES = dict(of_two_families({name: dict(all_changes(ENTRIES[name])) for name in FAMILIES}))


@pytest.mark.parametrize("name", [name for name, fields in CHANGES.items() if fields])
def test_a_changed_field_is_followed_or_refused(name):
    entry, head = ENTRIES[name], ENTRIES[name].generating()
    given, fates, converter = entry.given(head, lengths=(LENGTH, LENGTH - 2, 1)), {}, lookup.converter_for(name)
    for field, value in CHANGES[name].items():
        try:
            model = entry.make(head, **{field: value})
            model(**given)
        except Exception:  # transformers itself cannot run it
            fates[field] = "no model"
            continue
        try:
            ours = from_transformers(model)
        except ValueError as error:
            fates[field] = "refused"
            assert field in str(error) or value in (12, 0.75), (field, error)
            continue
        assert_same(entry, model, ours, given)
        back = to_transformers(ours, model_type=name)
        assert not [
            key for key, tensor in back.state_dict().items() if not torch.equal(tensor, model.state_dict()[key])
        ]
        lost = getattr(back.config, field, None) != getattr(model.config, field, None)
        assert not lost or field in KEYS or field in (*converter.training_only, *converter.unread), field
        fates[field] = "followed"
    assert len(fates) < 9 or list(fates.values()).count("followed") > 0.6 * len(fates), fates

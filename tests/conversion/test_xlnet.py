"""XLNet's second stream, and its summaries of padded rows, on both sides."""

import pytest
import torch

from hf_xformers.conversion import from_transformers, to_transformers
from tests.conversion.architectures.xlnet import ARCHITECTURE
from tests.helpers import close

LENGTHS, LENGTH = (9, 6, 5), 9


def permuted(side):
    """Texts with an order each, and three targets late in it, which see tokens and are tokens themselves."""
    given = ARCHITECTURE.given("XLNetLMHeadModel", side, LENGTHS)
    real, generator = given["attention_mask"].bool(), torch.Generator().manual_seed(2)
    turn = torch.stack([torch.randperm(LENGTH, generator=generator) for _ in LENGTHS])
    rank = turn.argsort(-1)
    places = torch.stack([row[mask[row]][-3:] for row, mask in zip(turn, real, strict=True)])
    order = (rank[:, None, :] >= rank[:, :, None]).float()
    mapping = torch.nn.functional.one_hot(places, LENGTH).float()
    return given | {"perm_mask": order, "target_mapping": mapping, "labels": given["input_ids"].gather(1, places)}


@pytest.mark.parametrize("changes", [{}, {"clamp_len": 2, "n_head": 2, "tie_word_embeddings": False}], ids=str)
@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_two_streams(side, changes):
    theirs = ARCHITECTURE.make("XLNetLMHeadModel", **changes)
    ours = from_transformers(theirs)
    back = to_transformers(ours)
    assert type(back) is type(theirs)
    given = permuted(side)
    expected = theirs(**given)
    assert expected.logits.shape == (3, 3, theirs.config.vocab_size)
    for model in (ours, back):
        found = model(**given)
        close(found.logits, expected.logits, 1e-5)
        close(found.loss, expected.loss, 1e-5)
    bare, given = from_transformers(theirs.transformer), {k: v for k, v in given.items() if k != "labels"}
    close(bare(**given).last_hidden_state, theirs.transformer(**given).last_hidden_state, 1e-5)


@pytest.mark.parametrize(("kind", "side"), [("last", "left"), ("first", "right")])
@pytest.mark.parametrize("head", ["XLNetForSequenceClassification", "XLNetForMultipleChoice"])
@torch.no_grad()
def test_summaries_of_padded_rows(head, kind, side):
    theirs = ARCHITECTURE.make(head, summary_type=kind)
    ours = from_transformers(theirs)
    given = ARCHITECTURE.given(head, side)
    given["attention_mask"] = given["attention_mask"].sort(-1, descending=side == "right").values
    expected = theirs(**given).logits
    for model in (ours, to_transformers(ours)):
        close(model(**given).logits, expected, 1e-5)


def test_other_summaries_are_refused():
    for changes in ({"summary_type": "mean"}, {"summary_use_proj": False}):
        with pytest.raises(ValueError, match="summary"):
            from_transformers(ARCHITECTURE.make("XLNetForSequenceClassification", **changes))

"""Inputs and labels of a batch, entry by entry."""

import re
from pathlib import Path

import pytest
from hf_xformers.data import train_tokenizer
from hf_xformers.objectives import IGNORE_INDEX, build_objective

import own_module  # noqa: F401

CARD = Path(__file__).parent / "own_card"


def test_a_batch():
    tokenizer = train_tokenizer(["the quick brown fox jumps over the lazy dog"] * 5, kind="wordpiece", vocab_size=250)
    collator = build_objective({"type": "last_tokens", "fraction": 0.5}).collator(tokenizer)
    batch = collator([{"input_ids": [7, 8, 9, 10]}, {"input_ids": [11, 12]}])
    mask, none, pad = tokenizer.mask_token_id, IGNORE_INDEX, tokenizer.pad_token_id
    assert batch["input_ids"].tolist() == [[7, 8, mask, mask], [11, mask, pad, pad]]
    assert batch["labels"].tolist() == [[none, none, 9, 10], [none, 12, none, none]]


def test_a_share_that_cannot_be():
    with pytest.raises(ValueError, match="fraction"):
        build_objective({"type": "last_tokens", "fraction": 1.5})


def test_the_example_of_the_card():
    exec(re.search(r"```python\n(.*?)```", CARD.read_text(encoding="utf-8"), re.DOTALL)[1], {})

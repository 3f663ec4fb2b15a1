"""Words and their characters: encoding, padding, saving, and what is refused."""

import pytest
from transformers import AutoTokenizer

from hf_xformers.data.word_characters import NO_WORD, WordCharacterTokenizer, character_ids, train_word_tokenizer

TEXTS = ["a fine day", "a dull day", "a fine film"]


@pytest.fixture(scope="module")
def words():
    return train_word_tokenizer(TEXTS, max_characters=5)


def test_words_and_characters(words):
    assert words.convert_ids_to_tokens(range(5, len(words))) == ["a", "day", "fine", "dull", "film"]
    encoded = words("a strange day")
    assert words.convert_ids_to_tokens(encoded["input_ids"]) == ["[CLS]", "a", "[UNK]", "day", "[SEP]"]
    spelt = encoded["character_ids"]
    assert spelt[0] == spelt[-1] == [NO_WORD, 0, 0, 0, 0]
    assert spelt[2] == [2 + byte for byte in b"stran"] and spelt[1] == [2 + ord("a"), 0, 0, 0, 0]
    split = words(["a", "strange", "day"], is_split_into_words=True)
    assert split["character_ids"] == spelt and split["input_ids"] == encoded["input_ids"]
    pair = words("a day", "fine", return_tensors="pt")
    assert pair["character_ids"].shape == (1, 6, 5) and pair["character_ids"][0, 4, 0] == 2 + ord("f")
    assert character_ids("é", 4) == [2 + 0xC3, 2 + 0xA9, 0, 0]


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding(words, side):
    rows = [words("a"), words("a fine day")]
    batch = words.pad(rows, padding_side=side, return_tensors="pt")
    assert batch["character_ids"].shape == (2, 5, 5)
    real = batch["attention_mask"][0].bool()
    assert batch["character_ids"][0][real].tolist() == rows[0]["character_ids"]
    assert (batch["character_ids"][0][~real][:, 0] == NO_WORD).all()
    at_once = words(["a", "a fine day"], padding=True, padding_side=side, return_tensors="pt")
    assert at_once["character_ids"].equal(batch["character_ids"])


def test_saving(words, tmp_path):
    words.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is WordCharacterTokenizer and loaded.max_characters == 5
    assert dict(loaded("a strange day")) == dict(words("a strange day"))


def test_refusals(words):
    for word in ("", " "):
        with pytest.raises(ValueError, match="has no characters"):
            words([["a", word]], is_split_into_words=True)
    with pytest.raises(ValueError, match="no room"):
        train_word_tokenizer(TEXTS, vocab_size=5)
    with pytest.raises(ValueError, match="no text"):
        train_word_tokenizer(["", " "])

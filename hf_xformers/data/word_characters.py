# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of whole words that gives their characters, too, for models that read both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import AutoTokenizer, BatchEncoding, PreTrainedTokenizerFast

# Ids of characters: padding, the mark of a token that is no word, and then the 256 bytes.
NO_CHARACTER, NO_WORD, FIRST_BYTE = 0, 1, 2
NUM_CHARACTER_IDS = FIRST_BYTE + 256
_SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


def character_ids(word: str, length: int) -> list[int]:
    """The bytes of a word in UTF-8 (of an English one its characters) as `length` ids, cut or padded at the end.

    Raises:
        ValueError: a word without characters.
    """
    ids = [FIRST_BYTE + byte for byte in word.strip().encode("utf-8", "replace")[:length]]
    if not ids:
        raise ValueError(
            f"the word {word!r} has no characters, which a model that reads the characters of words needs; fill it in"
            " or remove it"
        )
    return ids + [NO_CHARACTER] * (length - len(ids))


class WordCharacterTokenizer(PreTrainedTokenizerFast):
    """Words between white space as tokens, `[CLS]` before and `[SEP]` after them, and next to `input_ids` the
    `character_ids` [T, max_characters] of every token, also of words that the vocabulary lacks. Batches of encoded
    rows are padded with `pad`, as usual.

    max_characters: of a word, in bytes; the rest is cut.
    """

    model_input_names = ["input_ids", "attention_mask", "character_ids"]

    # Without an `__init__` of its own, as transformers reads the whole of tokenizer.json for such classes alone.
    @property
    def max_characters(self) -> int:
        return self.init_kwargs["max_characters"]

    def _nothing(self) -> list[int]:
        """The characters of a token that is no word."""
        return [NO_WORD] + [NO_CHARACTER] * (self.max_characters - 1)

    def _encode_plus(  # type: ignore[override]
        self, text: Any, text_pair: Any = None, **options: Any
    ) -> BatchEncoding:
        """As every fast tokenizer, with `character_ids`."""
        tensors = options.pop("return_tensors", None)
        split = options.get("is_split_into_words", False)
        batched = isinstance(text, (list, tuple)) and (not split or isinstance((text or [""])[0], (list, tuple)))
        encoded = super()._encode_plus(text, text_pair, **options)
        many = bool(encoded["input_ids"]) and isinstance(encoded["input_ids"][0], list)
        if "character_ids" in self.model_input_names:
            encoded["character_ids"] = self._spelt(encoded, text, text_pair, batched, split)
            if not (many or batched):
                encoded["character_ids"] = encoded["character_ids"][0]
        if tensors is None:
            return encoded
        data = {name: values if many else [values] for name, values in encoded.items()}
        return BatchEncoding(data, encoded.encodings, tensor_type=tensors)

    def _spelt(self, encoded: BatchEncoding, text: Any, text_pair: Any, batched: bool, split: bool) -> list:
        """The characters of all tokens of all rows."""
        sources = encoded.get("overflow_to_sample_mapping") or range(len(encoded.encodings or ()))
        rows = []
        for number, encoding in enumerate(encoded.encodings or ()):
            row = sources[number] if batched else 0
            texts = ((text[row] if batched else text), None if text_pair is None else text_pair)
            if batched and text_pair is not None:
                texts = (texts[0], text_pair[row])
            if split:
                for word in (*texts[0], *(texts[1] or ())):
                    character_ids(word, 1)  # refuses what would vanish without a token
            rows.append(self._characters(encoding, texts, split))
        return rows

    def _characters(self, encoding: Any, texts: Sequence[Any], split: bool) -> list[list[int]]:
        found = []
        for offsets, word, sequence in zip(encoding.offsets, encoding.word_ids, encoding.sequence_ids):
            if sequence is None or word is None:
                found.append(self._nothing())
                continue
            source = texts[sequence][word] if split else texts[sequence]
            found.append(character_ids(source[offsets[0] : offsets[1]], self.max_characters))
        return found

    def _pad(self, encoded_inputs: Any, *args: Any, **kwargs: Any) -> dict:
        rows = encoded_inputs.get("character_ids")
        before = len(encoded_inputs[self.model_input_names[0]])
        side = kwargs.get("padding_side") or self.padding_side
        padded = super()._pad(encoded_inputs, *args, **kwargs)
        if rows is not None:
            missing = [self._nothing()] * (len(padded[self.model_input_names[0]]) - before)
            padded["character_ids"] = [*missing, *rows] if side == "left" else [*rows, *missing]
        return padded


def train_word_tokenizer(
    texts: Iterable[str],
    vocab_size: int = 8192,
    *,
    max_characters: int = 24,
    min_frequency: int = 1,
    model_max_length: int | None = None,
) -> WordCharacterTokenizer:
    """The words of `texts`, between white space, that occur `min_frequency` times or more, the most frequent first
    (equally frequent ones by their letters), with BERT's special tokens before them.

    Raises:
        ValueError: no text, words of no characters, or a `vocab_size` that holds no word besides the special tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    if max_characters < 1:
        raise ValueError(f"max_characters must be at least 1, got {max_characters}")
    if vocab_size <= len(_SPECIAL):
        raise ValueError(f"vocab_size={vocab_size} leaves no room for words besides {len(_SPECIAL)} special tokens")
    counts = Counter(word for text in texts for word in text.split())
    if not counts:
        raise ValueError("texts holds no text to train a tokenizer on; give at least one non-blank string")
    kept = sorted((word for word in counts if counts[word] >= min_frequency), key=lambda word: (-counts[word], word))
    names = [*_SPECIAL.values(), *(word for word in kept if word not in _SPECIAL.values())][:vocab_size]
    vocabulary = {name: index for index, name in enumerate(names)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIAL["unk"]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    around = [(_SPECIAL[role], vocabulary[_SPECIAL[role]]) for role in ("cls", "sep")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=around
    )
    options: dict[str, Any] = {f"{role}_token": name for role, name in _SPECIAL.items()}
    if model_max_length is not None:
        options["model_max_length"] = model_max_length
    return WordCharacterTokenizer(
        tokenizer_object=backend,
        max_characters=max_characters,
        bos_token=_SPECIAL["cls"],
        eos_token=_SPECIAL["sep"],
        clean_up_tokenization_spaces=False,
        **options,
    )


AutoTokenizer.register(WordCharacterTokenizer, tokenizer_class=WordCharacterTokenizer, exist_ok=True)

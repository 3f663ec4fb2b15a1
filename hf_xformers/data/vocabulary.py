# SPDX-License-Identifier: Apache-2.0
"""The three trainers behind `train_tokenizer`: texts in, a `tokenizers.Tokenizer` with a fixed numbering out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .pieces import pieces

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import Unigram
    from tokenizers.normalizers import Normalizer

_MIN_FREQUENCY = 2  # a pair of pieces seen once in the corpus is no unit of the language
_LIMIT_ALPHABET = 1000  # rarer characters become [UNK] in WordPiece, as in BERT's English vocabularies


class RereadableTexts:
    """Strings that can be iterated several times, out of strings or rows with `text`; long ones come in pieces."""

    def __init__(self, texts: Any):
        if isinstance(texts, (str, bytes, Mapping)) or not isinstance(texts, Iterable):
            raise TypeError(
                f"texts must be an iterable of strings or of rows with 'text', not a {type(texts).__name__}; "
                "wrap a single string in a list"
            )
        self._texts = list(texts) if isinstance(texts, Iterator) else texts

    def __iter__(self) -> Iterator[str]:
        for item in self._texts:
            text = item.get("text") if isinstance(item, Mapping) else item
            if not isinstance(text, str):
                raise TypeError(f"texts holds {item!r}; give strings, or rows with a string under 'text'")
            yield from pieces(text)


def train_bpe(
    corpus: RereadableTexts,
    vocab_size: int,
    num_sentinels: int,
    specials: list[AddedToken],
    lowercase: bool,
    unk: str,
) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    _check_size(vocab_size, len(alphabet), "the bytes", specials, num_sentinels)
    backend = Tokenizer(models.BPE())
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - num_sentinels,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=specials,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    return backend


def train_wordpiece(
    corpus: RereadableTexts,
    vocab_size: int,
    num_sentinels: int,
    specials: list[AddedToken],
    lowercase: bool,
    unk: str,
) -> Tokenizer:
    """WordPiece in two rounds, for the sake of determinism.

    The trainer numbers the characters that continue a word (`##a`) in the order of a randomly seeded hash table and
    breaks ties between equally frequent pairs by those numbers, so one round gives other ids, and even other pieces,
    in every process. The first round only collects these characters; the second gets them in sorted order.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    alphabet = _alphabet(corpus, normalizer, _LIMIT_ALPHABET)

    def blank(vocabulary: dict[str, int] | None = None) -> Tokenizer:
        backend = Tokenizer(models.WordPiece(vocabulary or {}, unk_token=unk))
        backend.normalizer = normalizer
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece(prefix="##")
        return backend

    def round_of_training(size: int, fixed: list[Any]) -> dict[str, int]:
        scratch = blank()
        trainer = trainers.WordPieceTrainer(
            vocab_size=size,
            min_frequency=_MIN_FREQUENCY,
            special_tokens=fixed,
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        scratch.train_from_iterator(corpus, trainer)
        return scratch.get_vocab()

    continuing = sorted(piece for piece in round_of_training(0, []) if piece.startswith("##") and len(piece) == 3)
    _check_size(vocab_size, len(alphabet) + len(continuing), "the characters of the corpus", specials, num_sentinels)
    backend = blank(round_of_training(vocab_size - num_sentinels, [*specials, *continuing]))
    backend.add_special_tokens(specials)
    return backend


def train_unigram(
    corpus: RereadableTexts,
    vocab_size: int,
    num_sentinels: int,
    specials: list[AddedToken],
    lowercase: bool,
    unk: str,
) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    def blank(model: Unigram) -> Tokenizer:
        backend = Tokenizer(model)
        steps = [normalizers.NFKC(), *([normalizers.Lowercase()] if lowercase else [])]
        backend.normalizer = normalizers.Sequence(steps)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
        backend.decoder = decoders.Metaspace()
        return backend

    scratch = blank(models.Unigram())
    # All characters of the corpus and the word mark, which the trainer never leaves out. One place more, since with
    # exactly as many it does not stop adding pieces.
    needed = len(_alphabet(corpus, scratch.normalizer, None)) + 2
    _check_size(vocab_size, needed, "the characters of the corpus", specials, num_sentinels)
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - num_sentinels,
        special_tokens=specials,
        unk_token=unk,
        show_progress=False,
    )
    scratch.train_from_iterator(corpus, trainer)
    pieces = json.loads(scratch.to_str())["model"]["vocab"]
    backend = blank(
        models.Unigram(
            _canonical_pieces(pieces, len(specials)), unk_id=[token.content for token in specials].index(unk)
        )
    )
    backend.add_special_tokens(specials)
    return backend


def _canonical_pieces(pieces: list[tuple[str, float]], num_special: int) -> list[tuple[str, float]]:
    """The (piece, log probability) list of a Unigram model without the traces of the trainer's hash order.

    The trainer sums probabilities in a random order, which moves the last digits and with them the order of equal
    pieces; and to the characters that it keeps only because the corpus contains them it gives the scores m, m + 1e-4,
    m + 2e-4, ... (m the lowest score of the model) in a random order. Scores are rounded here, and those characters
    get theirs in code point order.
    """
    learned = [(piece, round(score, 6)) for piece, score in pieces[num_special:]]
    lowest = min(score for _, score in learned)
    single = [(piece, (score - lowest) * 1e4) for piece, score in learned if len(piece) == 1]
    # Which ones those characters are is read off the scores: whole steps above m, as many as there can be.
    kept = [piece for piece, steps in single if steps < len(single) and abs(steps - round(steps)) < 0.02]
    scores = dict(learned)
    scores.update(zip(sorted(kept), sorted(scores[piece] for piece in kept), strict=True))
    specials = [(piece, score) for piece, score in pieces[:num_special]]
    return specials + sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def _alphabet(corpus: RereadableTexts, normalizer: Normalizer, limit: int | None) -> list[str]:
    """The characters of the normalized corpus without white space, the `limit` most frequent ones, sorted."""
    counts: Counter[str] = Counter()
    for text in corpus:
        counts.update(normalizer.normalize_str(text))
    ranked = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
    return sorted(ranked[:limit])


def _check_size(
    vocab_size: int, alphabet: int, alphabet_name: str, specials: Sequence[AddedToken], num_sentinels: int
) -> None:
    needed = alphabet + len(specials) + num_sentinels
    if vocab_size < needed:
        raise ValueError(
            f"vocab_size={vocab_size} is smaller than the required alphabet: {alphabet} for {alphabet_name}, "
            f"{len(specials)} special tokens and {num_sentinels} sentinels; take vocab_size of at least {needed} or "
            "fewer sentinels"
        )

"""Trained tokenizers: vocabularies against literal re-computation, layout of rows, saving, and the refusals."""

import hashlib
import itertools
import json
import re
from collections import Counter

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from hf_xformers.data import check_tokenizer, load_tokenizer, sentinel_ids, train_tokenizer, vocabulary_fields
from tests.forks import forks

KINDS = ("bpe", "wordpiece", "unigram")
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="module")
def trained(corpus):
    return {kind: train_tokenizer(corpus, kind, 700, num_sentinels=10, model_max_length=64) for kind in KINDS}


def tokens_by_id(tokenizer):
    return [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]


def state(tokenizer):
    return json.loads(tokenizer.backend_tokenizer.to_str())


# --- the vocabulary ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_ids(trained, kind):
    tokenizer = trained[kind]
    assert type(tokenizer) is PreTrainedTokenizerFast
    tokens = tokens_by_id(tokenizer)
    assert len(tokens) == len(tokenizer) == 700
    assert tokens[:5] == SPECIALS
    assert tokens[-10:] == [f"<extra_id_{index}>" for index in reversed(range(10))]
    assert sentinel_ids(tokenizer) == list(range(699, 689, -1))
    assert set(tokenizer.all_special_ids) == {*range(5), *range(690, 700)}
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.mask_token_id) == (0, 1, 4)
    assert tokenizer.cls_token_id == tokenizer.bos_token_id == 2
    assert tokenizer.sep_token_id == tokenizer.eos_token_id == 3
    assert vocabulary_fields(tokenizer) == {
        "vocab_size": 700,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }


def literal_bpe(words, tokens, merge, stop):
    """Byte-pair encoding as in the paper (Sennrich et al. 2016, algorithm 1): recount all pairs after every merge.

    `tokens` by id; equal counts are broken in favour of the smaller ids.
    """
    ids = {token: index for index, token in enumerate(tokens)}
    while len(tokens) < stop:
        pairs = Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], -ids[pair[0]], -ids[pair[1]]), default=None)
        if best is None or pairs[best] < 2:
            break
        new = merge(*best)
        if new not in ids:
            ids[new] = len(tokens)
            tokens.append(new)
        replaced = Counter()
        for word, count in words.items():
            out, index = [], 0
            while index < len(word):
                if word[index : index + 2] == best:
                    out.append(new)
                    index += 2
                else:
                    out.append(word[index])
                    index += 1
            replaced[tuple(out)] += count
        words = replaced
    return tokens


def test_bpe_vocabulary_is_literal_bpe(corpus):
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = Counter(tuple(word) for text in corpus[:12] for word, _ in split.pre_tokenize_str(text))
    expected = literal_bpe(words, SPECIALS + sorted(split.alphabet()), lambda a, b: a + b, 400)
    assert tokens_by_id(train_tokenizer(corpus[:12], "bpe", 400, num_sentinels=0)) == expected


def test_wordpiece_vocabulary_is_literal(corpus):
    """WordPiece is trained by merging the most frequent pairs, with `##` on every piece that continues a word."""
    normal = normalizers.BertNormalizer(lowercase=False)
    texts = [normal.normalize_str(text) for text in corpus[:12]]
    alphabet = sorted({character for text in texts for character in text if not character.isspace()})
    words = Counter()
    for text in texts:
        for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(text):
            words[(word[0], *("##" + character for character in word[1:]))] += 1
    continuing = sorted({piece for word in words for piece in word[1:]})
    expected = literal_bpe(words, SPECIALS + continuing + alphabet, lambda a, b: a + b.removeprefix("##"), 350)
    assert tokens_by_id(train_tokenizer(corpus[:12], "wordpiece", 350, num_sentinels=0)) == expected


def test_unigram_takes_the_most_probable_segmentation(trained):
    scores = dict(map(tuple, state(trained["unigram"])["model"]["vocab"]))

    def best(word):
        cuts = range(1, len(word))
        ways = (c for r in range(len(word)) for c in itertools.combinations(cuts, r))
        pieces = ([word[a:b] for a, b in itertools.pairwise((0, *c, len(word)))] for c in ways)
        return max((p for p in pieces if all(x in scores for x in p)), key=lambda p: sum(scores[x] for x in p))

    for word in ("returned", "exception", "a", "argument", "strings"):
        ours = trained["unigram"].tokenize(word)
        assert "".join(ours) == "▁" + word
        assert sum(scores[x] for x in ours) == pytest.approx(sum(scores[x] for x in best("▁" + word)), abs=1e-9)


def test_unigram_pieces_are_in_canonical_order(trained):
    pieces = [tuple(piece) for piece in state(trained["unigram"])["model"]["vocab"]]
    assert pieces[:5] == [(token, 0.0) for token in SPECIALS]
    assert pieces[5:] == sorted(pieces[5:], key=lambda piece: (-piece[1], piece[0]))


DIGEST = """
import hashlib, sys, json
from hf_xformers.data import train_tokenizer
texts = json.loads(sys.argv[1])
for kind in ("bpe", "wordpiece", "unigram"):
    tokenizer = train_tokenizer(texts, kind, 700, num_sentinels=10, model_max_length=64)
    print(hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest())
"""


def test_same_vocabulary_in_every_process(trained, corpus):
    """The trainers of WordPiece and Unigram number pieces in the order of a hash table seeded at random."""
    here = [hashlib.sha256(trained[kind].backend_tokenizer.to_str().encode()).hexdigest() for kind in KINDS]
    done = forks().run(DIGEST, json.dumps(corpus))
    assert done.stdout.split() == here, done.stderr


def test_wordpiece_ties_do_not_depend_on_the_process(corpus):
    """Many small vocabularies, so that pairs of equal frequency decide at the end of some of them."""
    for size in range(250, 270):
        first, second = (
            tokens_by_id(train_tokenizer(corpus[:6], "wordpiece", size, num_sentinels=0)) for _ in range(2)
        )
        assert first == second


# --- texts to rows and back ----------------------------------------------------------------------------------------


def test_bpe_round_trip_is_exact(trained):
    texts = ("plain words", "  two  spaces\n\ttab ", "naïve Ünïcödé, 漢字, 🙂 ‮", "", " a", "don't . stop !")
    for text in texts:
        ids = trained["bpe"](text, add_special_tokens=False)["input_ids"]
        assert trained["bpe"].decode(ids) == text
        assert trained["bpe"].decode(trained["bpe"](text)["input_ids"], skip_special_tokens=True) == text


def test_round_trips_up_to_normalisation(trained):
    text = "Return the string, or raise an exception (see below)."
    for kind in ("wordpiece", "unigram"):
        decoded = trained[kind].decode(trained[kind](text)["input_ids"], skip_special_tokens=True)
        assert decoded.replace(" ", "") == text.replace(" ", "")
    assert decoded == text
    assert trained["unigram"].decode(trained["unigram"]("a  b\nc")["input_ids"], skip_special_tokens=True) == "a b c"


def test_lowercase(corpus):
    for kind in KINDS:
        tokenizer = train_tokenizer(corpus, kind, 500, num_sentinels=0, lowercase=True)
        assert tokenizer("Return TRUE")["input_ids"] == tokenizer("return true")["input_ids"]
        learned = tokens_by_id(tokenizer)[5 + 256 * (kind == "bpe") :]
        assert not [token for token in learned if re.search("[A-Z]", token)]


@pytest.mark.parametrize("kind", KINDS)
def test_templates(corpus, kind):
    bare = train_tokenizer(corpus[:10], kind, 500, num_sentinels=0, template="none")
    a, b = bare("first text")["input_ids"], bare("the second")["input_ids"]
    assert bare("first text", "the second")["input_ids"] == a + b
    expected = {
        "cls_sep": ([2, *a, 3], [2, *a, 3, *b, 3]),
        "bos": ([2, *a], [2, *a, 3, *b]),
        "eos": ([*a, 3], [*a, 3, *b, 3]),
    }
    for template, (single, pair) in expected.items():
        tokenizer = train_tokenizer(corpus[:10], kind, 500, num_sentinels=0, template=template)
        assert tokenizer("first text")["input_ids"] == single
        both = tokenizer("first text", "the second")
        assert both["input_ids"] == pair
        assert tokenizer.num_special_tokens_to_add(pair=True) == len(pair) - len(a + b)
        if template == "cls_sep":
            assert both["token_type_ids"] == [0] * (len(a) + 2) + [1] * (len(b) + 1)
            assert tokenizer("first text")["token_type_ids"] == [0] * len(single)
        else:
            assert set(both) == {"input_ids", "attention_mask"}


def test_padding_and_truncation(trained):
    batch = trained["wordpiece"](["a", "a b " * 100], padding=True, truncation=True)
    assert [len(row) for row in batch["input_ids"]] == [64, 64]
    assert batch["input_ids"][0][:3:2] == [2, 3] and batch["input_ids"][0][3:] == [0] * 61
    assert batch["attention_mask"][0] == [1] * 3 + [0] * 61
    assert batch["input_ids"][1][-1] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_name_the_characters(trained, kind):
    text = "Return the  string value"
    encoded = trained[kind](text, return_offsets_mapping=True, add_special_tokens=False)
    spans = [text[a:b] for a, b in encoded["offset_mapping"]]
    assert "".join(spans) == text.replace(" ", "")
    assert not [span for span in spans if span != span.strip()]


def test_the_mask_stands_for_a_word_with_its_space(trained):
    for kind in KINDS:
        before, after = (trained[kind](text, add_special_tokens=False)["input_ids"] for text in ("the", "the string"))
        masked = trained[kind]("the [MASK] string", add_special_tokens=False)["input_ids"]
        assert masked == [*before, 4, *after[len(before) :]]


def test_other_spellings(corpus):
    names = {"pad": "<pad>", "sep": "</s>", "cls": "<s>"}
    tokenizer = train_tokenizer(corpus[:10], "unigram", 400, special_tokens=names, num_sentinels=0, template="eos")
    assert tokens_by_id(tokenizer)[:5] == ["<pad>", "[UNK]", "<s>", "</s>", "[MASK]"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("word")["input_ids"])[-1] == "</s>"
    assert tokenizer.eos_token == "</s>" and tokenizer.bos_token == "<s>"


def test_every_form_of_texts_trains_the_same(corpus):
    def tokens(texts):
        return tokens_by_id(train_tokenizer(texts, "wordpiece", 300, num_sentinels=0))

    texts = corpus[:5]
    expected = tokens(texts)
    dataset = Dataset.from_dict({"text": texts, "n": range(5)})
    assert tokens(iter(texts)) == tokens({"text": text} for text in texts) == expected
    assert tokens(dataset) == tokens(dataset.to_iterable_dataset()) == tokens(dataset["text"]) == expected


# --- saving and loading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_saved_beside_a_model_and_loaded_again(trained, kind, tmp_path):
    tokenizer = trained[kind]
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xf_unheard_of", "vocab_size": 700}))
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path), load_tokenizer(str(tmp_path))):
        assert type(loaded) is type(tokenizer)
        assert state(loaded) == state(tokenizer)
        assert loaded.special_tokens_map == tokenizer.special_tokens_map
        assert loaded.all_special_ids == tokenizer.all_special_ids
        assert loaded.model_input_names == tokenizer.model_input_names
        assert loaded.model_max_length == 64
        for pair in (("Return [MASK] a value <extra_id_3>.", None), ("first", "second text")):
            assert dict(loaded(*pair)) == dict(tokenizer(*pair))
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").read_text() == (tmp_path / "tokenizer.json").read_text()


def test_missing_tokens_and_sentinels_are_added(tmp_path):
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(tmp_path)
    assert len(load_tokenizer(tmp_path)) == 3 and sentinel_ids(load_tokenizer(tmp_path)) == []
    grown = load_tokenizer(tmp_path, add_missing=["pad", "mask"], num_sentinels=3)
    assert (grown.pad_token_id, grown.mask_token_id, sentinel_ids(grown)) == (3, 4, [7, 6, 5])
    assert grown.tokenize("a[MASK]<extra_id_1>b") == ["a", "[MASK]", "<extra_id_1>", "b"]
    assert {3, 4, 5, 6, 7} <= set(grown.all_special_ids)
    grown.save_pretrained(tmp_path / "grown")
    again = load_tokenizer(tmp_path / "grown", add_missing=["pad", "mask"], num_sentinels=3)
    assert len(again) == len(grown) == 8 and sentinel_ids(again) == [7, 6, 5]


def test_loading_refusals(tmp_path):
    with pytest.raises(ValueError, match=r"holds no tokenizer \(none of tokenizer.json.*save_pretrained"):
        load_tokenizer(tmp_path)
    for name in ("owner/absent", "./absent", "absent"):
        with pytest.raises(ValueError, match=f"no tokenizer could be loaded from '{name}'.*train_tokenizer.*OFFLINE"):
            load_tokenizer(name)
    with pytest.raises(ValueError, match="add_missing holds 'bos'"):
        load_tokenizer(tmp_path, add_missing=["pad", "bos"])
    ByT5Tokenizer().save_pretrained(tmp_path)  # which has no vocabulary to save
    assert load_tokenizer(tmp_path)("a")["input_ids"] == [ord("a") + 3, 1]


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_smallest_vocabulary(corpus, kind):
    with pytest.raises(
        ValueError, match=r"smaller than the required alphabet.*take vocab_size of at least"
    ) as refusal:
        train_tokenizer(corpus[:10], kind, 60, num_sentinels=7)
    smallest = int(str(refusal.value).split("at least ")[1].split()[0])
    assert smallest > 60 + 7
    tokenizer = train_tokenizer(corpus[:10], kind, smallest, num_sentinels=7)
    assert len(tokenizer) == smallest
    text = "".join(sorted(set("".join(corpus[:10])) - set(" \n\t")))
    assert tokenizer.unk_token_id not in tokenizer(" ".join(text))["input_ids"]
    with pytest.raises(ValueError, match="required alphabet"):
        train_tokenizer(corpus[:10], kind, smallest - 1, num_sentinels=7)


@pytest.mark.parametrize(
    "texts, options, error, message",
    [
        (["a"], {"kind": "char"}, ValueError, "kind='char' is unknown; take one of bpe, wordpiece, unigram"),
        (["a"], {"template": "gpt"}, ValueError, "template='gpt' is unknown"),
        (["a"], {"num_sentinels": -1}, ValueError, "num_sentinels=-1"),
        (["a"], {"special_tokens": {"start": "<s>"}}, ValueError, "role 'start'; the roles are pad, unk"),
        (["a"], {"special_tokens": {"cls": "[SEP]"}}, ValueError, r"two roles '\[SEP\]'"),
        ([], {}, ValueError, "no text to train"),
        (["", " \n"], {}, ValueError, "no text to train"),
        ("one string", {}, TypeError, "wrap a single string in a list"),
        (5, {}, TypeError, "not a int"),
        ([5], {}, TypeError, "texts holds 5"),
        ([{"body": "a"}], {}, TypeError, "'text'"),
    ],
)
def test_training_refusals(texts, options, error, message):
    with pytest.raises(error, match=message):
        train_tokenizer(texts, **options)


def test_check_tokenizer(trained):
    tokenizer = trained["bpe"]

    class Config(PreTrainedConfig):
        vocab_size: int = 700
        pad_token_id: int | None = None
        bos_token_id: int | None = None
        eos_token_id: int | list[int] | None = None

    def config(**fields):
        result = Config()
        for name, value in fields.items():
            setattr(result, name, value)
        return result

    for fields in (vocabulary_fields(tokenizer), {"vocab_size": 1000}, {"eos_token_id": [1, 3]}, {"mask_token_id": 4}):
        check_tokenizer(tokenizer, config(**fields))
    with pytest.raises(ValueError, match=r"has 700 ids but config.vocab_size is 699; .*vocab_size=700.*resize"):
        check_tokenizer(tokenizer, config(vocab_size=699))
    with pytest.raises(
        ValueError, match=r"pad_token_id is 1 in the config but 0 \('\[PAD\]'\).*config.pad_token_id=0"
    ):
        check_tokenizer(tokenizer, config(pad_token_id=1))
    with pytest.raises(ValueError, match=r"eos_token_id is \[1, 2\] in the config but 3"):
        check_tokenizer(tokenizer, config(eos_token_id=[1, 2]))

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 5, "<eos>": 2}, unk_token="<eos>"))
    sparse = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    check_tokenizer(sparse, config(vocab_size=6, pad_token_id=2, bos_token_id=2, eos_token_id=2))
    with pytest.raises(ValueError, match=r"has 6 ids but config.vocab_size is 3"):
        check_tokenizer(sparse, config(vocab_size=3))
    with pytest.raises(ValueError, match=r"config.pad_token_id=0 is the ordinary token 'a'.*add_missing=\['pad'\]"):
        check_tokenizer(sparse, config(pad_token_id=0))


# --- the special tokens of other models ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", ["gpt", "t5"])
def test_special_tokens_are_those_of_the_models(style, kind, corpus, tmp_path):
    made = train_tokenizer(corpus[:10], kind, 500, num_sentinels=4 if style == "t5" else 0, style=style)
    made.save_pretrained(tmp_path)
    for tokenizer in (made, load_tokenizer(tmp_path)):
        assert not [token for token in tokenizer.get_vocab() if token in SPECIALS]
        expected = ["<pad>", "</s>", "<unk>"] if style == "t5" else ["<|endoftext|>", "<|pad|>", "<|unk|>"]
        assert tokens_by_id(tokenizer)[:2] == expected[:2]
        end = expected.index("</s>" if style == "t5" else "<|endoftext|>")
        assert tokenizer.eos_token_id == end and tokenizer.pad_token_id == 1 - end
        assert tokenizer.bos_token_id == (0 if style == "gpt" else None)
        assert tokenizer.mask_token is tokenizer.cls_token is tokenizer.sep_token is None
        assert tokenizer.unk_token == (None if (style, kind) == ("gpt", "bpe") else expected[2])
        a, b = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("first text", "the second"))
        single, pair = tokenizer("first text")["input_ids"], tokenizer("first text", "the second")["input_ids"]
        last = [end] if style == "t5" else []
        assert single == [*a, *last] and pair == [*a, end, *b, *last]
        assert set(tokenizer("a", "b")) == {"input_ids", "attention_mask"}
        if tokenizer.unk_token:
            assert (
                tokenizer("\u6f22", add_special_tokens=False)["input_ids"][-1] == tokenizer.unk_token_id
                or kind == "bpe"
            )
        assert tokenizer.decode(pair, skip_special_tokens=True).replace(" ", "") == "firsttextthesecond"
    assert sentinel_ids(made) == (list(range(len(made) - 1, len(made) - 5, -1)) if style == "t5" else [])


def test_styles_that_have_no_start(corpus):
    with pytest.raises(ValueError, match="template='bos' begins a text with a token that style='t5' has not"):
        train_tokenizer(corpus[:2], style="t5", template="bos")
    with pytest.raises(ValueError, match="role 'cls'; the roles are pad, eos, unk"):
        train_tokenizer(corpus[:2], style="t5", special_tokens={"cls": "x"})
    tokenizer = train_tokenizer(corpus[:2], "bpe", 300, style="gpt", template="bos", num_sentinels=0)
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id


@pytest.mark.parametrize(
    "objective, tokens", [("clm", ["<|endoftext|>", "<|pad|>"]), ("span", ["<pad>", "</s>", "<unk>"])]
)
def test_objectives_get_their_own_tokens(objective, tokens, corpus):
    from hf_xformers.objectives import build_objective
    from hf_xformers.training.text import train_tokenizer_for

    made = train_tokenizer_for(build_objective(objective), corpus[:10], kind="bpe", vocab_size=500, max_length=64)
    assert tokens_by_id(made)[: len(tokens)] == tokens and not set(SPECIALS) & set(made.get_vocab())

"""Long documents: divided by position, cut for the tokenizer where nothing changes, and read with their line
breaks."""

import pytest

from hf_xformers.data import load_text_dataset, tokenize_dataset, tokenizing, train_tokenizer, vocabulary
from hf_xformers.data.pieces import divide, pieces
from hf_xformers.objectives import build_objective
from hf_xformers.training.text import TextData, load_splits

SPEECHES = [f"SPEAKER {n}:\nA line of verse, number {n},\n  and one indented.\n\n" for n in range(100)]
PLAY = "".join(SPEECHES)


def test_a_text_is_divided_at_the_end_of_a_paragraph():
    for fraction in (0.01, 0.05, 0.3, 0.9):
        first, last = divide(PLAY, fraction)
        assert first + last == PLAY and last.startswith("SPEAKER")
        assert fraction * len(PLAY) <= len(last) <= max(1.5 * fraction, fraction + 0.02) * len(PLAY)
    assert divide("one two\nthree four", 0.4) == ("one two\n", "three four")
    assert divide("one two", 0.01) == ("one ", "two")
    assert divide("single\n", 0.5) == ("single\n", "")


@pytest.mark.parametrize("streaming", [False, True])
def test_one_long_document_has_both_sides(streaming, tmp_path):
    (tmp_path / "play.txt").write_text(PLAY)
    splits = load_text_dataset(tmp_path / "play.txt", sample_by="document", streaming=streaming)
    train, validation = ([row["text"] for row in splits[name]] for name in ("train", "validation"))
    assert len(train) == len(validation) == 1 and train[0] + validation[0] == PLAY
    assert 0.05 * len(PLAY) <= len(validation[0]) <= 0.075 * len(PLAY)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_few_files_give_an_end_each_and_many_are_held_out_whole(streaming, tmp_path):
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text(f"{n}\n{PLAY}")
    splits = load_text_dataset(tmp_path, sample_by="document", streaming=streaming)
    assert [sum(1 for _ in splits[name]) for name in ("train", "validation")] == [3, 3]
    for n in range(3, 20):
        (tmp_path / f"{n}.txt").write_text(f"{n}\n{PLAY}")
    splits = load_text_dataset(tmp_path, sample_by="document", streaming=streaming)
    found = [row["text"] for name in ("train", "validation") for row in splits[name]]
    assert sorted(found) == sorted(f"{n}\n{PLAY}" for n in range(20))


@pytest.mark.parametrize("objective, count", [("clm", 1), ("span", 1), ("mlm", None)])
def test_models_that_generate_read_line_breaks(objective, count, tmp_path):
    (tmp_path / "play.txt").write_bytes(b"\xef\xbb\xbf" + PLAY.replace("\n", "\r\n").encode())
    splits = load_splits(TextData(data=[str(tmp_path / "play.txt")]), build_objective(objective))
    texts = [row["text"] for name in ("train", "validation") for row in splits[name]]
    if count:
        assert "".join(texts) == PLAY
    else:
        assert sorted(texts) == sorted(line for line in PLAY.split("\n") if line)
    source = TextData(data=[str(tmp_path / "play.txt")], sample_by="paragraph", validation_fraction=0)
    assert len(load_splits(source, build_objective(objective))["train"]) == 100


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_pieces_change_no_token(kind, monkeypatch):
    text = PLAY + "\n \n\ttabs  and   spaces\n" + PLAY
    assert "".join(pieces(text, 100)) == text and max(map(len, pieces(text, 100))) <= 100
    assert list(pieces("x" * 25, 10)) == ["x" * 10, "x" * 10, "x" * 5]
    whole = train_tokenizer([text], kind, 330, num_sentinels=0)
    from datasets import Dataset

    rows = Dataset.from_dict({"text": [text, "short"]})
    expected = tokenize_dataset(rows, whole, word_ids=True)[:]
    monkeypatch.setattr(tokenizing, "LONGEST_PIECE", 100)
    for module in (tokenizing, vocabulary):
        monkeypatch.setattr(module, "pieces", lambda text: pieces(text, 100))
    assert tokenize_dataset(rows.map(lambda row: row), whole, word_ids=True, max_length=None)[:] == expected
    assert train_tokenizer([text], kind, 330, num_sentinels=0).get_vocab() == whole.get_vocab()


def test_a_file_too_long_for_one_document(tmp_path, monkeypatch):
    from hf_xformers.data import sources

    (tmp_path / "play.txt").write_text(PLAY)
    monkeypatch.setattr(sources, "_LARGEST_DOCUMENT", 1000)
    with pytest.raises(ValueError, match="too long for one document; take sample_by='paragraph'"):
        load_text_dataset(tmp_path / "play.txt", sample_by="document")

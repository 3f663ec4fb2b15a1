"""`pretrain` and `evaluate` on parallel text: every kind of source, languages in the config, exact resumption."""

import json

import pytest

import hf_xformers.cli
from hf_xformers.data.parallel import load_parallel_dataset
from hf_xformers.data.phrases import phrase_pairs
from hf_xformers.finetuning.options import TaskData
from hf_xformers.finetuning.sources import load_rows
from hf_xformers.objectives import build_objective
from hf_xformers.training.parallel_rows import parallel_rows
from hf_xformers.training.text import TextData, load_splits
from tests.training.runs import interrupted_and_resumed, pretrain, pretrain_flags, same_run, summary

PAIRS = [*phrase_pairs(60), ("zero", "null")]
OPTIONS = {"variant": "bert", "objective": "tlm", "block_size": 64, "vocab_size": 400, "max_steps": 4}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same pairs as two files, as columns and as a column of both."""
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "lines").mkdir()
    for language, side in zip(("en", "de"), zip(*PAIRS)):
        (folder / "lines" / f"train.{language}").write_text("\n".join(side) + "\n")
    (folder / "columns.jsonl").write_text("".join(json.dumps({"en": a, "de": b}) + "\n" for a, b in PAIRS))
    both = "".join(json.dumps({"translation": {"de": b, "en": a}}) + "\n" for a, b in PAIRS)
    (folder / "both.jsonl").write_text(both)
    (folder / "columns[1].csv").write_text("en,de\n" + "".join(f"{a},{b}\n" for a, b in PAIRS))
    return folder


@pytest.mark.parametrize(
    "name",
    ["lines", "lines/train", "lines/train.en lines/train.de", "columns.jsonl", "both.jsonl", "columns[1].csv"],
)
def test_every_source_gives_the_same_pairs(files, name):
    splits = load_parallel_dataset([str(files / part) for part in name.split()], ("en", "de"), validation_fraction=0.1)
    sides = [set(zip(part["text"], part["translation"])) for part in splits.values()]
    assert sides[0] | sides[1] == set(PAIRS) and not sides[0] & sides[1] and list(splits) == ["train", "validation"]
    table = load_parallel_dataset(str(files / "columns.jsonl"), ("en", "de"), validation_fraction=0.1)["validation"]
    assert sides[1] == set(zip(table["text"], table["translation"]))
    part = load_parallel_dataset(str(files / "columns.jsonl"), ("en", "de"), split="train[:3]", validation_fraction=0)
    assert list(zip(part["train"]["text"], part["train"]["translation"])) == PAIRS[:3]


def test_sentences_of_digits_are_texts(tmp_path):
    (tmp_path / "a.csv").write_text("en,de\n" + "".join(f"{n:03d},{n}.50\n" for n in range(5)))
    rows = load_parallel_dataset(tmp_path / "a.csv", ["en", "de"], validation_fraction=0)["train"]
    assert list(rows["text"]) == [f"{n:03d}" for n in range(5)]
    assert list(rows["translation"]) == [f"{n}.50" for n in range(5)]


def test_files_go_together_by_their_names(tmp_path):
    """Whatever the languages are called; a pair of files has as many lines on both sides."""
    for language in ("de", "zh"):
        for name in ("train", "train.part2"):
            (tmp_path / f"{name}.{language}").write_text(f"{name} 1\n{name} 2\n")
    rows = load_parallel_dataset(str(tmp_path), ("de", "zh"), validation_fraction=0)["train"]
    assert list(rows["text"]) == list(rows["translation"]) == ["train 1", "train 2", "train.part2 1", "train.part2 2"]
    rows = load_rows(TaskData(data=[str(tmp_path)], validation_fraction=0), ("zh", "de"))["train"]
    assert list(rows["de"]) == list(rows["zh"])
    (tmp_path / "train.zh").write_text("train 1\n")
    (tmp_path / "train.part2.zh").write_text("train.part2 1\n" * 3)
    with pytest.raises(ValueError, match=r"train.de' has 2 and '.*train.zh' 1; give two files"):
        load_parallel_dataset(str(tmp_path), ("de", "zh"))
    (tmp_path / "train.zh").rename(tmp_path / "train.part1.zh")
    with pytest.raises(ValueError, match=r"train.de' has no other side: .* called the same but for .de and .zh"):
        load_parallel_dataset(str(tmp_path), ("de", "zh"))


def test_splits_that_are_called_alike_are_kept_apart(tmp_path):
    from datasets import Dataset, DatasetDict

    parts = {name: Dataset.from_dict({"en": [name], "de": [name]}) for name in ("train", "validation", "dev")}
    DatasetDict(parts).save_to_disk(tmp_path)
    found = load_parallel_dataset(str(tmp_path), ("en", "de"))
    assert {name: list(rows["text"]) for name, rows in found.items()} == {name: [name] for name in parts}


def test_what_has_no_pairs_is_refused(files, tmp_path):
    (tmp_path / "text.txt").write_text("a line\nanother\n")
    (tmp_path / "numbers.csv").write_text("en,de\n1,2\n")
    numbers = load_parallel_dataset(str(tmp_path / "numbers.csv"), ("en", "de"), validation_fraction=0)["train"]
    assert numbers[0] == {"text": "1", "translation": "2"}
    (tmp_path / "quotes.tsv").write_text('en\tde\n"A" start\tEin Anfang\n')
    for source, languages, message in (
        ("stdlib", ("en", "de"), "'stdlib' has no pairs of translations; give parallel text, or 'phrases'"),
        (tmp_path / "text.txt", ("en", "de"), "no pairs of translations"),
        (tmp_path / "quotes.tsv", ("en", "de"), "the row that begins at line 2 is malformed"),
        (files / "columns.jsonl", ("en", "fr"), "no pair of columns 'en' and 'fr'"),
        (files / "lines", ("en", "fr"), "no file that ends in .fr"),
        ("phrases", ("en", "fr"), "'phrases' is in en and de"),
        (tmp_path / "nothing", ("en", "de"), "names no parallel text"),
    ):
        with pytest.raises(ValueError, match=message):
            load_parallel_dataset(str(source), languages)
    (tmp_path / "train.en").write_text("one\ntwo\n")
    (tmp_path / "train.de").write_text("eins\n")
    with pytest.raises(ValueError, match="a line for each other's lines"):
        load_parallel_dataset(str(tmp_path / "train"), ("en", "de"))
    for source in ("phrases", files / "lines", files / "columns.jsonl"):
        with pytest.raises(ValueError, match="config_name='x' is for Hub datasets"):
            load_parallel_dataset(str(source), ("en", "de"), config_name="x")
    with pytest.raises(ValueError, match="--text_column is not for pairs"):
        load_splits(TextData(text_column="en"), build_objective("tlm"))


def test_streams_have_the_shares_of_their_languages(tmp_path):
    """q_l ~ p_l^f of streams whose rows are 3 to 1, of as many rows as before."""
    from datasets import Dataset

    from hf_xformers.data import train_tokenizer

    texts = Dataset.from_dict({"text": ["a b c d e f g h i"] * 40, "translation": ["x y z"] * 40})
    tokenizer = train_tokenizer([*texts["text"], *texts["translation"]], vocab_size=262, num_sentinels=0)
    one, all_of = ({"type": "multilingual_clm", "lg_sampling_factor": factor} for factor in (1, 0))
    found = [parallel_rows(texts, tokenizer, build_objective(spec), 16) for spec in (one, all_of)]
    shares = [sum(row[0] for row in rows["langs"]) / len(rows) for rows in found]
    tokens = [
        len(tokenizer(name, add_special_tokens=False)["input_ids"]) + 1 for name in ("a b c d e f g h i", "x y z")
    ]
    assert shares[0] == pytest.approx(tokens[1] / sum(tokens), abs=0.05) and shares[1] == pytest.approx(0.5, abs=0.02)
    counts = {}
    for row, seen in zip(found[0]["input_ids"], found[0]["token_counts"]):
        counts.update(zip(row, seen))
    (a,) = tokenizer("a", add_special_tokens=False)["input_ids"]
    assert counts[a] == 40


def test_a_run_is_resumed_and_evaluated(files, tmp_path, capsys):
    """Both kinds of rows; stopped between two checkpoints; figures of the run from `evaluate`."""
    options = {**OPTIONS, "objective.tasks": "pairs,streams", "save_strategy": "steps", "save_steps": 2}
    options |= {"hidden_dropout_prob": 0.1, "validation_fraction": 0.1}
    whole = pretrain(files / "lines", tmp_path / "whole", **options)
    argv = pretrain_flags(files / "lines", tmp_path / "stopped", **options)
    interrupted_and_resumed(argv, 3)
    same_run(tmp_path / "stopped", whole)
    config = json.loads((whole / "config.json").read_text())
    assert config["embedding"]["languages"] == ["en", "de"]
    capsys.readouterr()
    assert hf_xformers.cli.main(["evaluate", "--model", str(whole), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(summary(whole)["eval_loss"], rel=1e-5)
    other = ["--objective.languages", "en,fr", "--init_from", str(whole), "--vocab_size", "400"]
    assert hf_xformers.cli.main(["pretrain", *pretrain_flags(files / "lines", tmp_path / "no", **OPTIONS), *other])
    assert "language 'fr' is unknown to the model's config" in capsys.readouterr().err


def test_causal_streams(files, tmp_path):
    options = {**OPTIONS, "variant": "gpt2", "objective": "multilingual_clm", "block_size": 16}
    output = pretrain(files / "columns.jsonl", tmp_path / "run", **options)
    assert summary(output)["steps"] == 4
    assert json.loads((output / "config.json").read_text())["embedding"]["languages"] == ["en", "de"]

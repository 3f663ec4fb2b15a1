"""Files that are not UTF-8 are read when their encoding is named, and else refused with the remedy."""

import dataclasses
import json

import numpy as np
import pytest
from datasets import Dataset

from examples.sounds import write_wav
from hf_xformers.data import load_text_dataset
from hf_xformers.data.delimited import reading_as, text_lines
from hf_xformers.finetuning.options import TaskData
from hf_xformers.finetuning.sound_rows import load_sounds
from hf_xformers.finetuning.sources import load_rows

TEXTS = ["Zoë naïve", "Größe", "déjà vu"]
ROWS = {
    "a.csv": "text,label\n" + "".join(f"{text},1\n" for text in TEXTS),
    "a.tsv": "text\tlabel\n" + "".join(f"{text}\t1\n" for text in TEXTS),
    "a.jsonl": "".join(json.dumps({"text": text, "label": 1}, ensure_ascii=False) + "\n" for text in TEXTS),
}


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
@pytest.mark.parametrize("name", [*ROWS, "a.txt"])
def test_the_named_encoding_is_read(name, encoding, tmp_path):
    path = tmp_path / name
    path.write_text(ROWS.get(name, "\n".join(TEXTS) + "\n"), encoding=encoding)
    with reading_as(encoding):
        found = load_text_dataset(path, text_column="text", validation_fraction=0)
        assert list(found["train"]["text"]) == TEXTS
    if name in ROWS:
        rows: Dataset = load_rows(TaskData(data=[str(path)], validation_fraction=0, encoding=encoding))["train"]
        assert list(rows["text"]) == TEXTS
        with pytest.raises(ValueError, match="(?s)UTF-8.*(encoding latin-1|correct the file)"):
            load_rows(TaskData(data=[str(path)], validation_fraction=0))
    else:
        with reading_as(encoding):
            assert text_lines(path) == TEXTS


def test_refusals(tmp_path):
    (tmp_path / "a.csv").write_text(ROWS["a.csv"], encoding="latin-1")
    for encoding, said in (("latn", "--encoding 'latn' is unknown"), ("ascii", "cannot be read as ascii")):
        with pytest.raises(ValueError, match=said):
            load_rows(TaskData(data=[str(tmp_path / "a.csv")], encoding=encoding))


def test_transcripts_beside_sounds(tmp_path):
    for number, text in enumerate(TEXTS):
        write_wav(tmp_path / f"{number}.wav", np.zeros(80), 8000)
        (tmp_path / f"{number}.txt").write_text(text, encoding="latin-1")
    source = TaskData(data=[str(tmp_path)], validation_fraction=0, encoding="latin-1")
    assert list(load_sounds(source)["train"]["text"]) == TEXTS
    with pytest.raises(ValueError, match="not UTF-8.*--encoding latin-1"):
        load_sounds(dataclasses.replace(source, encoding="utf-8"))

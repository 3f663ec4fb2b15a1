"""What is measured, by hand, and a run from rows to a summary."""

import json
import re
from pathlib import Path

from hf_xformers.cli import main
from hf_xformers.finetuning import TaskOptions, build_task

from own_module import Grading

CARD = Path(__file__).parent / "own_card"


class Labels:
    names = ("bad", "fair", "good")


def test_the_distance():
    task = build_task(TaskOptions(task="grading"))
    assert type(task) is Grading
    task.labels = Labels
    rows = [{"prediction": "bad", "reference": "good"}, {"prediction": "fair", "reference": "fair"}]
    assert task.score(rows) == {"distance": 1.0, "accuracy": 0.5}


def test_a_run(tmp_path):
    grades = {"bad": "a dull and dreary film", "fair": "a film of some charm", "good": "a splendid film"}
    rows = [{"text": f"{text}, {n}", "label": name} for n in range(9) for name, text in grades.items()]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = f"finetune --task grading --variant bert --size tiny --data {data} --max_steps 2"
    assert main([*options.split(), "--use_cpu", "true", "--output_dir", str(tmp_path / "run")]) in (0, None)
    assert "eval_distance" in json.loads((tmp_path / "run" / "training_summary.json").read_text())


def test_the_example_of_the_card():
    exec(re.search(r"```python\n(.*?)```", CARD.read_text(encoding="utf-8"), re.DOTALL)[1], {})

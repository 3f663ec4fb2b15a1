"""What stands on the screen, and what goes into a pipe."""

import pytest

from hf_xformers.benchmark.entries import Entry
from hf_xformers.benchmark.runner import Cell
from hf_xformers.cli import main
from hf_xformers.cli.benchmark import _measure
from hf_xformers.cli.console import in_options, print_facts, print_table

LONG = "words that go on and on until no terminal of an ordinary width can hold them in a single line any more"


@pytest.mark.parametrize("columns", ["60", None])
def test_tables_and_facts_keep_to_a_terminal_and_are_whole_in_a_pipe(columns, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    print_table("title", ("name", "text"), [("first", LONG), ("second", 1234567)])
    print_facts("facts", {"one": LONG, "none": None, "two": 0.123456})
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "\x1b" not in out and out.isascii() and "none" not in out
    assert "1,234,567" in out and "0.1235" in out
    if columns is None:
        assert [line.split(maxsplit=1)[1] for line in lines if LONG[:10] in line] == [LONG, LONG]
    else:
        assert max(map(len, lines)) <= 60
    words = [word for line in lines for word in line.split()]
    assert [word for word in LONG.split() if word not in words] == []  # none is cut


class Comparison:
    """Two cells, of which one fails."""

    done = [("performer", "ok", None), ("luna", "failed", "no memory")]

    def cells(self):
        return [Cell("speed", Entry(label, f"xf_{label}", {}, {}), "encoder", 512) for label, _, _ in self.done]

    missing = cells

    def run(self, before):
        for cell, (label, status, error) in zip(self.cells(), self.done):
            before(cell)
            yield {"kind": "speed", "label": label, "at": 512, "status": status, "error": error, "ms": 1.5}


def test_a_benchmark_reports_every_cell_in_a_pipe(capsys):
    _measure(Comparison())
    assert capsys.readouterr().err.splitlines() == [
        "1/2 performer (encoder): 512 tokens: ok, ms 1.5",
        "2/2 luna (encoder): 512 tokens: failed: no memory",
    ]


def test_refusals_in_the_words_of_the_command():
    names = {"max_length": "--max-length", "overwrite=True": "--overwrite", "--init_from": "--model"}
    with pytest.raises(ValueError) as refused, in_options(names):
        raise ValueError("`max_length` of --init_from 'x' is 0; give `overwrite=True` or `other`")
    assert str(refused.value) == "--max-length of --model 'x' is 0; give --overwrite or `other`"
    with pytest.raises(ValueError, match="invalid literal"), in_options(names):  # a bug stays as it is
        int("x")


def test_figures_in_words(capsys):
    """Shares in percent; floors below what they are the floor of."""
    from hf_xformers.cli.evaluate import report as evaluated
    from hf_xformers.cli.pretrain import report as pretrained

    figures = {
        "model": "runs/x", "objective": {"type": "mlm"}, "data": ["a.txt", "b.txt"], "block_size": 16, "loss": 2.5,
        "perplexity": 12.18, "accuracy": 0.0006677, "baseline_loss": 5.0, "baseline_accuracy": 0.07, "aux_balance":
    1.5, }  # fmt: skip
    evaluated(figures)
    lines = [line.split("  ", 1) for line in capsys.readouterr().out.replace("\n  ", "\n").splitlines()]
    assert [[name, *(part.strip() for part in rest)] for name, *rest in lines] == [
        ["evaluated"],
        ["model", "runs/x"],
        ["objective", "mlm"],
        ["data", "a.txt b.txt"],
        ["block size", "16"],
        ["loss", "2.5"],
        ["... of token frequencies alone", "5"],
        ["perplexity", "12.18"],
        ["accuracy", "0.1%"],
        ["... of always the most frequent token", "7.0%"],
        ["balance (held out)", "1.5"],
    ]
    summary = {"variant": "v", "objective": {"type": "mlm"}, "parameters": 1, "steps": 1, "seconds": 1.0}
    pretrained({**summary, "train_loss": None, "eval_accuracy": 0.0006677, "eval_baseline_accuracy": 0.5}, "runs/x")
    out = capsys.readouterr().out
    assert "0.1%" in out and "50.0%" in out and "0.0006677" not in out


@pytest.mark.parametrize("rank, local, told", [(0, 0, "hf-xformers"), (1, 1, ""), (8, 0, "hf-xformers (process 8)")])
def test_one_process_of_a_machine_refuses(rank, local, told, monkeypatch, capsys):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local))
    assert main(["nothing"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{told}: error: there is no command 'nothing'") if told else not error

"""Every code block of the documentation's pages runs.

A page's Python blocks run in order in one namespace. Lines of `console` blocks run as well, cut short; those of `bash`
blocks (longer runs, several devices, packages that need not be there, the Hub) are read by the real parsers. A `yaml`
block is the file that its first line names. All pages share a folder: a model that a page reads is made by the line of
the documentation that makes it, once.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from hf_xformers.cli import COMMANDS, main
from hf_xformers.cli.parser import CommandParser
from hf_xformers.core.components import SLOTS, build_spec
from scripts.docs.figures import FIGURE
from tests.documents import (
    ROOT,
    blocks,
    check_launch,
    launched,
    lines,
    short,
    small_corpus,
    write_llama,
    write_minilm,
    write_roberta,
    write_rows,
)

DOCS = ROOT / "docs"
GENERATED = ("api", "objectives", "results", "zoo")
PAGES = {
    path.relative_to(DOCS).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(DOCS.rglob("*.md"))
    if path.relative_to(DOCS).parts[0] not in GENERATED
}
READS_A_MODULE = """import sys
from hf_xformers.cli import _import_modules
from hf_xformers.cli.benchmark import make_parser, read_entries
options = make_parser().parse_args(_import_modules(sys.argv[1:]))
read_entries(options.variants, options.set)"""
_WRITES = re.compile(r"--(?:output_dir|to)[ =](\S+)")
_EXTRAS = re.compile(r"^(\w+) = \[", flags=re.MULTILINE)


def console_lines(page: str) -> list[str]:
    return [line for kind, text in blocks(PAGES[page]) if kind == "console" for line in lines(text)]


def written(line: str) -> str | None:
    """The folder that a line makes."""
    found = _WRITES.search(line)
    return found[1] if found and "--resume_from_checkpoint" not in line and "--dry-run" not in line else None


MAKERS = {folder: line for page in PAGES for line in console_lines(page) if (folder := written(line)) is not None}


def test_a_folder_is_made_by_one_line():
    for page in PAGES:
        for line in console_lines(page):
            assert line.split()[0] == "hf-xformers", f"{page}: {line} belongs into a bash block"
            assert MAKERS.get(written(line), line) == line, f"{page}: another line makes {written(line)}"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """The folder in which all pages are."""
    folder = tmp_path_factory.mktemp("docs")
    torch.manual_seed(0)
    write_rows(folder)
    write_llama(folder)
    write_roberta(folder)
    write_minilm(folder)
    for text in PAGES.values():
        for kind, block in blocks(text):
            if kind == "yaml":
                (folder / block.split()[1]).write_text(block)
    with small_corpus(folder):
        yield folder


@pytest.fixture
def page_module(monkeypatch):
    """A module for a page's names; what its code registers is forgotten afterwards."""
    module = types.ModuleType("docs_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    registries = {id(slot): slot for slot in SLOTS.values()}.values()
    before = [(slot, dict(slot._specs), dict(slot._aliases)) for slot in registries]
    yield module
    for slot, specs, aliases in before:
        new = [name for name, cls in slot._specs.items() if cls.__module__ == module.__name__]
        for name in new:
            del slot._specs[name]
        for alias in [alias for alias, name in slot._aliases.items() if name in new]:
            del slot._aliases[alias]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_page(page, workspace, page_module, monkeypatch, capsys):
    monkeypatch.chdir(workspace)
    torch.manual_seed(0)
    for number, (kind, text) in enumerate(blocks(PAGES[page])):
        if kind == "python":
            make_what_is_read(text, capsys)
            exec(compile(text, f"{page}.md, block {number}", "exec"), vars(page_module))
        elif kind == "console":
            for line in lines(text):
                run(line, capsys)
        elif kind == "bash":
            for line in lines(text):
                make_what_is_read(line, capsys)
                read(line)
        else:
            assert kind in ("yaml", "toml", "text", "json", "bibtex"), f"{page}: what is a block of {kind}?"


def run(line: str, capsys) -> None:
    """A line of the console, unless what it makes is there already."""
    folder = written(line)
    if folder is not None and Path(folder).exists():
        return
    make_what_is_read(line, capsys)
    code = main(short(shlex.split(line)[1:]))
    assert code == 0, f"{line}\n{capsys.readouterr().err[-3000:]}"


def make_what_is_read(text: str, capsys) -> None:
    """The folders that a line or some code names, by the lines that make them."""
    own = written(text) if text.startswith("hf-xformers") else None
    for folder, line in MAKERS.items():
        if folder != own and re.search(rf"(?<![\w/-]){re.escape(folder)}(?![\w/-])", text) and line != text:
            run(line, capsys)


class Read(BaseException):
    """A command has read its options."""


def stopping(function):
    def stop(*arguments, **keywords):
        function(*arguments, **keywords)
        raise Read

    return stop


def read(line: str) -> None:
    """A line of a shell is read by what would run it."""
    words = shlex.split(line)
    while re.match(r"\w+=", words[0]):
        words = words[1:]
    if words[0] == "hf-xformers":
        read_command(words[1:])
    elif launched(line) is not None:
        check_launch(launched(line))
    elif words[:2] == ["python", "-c"]:
        compile(words[2], line, "exec")
    elif words[0] in ("bash", "python"):
        assert (ROOT / words[1]).is_file(), line
    elif words[:3] == ["pip", "install", "-e"]:
        extras = re.findall(r"\w+", words[3].removeprefix("."))
        assert set(extras) <= set(_EXTRAS.findall((ROOT / "pyproject.toml").read_text())), line
    elif words[:2] == ["git", "clone"] or words[0] == "cd":
        assert words[-1].endswith("hf_xformers")
    elif words[:2] == ["transformers", "serve"]:  # clients/test_serve.py asks a server
        assert "--trust-remote-code" in words
    else:
        assert words == ["source", ".venv/bin/activate"], f"what tries {line!r}?"


def read_command(arguments: list[str]) -> None:
    """The command's own parser reads the options, and components their fields."""
    from hf_xformers.cli.arguments import parse_component, split_dotted
    from hf_xformers.cli.several_tasks import split_tasks

    name, rest = arguments[0], arguments[1:]
    if name == "benchmark" and "--import" in rest:  # what the module registers is not for this process
        paths = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", READS_A_MODULE, *rest], check=True, env=paths)
        return
    if name == "benchmark":
        from hf_xformers.cli.benchmark import make_parser, read_entries

        options = make_parser().parse_args(rest)
        read_entries(options.variants, options.set)
        return
    module = importlib.import_module(f"hf_xformers.cli.{COMMANDS[name][0]}")
    commands = split_tasks(rest) if name == "finetune" else None
    for command in (rest,) if commands is None else commands.values():
        with pytest.MonkeyPatch.context() as patch:
            if hasattr(module, "parse_command"):
                patch.setattr(module, "parse_command", stopping(module.parse_command))
            patch.setattr(CommandParser, "parse_args", stopping(CommandParser.parse_args))
            with pytest.raises(Read):
                main([name, *command])
    _, dotted = split_dotted(rest, (*SLOTS, "decoder", "objective", "peft", "student", "method"))
    for slot in SLOTS:
        fields = {field: text for field, text in dotted.get(slot, {}).items() if field != "layers"}
        if "type" in fields:
            build_spec(slot, parse_component(slot, fields, fields["type"]))


_FIGURE = re.compile(r"\b\d+\.\d+\b|\d ?%|\b\d+ times\b")
_VERSION = re.compile(r"\b(?:Python|torch|transformers) \d+(\.\d+)*")


@pytest.mark.parametrize("page", PAGES)
def test_no_figure_is_typed_by_hand(page):
    """Figures come from the committed results (scripts/docs/figures.py)."""
    text = re.sub(r"```.*?```|`[^`\n]*`|<!--.*?-->|\(https?:[^)]*\)", "", FIGURE.sub("", PAGES[page]), flags=re.DOTALL)
    assert not _FIGURE.findall(_VERSION.sub("", text))

#!/usr/bin/env python
"""Checks the words of the prose: codespell's American spelling and `scripts/docs/words.txt`, and `AVOIDED` below.

Prose is Markdown without code, and the comments, docstrings and messages of Python files.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "model_cards", "hf_xformers", "scripts")
PLACES += ("benchmarks", "examples")
TYPES = (".md", ".py", ".toml")
EXCEPT = (ROOT / "scripts/words.py",)
NAMES = "aussian,Bailin,befores,OnText,ois,SortCut,Teh,TUPE,unter,nd,nce,alo"  # of people, systems and code

# Construction -> what to write. Matched without regard to case, within a line.
AVOIDED = {
    r"\bbeside\b": "next to; compared with; besides",
    r"\b(?<!\.)floors?\b(?!\()": "baseline",
    r"\bgo(es)? on\b(?! top\b)": "continue",
    r"\bhand(s|ed|ing)? (on|over)\b": "pass",
    r"\bplain twins?\b|\bdense twins?\b|\btwins\b": "dense baseline; control",
    r"\brooms\b|\broom of its slot\b": "package",
    r"\b(unknown|another|same) kinds?\b": "type",
    r"\bwhat [\w ]{1,30} (is|are|was|were) says?\b": "a noun: `X` sets Y",
    r"\bis its variant's own\b|\bis the variant's own\b": "falls back to the variant's",
}

_CODE = re.compile(r"`[^`\n]*`|(?<!\w)--[a-z]\w*|\{[^{}\n]*\}|\$[^$\n]+\$|https?://\S+|\]\([^)\n]*\)")
_BLOCK = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def prose(path: Path) -> str:
    """The text of a file with all but its prose blanked, so that lines keep their numbers."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return _CODE.sub(blank, _BLOCK.sub(blank, text))
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    kept = list(re.sub(r"[^\n]", " ", text))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        inside = token.string.lstrip("rbfRBF").strip("\"'").strip()
        words = token.type == tokenize.STRING and re.search(r"\s", inside) and not inside.startswith("@")  # no BibTeX
        if token.type == tokenize.COMMENT or words:
            first, last = (starts[row - 1] + column for row, column in (token.start, token.end))
            kept[first:last] = text[first:last]
    return _CODE.sub(blank, "".join(kept))


def files() -> Iterator[Path]:
    for place in map(ROOT.joinpath, PLACES):
        below = [place] if place.is_file() else sorted(place.rglob("*.*"))
        yield from (path for path in below if path.suffix in TYPES and not {path, *path.parents} & {*EXCEPT})


def main() -> int:
    texts = {path.relative_to(ROOT): prose(path) for path in files()}
    found = [
        f"{path}:{number}: {match[0]} ==> {better}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        for construction, better in AVOIDED.items()
        for match in re.finditer(construction, line, re.IGNORECASE)
    ]
    with tempfile.TemporaryDirectory() as folder:
        for path, text in texts.items():
            (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / path).write_text(text, encoding="utf-8")
        dictionaries = ["--builtin", "clear,en-GB_to_en-US", "-D", "-", "-D", str(ROOT / "scripts/docs/words.txt")]
        command = [sys.executable, "-m", "codespell_lib", *dictionaries, "--ignore-words-list", NAMES.lower(), "."]
        spelling = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if spelling.returncode not in (0, 65):
        raise SystemExit(spelling.stderr)
    found += [line.removeprefix("./") for line in spelling.stdout.splitlines()]
    print("\n".join([*found, f"{len(found)} problems in {len(texts)} files"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

"""Puts the documentation's sources together: what is written in `docs/`, and what is made from code and results.

    python -m scripts.docs.assemble [FOLDER]

Writes `FOLDER/mkdocs.yml` (by default in build/docs) and the Markdown of all pages in `FOLDER/pages`; only what
changed is written anew. `scripts/docs.sh` calls it, then builds the site from it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from . import api, drawing, notebooks, objectives, pictures, results, taxonomy, techniques, zoo
from .charts import charts_of
from .equations import with_equations
from .figures import fill
from .links import for_site
from .markup import ROOT, Pages
from .navigation import configuration

WRITTEN = ROOT / "docs"
ASSETS = (".css", ".js", ".svg", ".png", ".ipynb")


def generated() -> Pages:
    """Every generated page by its path, as Markdown with equations in LaTeX."""
    made = {**zoo.pages(), **objectives.pages(), **taxonomy.pages(), **results.pages(), **api.pages()}
    return made | techniques.pages()


def plots() -> dict[str, str]:
    """The charts of all result files."""
    made: dict[str, str] = {}
    for name in results.files():
        charts = charts_of(name, results.tables_of(name), results.section_of)
        made |= {f"results/{path}": text for path, text in drawing.drawn(charts).items()}
    return made


def everything() -> dict[str, bytes]:
    """Path -> content of all files that the site is built from."""
    text: dict[str, str] = dict(generated())
    for path in sorted(WRITTEN.rglob("*.md")):
        name = str(path.relative_to(WRITTEN))
        text[name] = for_site(fill(path.read_text(encoding="utf-8")), name)
    from_notebooks, shown = notebooks.pages()
    text |= from_notebooks
    files = {path: with_equations(page).encode() for path, page in text.items()}
    files |= {path: content.encode() for path, content in plots().items()} | shown
    files |= {path: file.read_bytes() for path, file in pictures.files().items()}
    for path in sorted(WRITTEN.rglob("*")):
        if path.suffix in ASSETS:
            files[str(path.relative_to(WRITTEN))] = path.read_bytes()
    return files


def assemble(folder: Path) -> int:
    """Writes the sources of the site to `folder`; returns how many files there are."""
    files = {f"pages/{path}": content for path, content in everything().items()}
    titles = [path.removeprefix("pages/") for path in files if path.endswith(".md")]
    files["mkdocs.yml"] = configuration(titles).encode()
    for path, content in files.items():
        target = folder / path
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    for old in sorted((folder / "pages").rglob("*"), reverse=True):
        if old.is_file() and str(old.relative_to(folder)) not in files:
            old.unlink()
        elif old.is_dir() and not any(old.iterdir()):
            shutil.rmtree(old)
    return len(files)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "docs"
    print(f"{assemble(folder)} files in {folder}")

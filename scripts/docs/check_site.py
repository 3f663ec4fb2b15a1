"""Reads a built site as a visitor's browser would, and fails where a link is dead or another host would be loaded.

python -m scripts.docs.check_site [FOLDER]      by default build/docs/site
"""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag

_IDS = re.compile(r'\s(?:id|name)="([^"]*)"')
_LINKS = re.compile(r'<(\w+)\b([^>]*?)\s(href|src)="([^"]*)"([^>]*)>')
_LOADED = re.compile(r"url\(\s*['\"]?(?:https?:)?//|@import\s+(?:url\()?\s*['\"]?(?:https?:)?//")
_ELSEWHERE = re.compile(r"(?:[a-z]+:)?//|(?:mailto|data|javascript):")


def problems(site: Path) -> list[str]:
    """One line for each dead link, missing anchor and thing that is loaded from another host."""
    found = []
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(site.rglob("*.html"))}
    anchors = {path: {html.unescape(name) for name in _IDS.findall(text)} for path, text in texts.items()}
    for path, text in texts.items():
        where = path.relative_to(site)
        seen = set()
        for tag, before, kind, target, after in _LINKS.findall(text):
            if (tag, target) in seen:
                continue
            seen.add((tag, target))
            loads = kind == "src" or (tag == "link" and 'rel="canonical"' not in before + after)
            problem = _problem(path, html.unescape(target), loads, anchors, site)
            if problem:
                found.append(f"{where}: {problem}")
    for path in sorted(site.rglob("*.css")):
        if _LOADED.search(path.read_text(encoding="utf-8")):
            found.append(f"{path.relative_to(site)}: loads from another host")
    return found


def _problem(page: Path, target: str, loads: bool, anchors: dict[Path, set[str]], site: Path) -> str:
    if _ELSEWHERE.match(target):
        outside = target.startswith(("http", "//"))
        return f"loads {target} from another host" if loads and outside else ""
    address, anchor = urldefrag(target)
    address = unquote(address.partition("?")[0])
    if page.name == "404.html" or address.startswith("/"):
        goal = site / address.lstrip("/")
    else:
        goal = page.parent / address if address else page
    goal = goal.resolve()
    if goal.is_dir():
        goal = goal / "index.html"
    if not goal.exists():
        return f"{target} leads nowhere"
    if anchor and goal in anchors and unquote(anchor) not in anchors[goal] and not anchor.startswith("__"):
        return f"{target} has no such anchor"
    return ""


def main(folder: str = "") -> int:
    site = (Path(folder) if folder else Path(__file__).resolve().parents[2] / "build" / "docs" / "site").resolve()
    if not any(site.rglob("*.html")):
        print(f"{site} has no pages: build the site first, with scripts/docs.sh")
        return 1
    found = problems(site)
    for line in found[:100]:
        print(line)
    pages = sum(1 for _ in site.rglob("*.html"))
    print(f"{pages} pages, {len(found)} problems")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Links of the written pages: to files of the checkout, so that they work there, and on the site to the pages that are
made of those files.

    [Luna](../model_cards/xf_luna.md)                          [Luna](zoo/luna.md)
    [figures](../benchmarks/results/mechanisms.md)             [figures](results/mechanisms.md)
    [`alibi`](../../hf_xformers/position/alibi.py#alibi)       [`alibi`](../zoo/components/position.md#alibi)
    [API](../hf_xformers/conversion/__init__.py)               [API](api/conversion.md)
"""

from __future__ import annotations

import posixpath
import re

from .markup import REPOSITORY, relative

LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s]+)(?=\))")
CODE = re.compile(r"^```.*?^```$", flags=re.DOTALL | re.MULTILINE)
_PAGES = tuple(
    (re.compile(path + r"(#.*)?$"), page)
    for path, page in (
        (r"model_cards/README\.md", "zoo/index.md"),
        (r"model_cards/xf_(\w+)\.md", r"zoo/\1.md"),
        (r"model_cards/objectives/(\w+)\.md", r"objectives/\1.md"),
        (r"benchmarks/results/README\.md", "results/index.md"),
        (r"benchmarks/results/(\w+)\.md", r"results/\1.md"),
        (r"hf_xformers/(\w+)/__init__\.py", r"api/\1.md"),
        (r"hf_xformers/(attention|position)(?:/[\w/]+\.py)?", r"zoo/components/\1.md"),
        (r"hf_xformers/configuration_xformer\.py", "api/configs.md"),
        (r"hf_xformers/modeling_xformer\.py", "api/models.md"),
        (r"scripts/docs/techniques\.py", "guides/techniques.md"),
        (r"docs/(notebooks/\w+)\.ipynb", r"\1.md"),
        (r"docs/(.+)", r"\1"),
    )
)


def for_site(markdown: str, path: str) -> str:
    """The page `path` (below docs/) with its links as the site needs them; files without a page are on GitHub."""
    code = CODE.findall(markdown)
    prose = [LINK.sub(lambda found: _target(found[1], path), part) for part in CODE.split(markdown)]
    return "".join(part + block for part, block in zip(prose, [*code, ""]))


def _target(link: str, path: str) -> str:
    file = posixpath.normpath(posixpath.join("docs", posixpath.dirname(path), link))
    for written, page in _PAGES:
        if found := written.match(file):
            return relative(path, found.expand(page) + (found[found.re.groups] or ""))
    return f"{REPOSITORY}/blob/main/{file}"

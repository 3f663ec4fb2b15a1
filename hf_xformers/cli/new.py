# SPDX-License-Identifier: Apache-2.0
"""`hf-xformers new`: a component, objective or task to begin with, its test and a stub of its card."""

from __future__ import annotations

import ast
import importlib.util
import keyword
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from ..core.components import SLOTS
from ..core.discovery import PLUGINS
from ..core.saved_files import write_text
from ..finetuning.names import known_task
from ..objectives import OBJECTIVES
from .console import say
from .parser import CommandParser

_DESCRIPTION = """Write a file that works and does little, for you to change: NAME.py, which registers itself,
test_NAME.py and NAME.md, a stub of its card. The test passes as it stands: pytest test_NAME.py.

In a checkout of hf_xformers they go where the package, its tests and cards have them; anywhere else into --to, and
import what hf_xformers makes public."""


class Component(NamedTuple):
    """What can be made. folder: of it in the package. example: the name that the template has, and the command and
    code that use it."""

    folder: str
    example: str
    option: str
    use: str


_MODEL = """from hf_xformers import XFormerConfig, XFormerForCausalLM

sizes = dict(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
model = XFormerForCausalLM(XFormerConfig(**sizes, is_decoder=True, {slot}="{name}"))"""


def _of_model(slot: str) -> tuple[str, str]:
    return f"pretrain --{slot} {{name}}", _MODEL.replace("{slot}", slot)


TYPES = {
    "attention": Component("attention", "distance_decay", *_of_model("attention")),
    "stateful_attention": Component("attention", "gated_mean", *_of_model("attention")),
    "position": Component("position", "log_distance", *_of_model("position")),
    "stack": Component("stacks", "repeated", *_of_model("stack")),
    "head": Component("heads", "learned_scale", *_of_model("head")),
    "objective": Component(
        "objectives",
        "last_tokens",
        "pretrain --objective {name}",
        'from hf_xformers.objectives import build_objective\n\nobjective = build_objective("{name}")',
    ),
    "task": Component(
        "finetuning/tasks",
        "grading",
        "finetune --task {name}",
        'from hf_xformers.finetuning import TaskOptions, build_task\n\ntask = build_task(TaskOptions(task="{name}"))',
    ),
}


def run(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="hf-xformers new", description=_DESCRIPTION)
    parser.add_argument("type", metavar="TYPE", choices=list(TYPES), help=", ".join(TYPES))
    parser.add_argument("name", metavar="NAME", help="as configs will have it, such as my_attention")
    parser.add_argument("--to", metavar="FOLDER", default=".", help="a folder, or a checkout; default: this folder")
    arguments = parser.parse_args(list(argv))
    folder, name = Path(arguments.to).expanduser(), arguments.name
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ValueError(
            f"NAME {name!r} is no name for a module: use lower-case letters, digits and single underscores, and no"
            f" keyword of Python, such as 'my_{arguments.type}'"
        )
    checkout = (folder / "hf_xformers" / "extend.py").is_file()
    if not checkout and importlib.util.find_spec(name) is not None and not (folder / f"{name}.py").exists():
        raise ValueError(f"there is a module {name!r} already, which yours would hide; take another name")
    written = texts(arguments.type, name, checkout)
    for place in written:
        if (folder / place).exists() or (folder / place).with_suffix("").joinpath("__init__.py").exists():
            raise ValueError(f"{str(folder / place)!r} exists already; take another name or folder")
    if _is_known(arguments.type, name):
        raise ValueError(
            f"NAME {name!r}: there is such a component, objective or task already; take another name, such as"
            f" 'my_{name}'"
        )
    for place, text in written.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / place, text)
        say(str(folder / place))
    command = TYPES[arguments.type].option.format(name=name)
    if checkout:
        say(f"hf-xformers {command} ... uses it; CONTRIBUTING.md says what is left to do.")
    else:
        say(
            f"hf-xformers {command} --import {name} ... uses it, where Python finds {name}. With these lines in the"
            " pyproject.toml of a package of yours, all who install that have it:\n\n"
            f'[project.entry-points."{PLUGINS}"]\n{name} = "{name}"'
        )
    return 0


def _is_known(made: str, name: str) -> bool:
    """Whether configs and options take the name already, as it is or as an alias."""
    if made == "task":
        return known_task(name) is not None
    return name in OBJECTIVES if made == "objective" else SLOTS[made.removeprefix("stateful_")].find(name) is not None


def texts(made: str, name: str, checkout: bool) -> dict[Path, str]:
    """File -> text of what is `made`, one of `TYPES`; checkout: as the package, its tests and cards have them."""
    home, example, _, use = TYPES[made]
    module, test, card = Path(f"{name}.py"), Path(f"test_{name}.py"), Path(f"{name}.md")
    imported = name
    if checkout:
        module, test = Path("hf_xformers", home, module), Path("tests", home, test)
        card, imported = Path("model_cards", "components", card), ".".join(["hf_xformers", *home.split("/"), name])
    code, checks = (_renamed(_template(f"{file}.py"), example, name) for file in (made, f"test_{made}"))
    to_card = "../" * (len(test.parts) - 1) + card.as_posix()
    checks = checks.replace("own_module", imported).replace("own_card", to_card)
    classes = [node for node in ast.parse(code).body if isinstance(node, ast.ClassDef)]
    equations = [node for node in classes if re.search("=|<-", str(ast.get_docstring(node)))]
    first = (equations or classes[-1:])[0]
    filled = {
        "name": name,
        "summary": str(ast.get_docstring(ast.parse(code))),
        "equation": str(ast.get_docstring(first)).partition("\n\n")[0].replace("\n", "\n    "),
        "use": f"import {imported}\n" + use.format(name=name),
    }
    stub = re.sub(r"\{(\w+)\}", lambda found: filled[found[1]], _template("card.md"))
    return {module: in_package(code) if checkout else code, test: checks, card: stub}


def _template(name: str) -> str:
    return (files(__package__) / "templates" / name).read_text(encoding="utf-8")


def _renamed(text: str, example: str, name: str) -> str:
    """The text with another name in place of the example's, in both ways of writing it."""

    def camel(words: str) -> str:
        return "".join(word.capitalize() for word in words.split("_"))

    return text.replace(example, name).replace(camel(example), camel(name))


def in_package(code: str) -> str:
    """The code with its imports of public names from where the package defines them: what is public stands above."""
    found: dict[str, list[str]] = {}
    lines = code.splitlines(keepends=True)
    imports = [
        node
        for node in ast.parse(code).body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("hf_xformers")
    ]
    for node in imports:
        homes = _homes(str(node.module))
        for alias in node.names:
            found.setdefault(homes[alias.name], []).append(alias.name)
    made = [f"from {module} import {', '.join(names)}\n" for module, names in sorted(found.items())]
    return "".join(lines[: imports[0].lineno - 1] + made + lines[int(str(imports[-1].end_lineno)) :])


def _homes(module: str) -> dict[str, str]:
    """Public name -> the file that it is imported from."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    origin = Path(spec.origin)
    stub = origin.with_suffix(".pyi")  # of packages whose names are loaded when they are used
    text = (stub if stub.exists() else origin).read_text(encoding="utf-8")
    package = module if origin.name == "__init__.py" else module.rpartition(".")[0]
    return {
        alias.name: f"{package}.{node.module}"
        for node in ast.parse(text).body
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
    }

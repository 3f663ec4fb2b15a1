"""Writes the type stubs of packages whose names are loaded when they are first used, for editors and type checkers.

python scripts/make_stubs.py [--check]      --check: writes nothing, and says whether a stub is out of date
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import hf_xformers
from hf_xformers.variants import model_types, public_names

ROOT = Path(hf_xformers.__file__).parent
_HEADER = "# Written by scripts/make_stubs.py.\n"


def lazy_packages() -> list[str]:
    """Sub-packages with a table `_NAMES`: name -> module that defines it."""
    return sorted(path.parent.name for path in ROOT.glob("*/__init__.py") if "\n_NAMES = {" in path.read_text())


def package_stub(package: str) -> str:
    module = importlib.import_module(f"hf_xformers.{package}")
    lines = [f"from .{source} import {name} as {name}" for name, source in sorted(module._NAMES.items())]
    listed = "".join(f'    "{name}",\n' for name in sorted(module._NAMES))
    return f"{_HEADER}{_sorted(lines)}\n__all__ = [\n{listed}]\n"


def top_stub() -> str:
    """Imports of what is defined in files, and a class for each head of a variant, which `make_family` makes."""
    names, modules = hf_xformers._NAMES, model_types()
    lines = [f"from .{source} import {name} as {name}" for name, source in names.items()]
    lines += [f"from . import {package} as {package}" for package in hf_xformers._PACKAGES]
    classes = []
    for model_type, found in public_names().items():
        module = importlib.import_module(modules[model_type])
        for name in found:
            cls = getattr(module, name)
            base = next(parent for parent in cls.__mro__[1:] if "variants" not in parent.__module__)
            if name in names:
                continue
            if name.endswith("Config"):
                lines.append(f"from .{_below(cls.__module__)} import {name} as {name}")
            elif name.startswith("XFormer"):  # the base classes themselves
                lines.append(f"from .{_below(cls.__module__)} import {cls.__name__} as {name}")
            else:
                lines.append(f"from .{_below(base.__module__)} import {base.__name__} as {base.__name__}")
                classes.append(f"class {name}({base.__name__}): ...")
    private = "__version__: str\n_NAMES: dict[str, str]\n_PACKAGES: tuple[str, ...]\n"
    return f"{_HEADER}{_sorted(set(lines))}\n{private}\n" + "\n".join(sorted(classes)) + "\n"


def _below(module: str) -> str:
    return module.removeprefix("hf_xformers.")


def _sorted(lines) -> str:
    return "\n".join(sorted(lines, key=lambda line: line.split()[1::2])) + "\n"


def stubs() -> dict[Path, str]:
    made = {ROOT / package / "__init__.pyi": package_stub(package) for package in lazy_packages()}
    return {ROOT / "__init__.pyi": top_stub(), **made}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check, stale = parser.parse_args().check, []
    for path, text in stubs().items():
        if not path.exists() or path.read_text() != text:
            stale.append(path.relative_to(ROOT.parent).as_posix())
            if not check:
                path.write_text(text)
    if stale:
        print("\n".join(f"{'out of date' if check else 'written'}: {name}" for name in stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())

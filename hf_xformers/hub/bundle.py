# SPDX-License-Identifier: Apache-2.0
"""Self-contained checkpoints: the code of the model goes with its weights, and nothing but transformers is needed to
use it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..adapters.bottleneck import STATE
from ..auto_classes import registered
from ..core.components import record_lookups
from ..core.saved_files import read_object, saving_into, write_text
from ..families import HEADS, SERVED
from .checkpoint_card import checkpoint_card
from .checkpoint_files import CONFIG, MARK, PROCESSOR, checkpoint_files
from .flattening import PACKAGE, Flattener, flat_name, unseen

# Packages whose modules share a file; the others' file names are known to the Auto classes, or to readers.
_JOINED = (
    *("core", "ops", "embedding", "position", "normalization", "attention", "feedforward", "blocks", "stacks"),
    *("heads", "modeling"),
)
_MARK = "# Part of hf_xformers"
# The image processor of models with one channel, the only one of this package.
_GREY = (f"{PACKAGE}.data.grey_images", "GreyImageProcessor")
_HEADER = (
    _MARK + " {version} (Apache-2.0), written with this checkpoint by `hf_xformers.hub.bundle`; source: {module}\n"
)

_SOURCE = re.compile(r"; source: (\w+)")  # the top-level module

# Loads the code in a folder as `trust_remote_code` does, in a process without the modules that it was made of.
_LOAD = """
import sys

folder, *hidden = sys.argv[1:]


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden())

from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
for reference in config.auto_map.values():
    get_class_from_dynamic_module(reference, folder)
"""

_AUTO_CLASSES = '''"""Stands for the registration with the Auto classes, which read a checkpoint's `auto_map`."""

from typing import Any

_CLASSES: dict[tuple[str, Any], dict[str, Any]] = {}


def register_config(config_class: Any) -> None:
    """Nothing to do: see above."""


def enter_type(auto: str, model_class: Any) -> None:
    """Nothing to do."""


def register_model(auto: str, config_class: Any, model_class: Any) -> None:
    """Notes the class for those of the checkpoint that are made of it."""
    _CLASSES.setdefault((auto, config_class), {})[model_class.__name__] = model_class


def registered(auto: str, config_class: Any) -> tuple[Any, ...]:
    """The classes that were entered under an Auto class for a config class."""
    return tuple(_CLASSES.get((auto, config_class), {}).values())
'''

_HEAD_CLASSES = '''"""The classes that the heads of this checkpoint derive from, by head name."""

from typing import Any

{imports}

CLASSES: dict[str, Any] = {{
{rows}}}
MODALITY_CLASSES: dict[str, Any] = {{}}
'''

_DISCOVERY = '''"""The components that this checkpoint's config names, or could have named by default."""


PLUGINS = "hf_xformers.components"


def import_room(room: str, module: str | None = None) -> None:
    """Imports all of them; they register themselves."""
{components}


def import_plugins() -> None:
    """Nothing to do: those of other packages are here, too."""


def _others() -> None:
    """Never called: transformers copies the files that it finds in import statements."""
{others}
'''


# The loader copies the code once for each file that `auto_map` names, and classes of two copies are not the same.
_MODELS = '''

_MODELS = {table}


def __getattr__(name: str) -> Any:
    """A model's class, which `auto_map` names in this file, so that there is one copy of the code."""
    if name not in _MODELS:
        raise AttributeError(f"module {{__name__!r}} has no attribute {{name!r}}")
    from importlib import import_module

    found = getattr(import_module(f".{{_MODELS[name]}}", __package__), name)
    found.__module__ = __name__  # what is saved again names it here, too
    return found
'''


def bundle(checkpoint: Any, directory: str | Path, *, all_heads: bool = False) -> Path:
    """Writes a checkpoint with the code that it needs, so that
    `AutoModel....from_pretrained(directory, trust_remote_code=True)` works with transformers and torch alone.

    checkpoint: a model of this package, or the folder of one (weights as safetensors). directory: where the result
    goes; the checkpoint's own folder is allowed. all_heads: carry the classes of every head of the family, for those
    who want to fine-tune it for something else; by default those of the saved head and of the bare model. The code is
    this package's, as it is installed: only the files that the config's components need, flat in the folder, and
    `auto_map` in `config.json`. Where this package is installed and imported, the checkpoint loads with the installed
    code as before.

    A card (README.md) is written where the checkpoint has none of its own.

    Returns the directory. Raises `ValueError` for what is no checkpoint of this package, for components whose code
    stands in no importable file or does not load without this package, and for a directory that holds something else.
    """
    from transformers import PreTrainedModel

    target = Path(directory).expanduser()
    own = checkpoint if isinstance(checkpoint, (str, Path)) else getattr(checkpoint, "name_or_path", None)
    _refuse_full(target, Path(own).expanduser() if own else None)
    if isinstance(checkpoint, (str, Path)):
        source = Path(checkpoint).expanduser()
        files = checkpoint_files(source)
        config = load_config(source)
        heads = kept_heads(config, all_heads=all_heads)
        code = code_files(config, heads)
        with saving_into(target) as staging:
            for name, path in files.items():
                if path.resolve() != (target / name).resolve():
                    (staging / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, staging / name)
            _write_code(staging, code, source, config, heads)
    else:
        if not isinstance(checkpoint, PreTrainedModel):
            raise ValueError(
                f"a bundle is made of a model or of the folder of a checkpoint, got {type(checkpoint).__name__}; give "
                "a model of this package (of a PEFT model, what `merge_and_unload` returns)"
            )
        adapters = getattr(checkpoint, STATE, None)
        if adapters is not None and adapters.configs:
            raise ValueError(
                f"the model has the adapter {next(iter(adapters.configs))!r}, which the code of a bundle does not put"
                " in; save that with `save_adapter`, and bundle the model without it"
            )
        heads = kept_heads(checkpoint.config, type(checkpoint).__name__, all_heads=all_heads)
        code = code_files(checkpoint.config, heads)
        with saving_into(target) as staging:
            checkpoint.save_pretrained(staging)
            config = load_config(staging)
            _write_code(staging, code, staging, config, heads)
    for old in target.glob("*.py"):  # of an earlier bundle in this place
        if old.name not in code and old.read_text(encoding="utf-8", errors="replace").startswith(_MARK):
            old.unlink()
    readme = target / "README.md"
    if not readme.exists() or MARK in readme.read_text(encoding="utf-8", errors="replace"):  # nobody's own text
        card = checkpoint_card(target, target.resolve().name, self_contained=True)
        write_text(readme, str(card))
    return target


def _refuse_full(target: Path, own: Path | None) -> None:
    """Raises ValueError for a folder with other things in it than the checkpoint itself or an earlier bundle."""
    held = sorted(path.name for path in target.glob("[!.]*")) if target.is_dir() else []
    if not held or (own is not None and target.resolve() == own.resolve()):
        return
    if CONFIG not in held or "auto_map" not in read_object(target / CONFIG):
        raise ValueError(
            f"{str(target)!r} holds other files ({held[0]!r}); give an empty folder, an earlier bundle, or the"
            " checkpoint's own folder"
        )


def _write_code(folder: Path, code: dict[str, str], source: Path, config: Any, heads: tuple[str, ...]) -> None:
    described = with_auto_maps(source, config, heads)
    refuse_broken(code, described[CONFIG])
    for name, text in {**code, **described}.items():
        (folder / name).write_text(text, encoding="utf-8")


def refuse_broken(code: dict[str, str], config_json: str) -> None:
    """Raises `ValueError` for code of other packages that a fresh process without them and this package cannot load.

    config_json: with `auto_map`. That the code of this package alone loads is what its tests make sure of.
    """
    modules = sorted({found[1] for text in code.values() if (found := _SOURCE.search(text))})
    if modules == [PACKAGE]:
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "checkpoint")
        folder.mkdir()
        for name, text in {**code, CONFIG: config_json}.items():
            (folder / name).write_text(text, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-P", "-c", _LOAD, str(folder), *modules],
            capture_output=True,
            text=True,
            cwd=scratch,
            env={**os.environ, "HF_MODULES_CACHE": str(Path(scratch, "modules")), "HF_HUB_OFFLINE": "1"},
        )
    if done.returncode:
        own = " and ".join(repr(module) for module in modules if module != PACKAGE)
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(
            f"the code of {own} cannot be loaded from a checkpoint in a fresh process ({said.rstrip('.')}); let it"
            " need nothing but names that it imports, and packages that others can install"
        )


def load_config(folder: Path) -> Any:
    """The config of a checkpoint folder. Raises `ValueError` if it is none of this package's."""
    from transformers import CONFIG_MAPPING

    from ..configuration_xformer import XFormerConfig
    from ..training.run_folder import saved_config

    model_type = str(saved_config(folder).get("model_type"))
    if model_type not in CONFIG_MAPPING or not issubclass(CONFIG_MAPPING[model_type], XFormerConfig):
        raise ValueError(
            f"{str(folder)!r} holds a model of type {model_type!r}, which is none of this package's; transformers' own"
            " models need no code, and `hf-xformers convert` makes variants of some"
        )
    return CONFIG_MAPPING[model_type].from_pretrained(folder)


def kept_heads(config: Any, architecture: str | None = None, *, all_heads: bool = False) -> tuple[str, ...]:
    """The heads that a checkpoint's code needs: that of `architecture` (by default the class that the config names)
    with those that it is made of, those that its variant writes out, and none; all of the family's where nothing says
    which it is."""
    config_class = _installed(type(config))
    classes = (architecture,) if architecture is not None else tuple(config.architectures or ())
    made = {head: _class_of(config_class, head) for head in config_class.heads}
    named = {head for head, cls in made.items() if cls.__name__ in classes}
    parts = {part for head in named for part in made[head].made_of}
    own = {head: cls for head, cls in made.items() if cls.__module__ == config_class.__module__}
    written = {head for head, cls in own.items() if any(base.__module__ == cls.__module__ for base in cls.__bases__)}
    kept = named | parts | written | {"Model"}
    return tuple(head for head in config_class.heads if all_heads or not named or head in kept)


def with_auto_maps(folder: Path, config: Any, heads: tuple[str, ...]) -> dict[str, str]:
    """File name -> text of the files of a checkpoint in which the Auto classes find the code."""
    found = {CONFIG: _with_auto_map((folder / CONFIG).read_text(encoding="utf-8"), config, heads)}
    processor = read_object(folder / PROCESSOR) if (folder / PROCESSOR).is_file() else {}
    if processor.get("image_processor_type") == _GREY[1]:
        entries = {"AutoImageProcessor": f"{flat_name(_GREY[0])}.{_GREY[1]}"}
        found[PROCESSOR] = json.dumps({**processor, "auto_map": entries}, indent=2, sort_keys=True) + "\n"
    return found


def _with_auto_map(config_json: str, config: Any, heads: tuple[str, ...]) -> str:
    fields = json.loads(config_json)
    config_class = _installed(type(config))
    classes = fields.get("architectures") or ()  # before others that the same Auto class would find
    entries = auto_map(
        config_class, sorted(heads, key=lambda head: _class_of(config_class, head).__name__ not in classes)
    )
    return json.dumps({**fields, "auto_map": entries}, indent=2, sort_keys=True) + "\n"


def auto_map(config_class: Any, heads: Sequence[str]) -> dict[str, str]:
    """Auto class -> `file.Class`, for the config and these heads of its family; the file is the config's."""
    classes = {"AutoConfig": config_class, **model_classes(config_class, heads)}
    return {auto: f"{flat_name(config_class.__module__)}.{cls.__name__}" for auto, cls in classes.items()}


def model_classes(config_class: Any, heads: Iterable[str]) -> dict[str, Any]:
    """Auto class -> model class of heads of a family, the first where several share one."""
    found: dict[str, Any] = {}
    for head in heads:
        for auto in (HEADS[head], SERVED.get(head)):
            if auto is not None:
                found.setdefault(auto, _class_of(config_class, head))
    return found


def _class_of(config_class: Any, head: str) -> Any:
    """A family's class with this head."""
    return next(made for made in registered(HEADS[head], config_class) if made.__name__.endswith(head))


def code_files(config: Any, heads: tuple[str, ...]) -> dict[str, str]:
    """File name -> source of the code that a config's model needs with any of these heads of its family."""
    from .. import _NAMES, __version__

    config_class = _installed(type(config))
    parts = sorted(_component_modules(config_class, config.to_dict(), heads))
    discovery, auto, table = (
        f"{PACKAGE}.{name}" for name in ("core.discovery", "auto_classes", "modeling.head_classes")
    )
    names = {name: f"{PACKAGE}.{module}" for name, module in _NAMES.items()}
    flattener = Flattener({discovery: "", auto: _AUTO_CLASSES, table: _head_classes(config_class, heads)}, names)
    models = {cls.__name__: cls.__module__ for cls in model_classes(config_class, heads).values()}
    grey = [_GREY[0]] if config.modality == "image" and config.num_channels == 1 else []
    flattener.add([config_class.__module__, *models.values(), discovery, *parts, *grey])
    flattener.join(_JOINED, {config_class.__module__})  # which `auto_map` names
    files = flattener.files()
    elsewhere = {name: flattener.home(home) for name, home in models.items() if home != config_class.__module__}
    if elsewhere:
        files[f"{flat_name(config_class.__module__)}.py"] += _MODELS.format(table=json.dumps(elsewhere, indent=4))
    imported = [f"from .{home} import __name__" for home in sorted({flattener.home(module) for module in parts})]
    discovery_file = f"{flat_name(discovery)}.py"
    files[discovery_file] = _DISCOVERY.format(components=_body(imported), others="    pass")
    hidden = unseen(files, flat_name(discovery))
    files[discovery_file] = _DISCOVERY.format(
        components=_body(imported), others=_body(f"from .{name} import __name__" for name in hidden)
    )
    sources: dict[str, str] = {}
    for module in flattener.sources:
        name, path = f"{flattener.home(module)}.py", module.replace(".", "/") + ".py"
        sources[name] = path if name == f"{flat_name(module)}.py" else "/".join(module.split(".")[:2])
    return {name: _HEADER.format(version=__version__, module=sources[name]) + text for name, text in files.items()}


def _head_classes(config_class: Any, heads: tuple[str, ...]) -> str:
    """The table of `head_classes` with these heads alone."""
    from ..modeling.head_classes import CLASSES, MODALITY_CLASSES

    known = {**CLASSES, **MODALITY_CLASSES.get(config_class.modality, {})}
    chosen = {name: known[name] for name in heads}
    imports = sorted(f"from {cls.__module__} import {cls.__name__}" for cls in chosen.values())
    rows = "".join(f'    "{name}": {cls.__name__},\n' for name, cls in chosen.items())
    return _HEAD_CLASSES.format(imports="\n".join(imports), rows=rows)


def _body(lines: Iterable[str]) -> str:
    return "\n".join(f"    {line}" for line in lines) or "    pass"


def _installed(config_class: Any) -> Any:
    """The config class itself; for one that came with a self-contained checkpoint, the installed one of its model
    type."""
    from transformers import CONFIG_MAPPING

    if config_class.__module__.startswith("transformers_modules.") and config_class.model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[config_class.model_type]
    if not getattr(config_class, "heads", ()):
        raise ValueError(
            f"{config_class.__name__} belongs to no family of this package; a self-contained checkpoint is made of a"
            " model whose classes `make_family` made"
        )
    return config_class


def _component_modules(config_class: Any, fields: dict[str, Any], heads: tuple[str, ...]) -> set[str]:
    """The modules of every component that is looked up when this config, its variant's default, or either in the shape
    of one of these heads is built, or those of the models that a head is made of."""
    given = {key: value for key, value in fields.items() if key not in ("model_type", "transformers_version")}
    shapes: list[dict[str, Any]] = [{}]
    if "ForCausalLM" in heads:
        shapes.append({"is_decoder": True, "is_encoder_decoder": False})
    if "ForSeq2SeqLM" in heads:
        shapes.append({"is_decoder": False, "is_encoder_decoder": True})
    if len(shapes) > 1:
        shapes.append({"is_decoder": False, "is_encoder_decoder": False})
    with record_lookups() as found:
        for base in ({}, given):
            for shape in shapes:
                try:
                    made = config_class(**{**base, **shape})
                except ValueError:  # a shape that these components cannot have
                    if not shape:
                        raise
                    continue
                for head in heads:
                    with contextlib.suppress(ValueError):  # a head that this config cannot have
                        _class_of(config_class, head).part_configs(made)
    return {spec.__module__ for spec in found}

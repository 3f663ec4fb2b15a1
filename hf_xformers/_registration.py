# SPDX-License-Identifier: Apache-2.0
"""Makes every variant known to transformers' Auto classes and to peft as soon as those exist, without importing torch
for it.

transformers imports torch only when its Auto classes are first used. Importing `hf_xformers` keeps to that: it enters
the model types with lazy values, at once if the Auto classes are loaded already, else right after they load. In the
same way peft, which is imported only by who adapts a model, learns which modules of every family its methods adapt.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from typing import Any

from . import compat
from .core.discovery import import_plugins

_AUTO = "transformers.models.auto.configuration_auto"
_MODELS = "transformers.models.auto.modeling_auto"
_ADAPTED = "peft.utils.constants"
_IMAGES = "transformers.models.auto.image_processing_auto"
_AUTO_ADAPTED = "peft.auto"
# A model of transformers with the same names of projections: what peft adapts of it, it adapts of ours.
_NAMED_ALIKE = "llama"
# What LoRA adapts unless it is told otherwise: the maps by which a mechanism mixes tokens, by their last names. Those
# of `_MIXES_BY_NETWORK` do so by what other families call a feed-forward network.
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "r_proj", "t_proj", "query_proj", "key_proj", "content_proj"),
    *("beta_proj", "decay_proj", "hidden_proj", "kernel_proj", "input_proj", "state_proj", "compress_proj"),
    *("low_q_proj", "low_k_proj", "low_v_proj", "pack_q_proj", "pack_k_proj", "token_k_proj", "weight_proj"),
    *("q_pool_proj", "k_pool_proj", "v_pool_proj", "q_global_proj", "k_global_proj", "v_global_proj"),
    *("global_o_proj", "task_proj", "pointwise", "forget_proj", "branch_proj", "q_down_proj", "kv_down_proj"),
    *("decay_down_proj", "decay_up_proj", "gate_down_proj", "gate_up_proj", "rate_down_proj", "rate_up_proj"),
    *("value_down_proj", "value_up_proj"),
)
_MIXES_BY_NETWORK: dict[str, tuple[str, ...]] = {"xf_average_attention": ("gate_proj", "up_proj", "down_proj")}
# Where the parameters of norms are by other names than `norm` and `final_norm`. AdaNorm has none.
_NORMS: dict[str, tuple[str, ...]] = {
    **{"xf_adanorm": (), "xf_complex_order": ("norm.norm", "final_norm.norm")},
    **dict.fromkeys(("xf_switch_transformer", "xf_t5"), ("norm", "final_norm.0")),
}


class LazyVariants(dict):
    """Model type -> config class; a value is imported when it is first read."""

    def __init__(self, existing: dict[str, Any], modules: dict[str, str]):
        super().__init__(existing)
        self._modules = {name: module for name, module in modules.items() if name not in existing}

    def __missing__(self, key: str) -> Any:
        module = self._modules[key]  # KeyError for an unknown model type, as from any dict
        importlib.import_module(module)  # registers, which stores the class here
        return dict.__getitem__(self, key)

    def __contains__(self, key: object) -> bool:
        if dict.__contains__(self, key) or key in self._modules:
            return True
        import_plugins()  # one of which may make a family of this type
        return dict.__contains__(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter([*dict.keys(self), *(name for name in self._modules if not dict.__contains__(self, name))])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def keys(self):
        return list(iter(self))

    def values(self) -> ValuesView:  # type: ignore[override]
        return {key: self[key] for key in self}.values()

    def items(self) -> ItemsView:  # type: ignore[override]
        return {key: self[key] for key in self}.items()

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def __reduce__(self):
        return (dict, (dict(self.items()),))


def _enter(auto_module: Any) -> None:
    from .variants import model_types

    mapping = auto_module.CONFIG_MAPPING
    existing = compat.registered_types(mapping)
    if existing is not None:
        compat.set_registered_types(mapping, LazyVariants(existing, model_types()))
    else:  # another release of transformers keeps its entries elsewhere: register through the front door
        for module in model_types().values():
            importlib.import_module(module)


def _enter_names(auto_module: Any) -> None:
    """What their classes are called, before any is imported, for who goes by names."""
    from .auto_classes import NAMED_AT, enter_name
    from .variants import public_names

    names = [name for classes in public_names().values() for name in classes]
    for auto, auto_class in list(vars(auto_module).items()):
        if auto.startswith("AutoModelFor") and hasattr(auto_class, "_model_mapping"):
            endings = (auto.removeprefix("AutoModel"), *(head for head, other in NAMED_AT.items() if other == auto))
            for name in names:
                if name.endswith(endings):
                    enter_name(auto_class, name)


def _enter_targets(constants: Any) -> None:
    """Every method's default target modules, in peft's own tables: one per method, by model type."""
    from .core.other_families import tell_of_families
    from .variants import model_types

    for name, table in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict) and _NAMED_ALIKE in table:
            usual: tuple[str, ...] = ()
            targets, more = table[_NAMED_ALIKE], _MIXES_BY_NETWORK
            if name == "TRANSFORMERS_MODELS_TO_LNTUNING_TARGET_MODULES_MAPPING":  # norms, ours by other names
                targets, more, usual = (), _NORMS, ("norm", "final_norm")
            elif name == "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING":
                targets, more = PROJECTIONS, _MIXES_BY_NETWORK
            for model_type in model_types():
                table.setdefault(model_type, [*targets, *more.get(model_type, usual)])
            tell_of_families(functools.partial(_fill, table, (*targets, *usual)))


def _fill(table: dict[str, list[str]], usual: Iterable[str], model_type: str) -> None:
    table.setdefault(model_type, [*usual])


def _enter_import(auto: Any) -> None:
    """An adapter that was saved without a task names the class of its base model, which peft imports from packages
    that it knows alone."""
    known = getattr(auto, "get_default_import_allowlist", None)
    if known is not None:
        auto.get_default_import_allowlist = lambda: [*known(), "hf_xformers"]


def _enter_processors(_: Any) -> None:
    """Image processors of our own, where Pillow is there to read images with."""
    if importlib.util.find_spec("PIL") is not None:
        importlib.import_module("hf_xformers.data.grey_images")  # which registers


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs `enter` on a module once, right after it is imported."""

    def __init__(self, name: str, enter: Callable[[Any], None]):
        self.name, self.enter = name, enter

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module):
            execute(module)
            self.enter(module)

        loader.exec_module = exec_module
        return spec


def install() -> None:
    """Called once by the package's import."""
    for name, enter in (
        (_AUTO, _enter),
        (_MODELS, _enter_names),
        (_ADAPTED, _enter_targets),
        (_AUTO_ADAPTED, _enter_import),
        (_IMAGES, _enter_processors),
    ):
        if name in sys.modules:
            enter(sys.modules[name])
        else:
            sys.meta_path.insert(0, _AfterImport(name, enter))

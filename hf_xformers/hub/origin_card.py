# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's card says of components that are not its family's own: what they are, and what they were put in
place of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..configuration_xformer import XFormerConfig
from ..conversion.linearization import read_linearization
from ..conversion.provenance import Provenance, read_provenance
from ..core.components import SLOTS, build_spec
from ..families import VariantInfo
from .training_record import is_hub_id


@dataclass
class Origin:
    """
    Args:
        summary: a sentence; None where the family's own says it.
        sections: Markdown.
        infos: whose papers to cite.
        citations: BibTeX of other papers.
        base: Hub id of the first source.
    """

    summary: str | None = None
    sections: list[str] = field(default_factory=list)
    infos: list[VariantInfo] = field(default_factory=list)
    citations: list[str] = field(default_factory=list)
    base: str | None = None


def origin_of(folder: Path, config: Any, architecture: str) -> Origin:
    """What the model of a checkpoint folder, of the configuration `config`, was made of.

    Raises:
        ValueError: the folder's account of a conversion is damaged.
    """
    from ..variants import config_class

    known = read_provenance(folder)
    steps = [] if known is None else known.steps()
    family = steps[0].variants[0] if steps else config.model_type
    start = type(config) if family == config.model_type else config_class(family)  # it may be of another package
    mechanisms = _mechanisms(config, _before(config, steps) if steps else start())
    if known is None and config.model_type != "xformer":
        return Origin(infos=[config.info])
    origin = Origin(infos=[start.info] if family != "xformer" else [])
    if steps and is_hub_id(steps[0].source, "model"):
        origin.base = steps[0].source
    if known is not None:
        origin.sections += _steps(steps)
    linearized = read_linearization(folder)
    if linearized is not None:
        origin.sections += ["## Linearization", "\n".join(f"- {line}" for line in linearized.sentences())]
    parts = [f"{slot} `{new}` in place of `{old}`" for slot, old, new in mechanisms]
    if steps:
        was = f"`{origin.base}`" if origin.base else f"a trained `{steps[0].classes[0]}`"
        paper = "" if family == "xformer" else f" ({start.info.paper})"  # the free mix is how any family is written
        what = f"{was}{paper} with {', '.join(parts)}" if parts else f"{was}, converted"
    else:
        what = f"a Transformer with {', '.join(parts)}" if parts else "the vanilla Transformer"
    origin.summary = f"`{architecture}`: {what}."
    shown = []
    for slot, _, new in mechanisms:
        info = mechanism_info(slot, new)
        if info is not None and info not in origin.infos:
            origin.infos.append(info)
            text = f"**{slot} `{new}`**: the Transformer with {info.summary} ([{info.paper}]({info.url}))."
            shown.append(f"{text} Cost of that variant in T tokens: {info.cost}.\n\n$$\n{info.equation}\n$$")
        spec = build_spec(slot, new)
        if info is None and spec.citation:
            origin.citations.append(spec.citation)
            shown.append(f"**{slot} `{new}`**: {spec.summary}.")
    if shown:
        origin.sections += ["## Mechanism", *shown]
    origin.infos.append(config_class("xformer").info)  # the survey, which the free mix is after
    return origin


def mechanism_info(slot: str, name: str) -> VariantInfo | None:
    """What the variants say of a component: the one that is called as it is, or the only one that has it."""
    from ..variants import config_class, model_types

    own = f"xf_{name}"
    names = [own] if own in model_types() else list(model_types())
    found = [config_class(key) for key in names if name in _components(config_class(key)(), slot)]
    return found[0].info if len(found) == 1 else None


def _components(config: Any, slot: str) -> set[str]:
    """What the layers of a config, of its encoder where it has two towers, have in a slot."""
    return {getattr(layer, slot).type for layer in config.tower("trunk").layer_configs()}


def _before(config: Any, steps: list[Provenance]) -> Any:
    """The configuration from which `steps` led to `config`, as far as they say; `config` itself where they do not."""
    fields = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
    for step in reversed(steps):
        fields |= {name: change[0] for name, change in step.changes.items()}
    try:
        return XFormerConfig(**fields)
    except (TypeError, ValueError):
        return config


def _mechanisms(config: Any, start: Any) -> list[tuple[str, str, str]]:
    """(slot, component of the start, component of the config), where the two differ in some layer of some tower."""
    found: list[tuple[str, str, str]] = []
    towers = start.tower_configs()
    for tower, before in zip(config.tower_configs(), [*towers, towers[-1]]):
        for index in range(tower.num_hidden_layers):
            layer, other = tower.layer(index), before.layer(min(index, before.num_hidden_layers - 1))
            for slot in SLOTS:
                old, new = getattr(other, slot).type, getattr(layer, slot).type
                if old != new and (slot, old, new) not in found:
                    found.append((slot, old, new))
    return found


def _steps(steps: list[Provenance]) -> list[str]:
    lines = []
    for step in steps:
        where = f"`{step.source}`" if is_hub_id(step.source, "model") else f"a saved `{step.classes[0]}`"
        counts = ", ".join(f"{count} {name}" for name, count in step.tensors.items())
        text = f"- {where} -> `{step.classes[1]}`: tensors {counts}."
        for name, change in step.changes.items():
            before, after = (_short(value) for value in change)
            text += f"\n  - `{name}`: {before} -> {after}" if before != after else f"\n  - `{name}`: other settings"
        if step.movement:
            text += f"\n  - outputs, before any further training: {step.movement}"
        lines.append(text)
    return ["## Origin", "\n".join(lines)]


def _short(value: Any) -> str:
    """A component by its name; of several by layer or tower, each."""
    if not isinstance(value, dict):
        return "none" if value is None else str(value)
    if "type" in value:
        return str(value["type"])
    return ", ".join(f"{key}: {_short(part)}" for key, part in value.items())

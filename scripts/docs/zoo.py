"""The zoo's pages: one per variant, one per slot with its components."""

from __future__ import annotations

import inspect
from typing import Any

from hf_xformers.cli.descriptions import own_components, own_defaults, replaced
from hf_xformers.core.components import SLOTS, build_spec
from hf_xformers.families import SURVEY, survey_number
from hf_xformers.hub.model_card import PIPELINES, caption, example, shapes
from hf_xformers.hub.purposes import purposes

from . import catalog, pictures, results
from .fields import config_fields, spec_fields
from .markup import Pages, code, link, page, prose, source_link, table

ABOUT_SLOTS = {
    "embedding": "What tokens, pixels or values become before the first layer.",
    "position": "How a model encodes where a token is: added to the input, as a rotation or bias of scores, or as a"
    " layer of its own.",
    "attention": "How tokens read one another. The same components serve as `cross_attention`, where a decoder reads"
    " an encoder.",
    "normalization": "What keeps activations at one scale.",
    "residual": "Where the norm is, and how a sublayer's output joins what came in.",
    "feedforward": "What every token does by itself between two attentions.",
    "block": "How sublayers are arranged in a layer.",
    "stack": "Which layers run, in which order and how often, and what travels next to the tokens.",
    "head": "From hidden states to predictions.",
}
CAPABILITIES = {
    "attention": {
        "causal": "in a decoder",
        "bidirectional": "in an encoder",
        "cross": "as cross-attention",
        "score_bias": "with a bias on scores",
        "rotation": "with rotated queries and keys",
        "packed_rows": "with packed documents",
        "context_parallel": "with texts shared between devices",
    },
    "position": {"max_length": "beyond the trained length", "needs_causal": "in decoders only"},
    "stack": {"packed_rows": "with packed documents", "unpadding": "with padding removed"},
    "block": {"packed_rows": "with packed documents", "unpadding": "with padding removed"},
}


def pages() -> Pages:
    """Every page of the zoo but the taxonomy."""
    made = {catalog.variant_page(name): variant(name) for name in catalog.variants()}
    made |= {catalog.component_page(slot): slot_page(slot) for slot in catalog.SLOT_NAMES}
    made["zoo/components/index.md"] = slots_page()
    return made


def variant(name: str) -> str:
    """The page of a variant."""
    cls = catalog.variants()[name]
    info, here, purpose = cls.info, catalog.variant_page(name), purposes()[name]
    first = " ".join((cls.__doc__ or "").strip().split("\n\n")[0].split())
    main = next((head for head in PIPELINES if head in cls.heads), "Model")
    prefix = cls.__name__.removesuffix("Config")
    section = SURVEY[info.section]
    where = section.title.lower()
    if number := survey_number(info.section):
        where = f"section {number} of the survey, {where}"
    facts = [
        ("Changes", info.summary),
        ("Section", link(where, here, "zoo/index.md")),
        ("Architectures", ", ".join(shapes(cls))),
        ("Cost", prose(f"{info.cost} (T tokens, width D)")),
        ("Paper", f"[{info.paper}]({info.url})"),
        ("Source", source_link(catalog.file_of(cls))),
    ]
    own = own_defaults(cls)
    return page(
        catalog.variant_title(name),
        prose(first) if name != "xformer" else "The plain Transformer with any component in any slot.",
        purpose.markdown(lambda other: link(catalog.variant_title(other), here, catalog.variant_page(other))),
        "## At a glance",
        "\n".join(f"- **{key}:** {text}" for key, text in facts if text),
        f"```console\nhf-xformers pretrain --variant {name} --data stdlib --output_dir runs/{name}\n```"
        if cls.modality == "text" and name != "xformer"
        else "",
        "## Equation",
        f"$$\n{info.equation}\n$$",
        prose(purpose.symbols),
        info.notes,
        pictures.of_variant(name, caption(cls)),
        "## Components",
        "What differs from the plain Transformer is in bold, with its fields below.",
        _components(cls, here),
        *_own_fields(cls, here),
        *(
            (
                "## Fields with defaults of its own",
                config_fields(cls, list(own)),
                "The others are those of " + link("every configuration", here, "api/configs.md") + ".",
            )
            if own
            else ()
        ),
        *results.measured(name, here),
        "## Use",
        f"```python\n{example(cls, main)}\n```",
        "Classes: " + ", ".join(code(prefix + head) for head in cls.heads) + ".",
        "## Paper",
        f"[{info.paper}]({info.url})",
        f"```bibtex\n{info.citation}\n```",
        description=first,
    )


def _components(cls: Any, here: str) -> str:
    config = cls()
    changed, found = replaced(config), own_components(config)
    rows = []
    for slot, spec in found:
        room = "attention" if slot == "cross_attention" else slot
        name = link(spec.type, here, catalog.component_page(room, spec.type))
        several = sum(other == slot for other, _ in found) > 1
        rows.append(
            {
                "slot": code(slot),
                "component": f"**{name}**" if (slot, spec) in changed else name,
                "what it does": prose(spec.summary) + (" (some layers)" if several else ""),
            }
        )
    return table(rows)


def _own_fields(cls: Any, here: str) -> list[str]:
    """The fields of the components that a variant changes, each component once."""
    parts, shown = [], []
    for slot, spec in replaced(cls()):
        fields = spec_fields(type(spec), spec)
        if spec in shown or not fields:
            continue
        shown.append(spec)
        parts += [f"### {slot}: {spec.type}", fields]
    return parts


def slots_page() -> str:
    here = "zoo/components/index.md"
    rows = [
        {
            "slot": link(slot, here, catalog.component_page(slot)),
            "what it is": ABOUT_SLOTS[slot],
            "components": len(catalog.components(slot)),
        }
        for slot in catalog.SLOT_NAMES
    ]
    return page(
        "Components",
        "A model is the plain Transformer with a component in each of these slots. A component is a name, or a name"
        " with fields:",
        '```python\nfrom hf_xformers import XFormerConfig\n\nconfig = XFormerConfig(attention="longformer",'
        ' position={"type": "rotary", "theta": 50_000.0}, residual="pre_ln")\n```',
        "Combinations that cannot work are refused when the config is built, in a sentence that says what would.",
        table(rows),
    )


def slot_page(slot: str) -> str:
    """The page of a slot with all of its components."""
    here = catalog.component_page(slot)
    parts = [ABOUT_SLOTS[slot], f"```console\nhf-xformers list --components {slot}\n```", _overview(slot)]
    for name, spec in catalog.components(slot).items():
        parts += component(slot, name, spec, here)
    return page(f"{slot.capitalize()} components", *parts)


def _overview(slot: str) -> str:
    return table(
        {"component": f"[{name}](#{name})", "what it does": prose(spec.summary)}
        for name, spec in catalog.components(slot).items()
    )


def _can(slot: str, spec: Any, key: str) -> bool:
    if key == "max_length":
        return spec.max_length is SLOTS["position"].get("none").max_length
    usual: Any = build_spec(slot, spec.type)
    if key in {*getattr(usual, "acts", ()), *usual.supports}:
        return True
    return key not in usual.why_not if key == "causal" else getattr(usual, key, False) is True


def component(slot: str, name: str, spec: Any, here: str) -> list[str]:
    """The part of a slot's page about one component."""
    also = [alias for alias, known in SLOTS[slot]._aliases.items() if known == name]
    built = catalog.built_class(spec)
    text = inspect.cleandoc(built.__doc__ or "") if built is not None else ""
    used = [variant for variant in catalog.users().get((slot, name), ()) if variant != "xformer"]
    able = [text for key, text in CAPABILITIES.get(slot, {}).items() if _can(slot, spec, key)]
    shown = [link(catalog.variant_title(variant), here, catalog.variant_page(variant)) for variant in used[:12]]
    facts = {
        "Also called": ", ".join(map(code, also)),
        "Works": ", ".join(able),
        "In variants": ", ".join(shown) + (f" and {len(used) - 12} more" if len(used) > 12 else ""),
        "Source": source_link(catalog.file_of(spec)),
    }
    return [
        f"## {name} {{ #{name} }}",
        prose(spec.summary[:1].upper() + spec.summary[1:] + "."),
        "\n".join(f"- **{key}:** {value}" for key, value in facts.items() if value),
        spec_fields(spec),
        f'??? note "Equation and source"\n\n    ```text\n{_indented(text)}\n    ```' if text else "",
    ]


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())

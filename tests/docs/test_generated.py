"""The generated pages: the same at every build, one for everything that is registered, all reachable, links alive."""

from __future__ import annotations

import dataclasses
import posixpath
import re

import pytest

from hf_xformers.configuration_xformer import XFormerConfig
from hf_xformers.core.components import SLOTS
from hf_xformers.core.field_docs import meanings
from hf_xformers.objectives import OBJECTIVES
from hf_xformers.variants import model_types
from scripts.docs import assemble, catalog, objectives, results, survey, taxonomy, zoo
from scripts.docs.markup import ROOT, Pages


@pytest.fixture(scope="module")
def pages() -> Pages:
    return assemble.generated()


def links(text: str) -> set[str]:
    """The targets of a page's links, without code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)
    return set(re.findall(r"\]\(([^)\s]+)\)", text))


def test_generation_is_deterministic(pages):
    catalog.users.cache_clear()
    for made in (zoo.slot_page("attention"), zoo.variant("luna"), taxonomy.taxonomy(), results.result("mechanisms")):
        assert made in pages.values()
    assert objectives.objective("mlm", catalog.objectives()["mlm"]) == pages["objectives/mlm.md"]


def test_everything_registered_has_a_page(pages):
    for model_type in model_types():
        assert f"zoo/{model_type.removeprefix('xf_')}.md" in pages
    for slot, registry in SLOTS.items():
        if slot != "cross_attention":
            for name in registry:
                assert f"{{ #{name} }}" in pages[f"zoo/components/{slot}.md"]
    for name in OBJECTIVES:
        assert f"objectives/{name}.md" in pages


def test_the_taxonomy_leads_to_everything(pages):
    found = links(pages["zoo/index.md"])
    assert {f"{model_type.removeprefix('xf_')}.md" for model_type in model_types()} <= found
    assert {f"../objectives/{name}.md" for name in OBJECTIVES} <= found
    for slot, registry in SLOTS.items():
        if slot != "cross_attention":
            assert f"components/{slot}.md" in found
            assert {f"#{name}" for name in registry} <= links(pages[f"zoo/components/{slot}.md"])


def test_links_between_generated_pages_are_alive(pages):
    files = set(pages) | set(assemble.pictures.files())
    for path, text in pages.items():
        for target in links(text):
            address, _, anchor = target.partition("#")
            if "//" in address or address.endswith(".ipynb") or "plots/" in address or "trained_maps/" in address:
                continue
            goal = posixpath.normpath(posixpath.join(posixpath.dirname(path), address)) if address else path
            written = (ROOT / "docs" / goal).exists()
            assert goal in files or written, f"{path} links to {target}"
            if anchor and goal in pages:
                assert f"{{ #{anchor} }}" in pages[goal], f"{path} links to {target}"


def test_systems_are_found_by_name(pages):
    text = pages["zoo/index.md"]
    for name in (
        "Luna",
        "DPFP",
        "RoPE",
        "SwiGLU",
        "Swin Transformer",
        "KnowBERT",
        "ViLBERT",
        "Conformer",
        "TNT",
        "AAN",
    ):
        assert re.search(rf"\b{name}\b", text), name
    for _, system in survey.names_only():
        assert system.name in pages["zoo/names.md"] and system.name in text


def test_a_new_variant_is_in_the_taxonomy_by_itself(monkeypatch):
    from hf_xformers.variants import config_class

    catalog.variants()
    monkeypatch.setattr(catalog, "variants", lambda: {"brand_new": config_class("luna")})
    found = {system.at: system.name for system in taxonomy.whole_tree().walk()}
    assert found["brand_new"] == "Luna"


def test_every_field_of_a_config_is_explained(pages):
    explained = meanings(XFormerConfig)
    names = {field.name for field in dataclasses.fields(XFormerConfig)} & set(XFormerConfig.__annotations__)
    assert len(names) > 45 and names | {"per_layer_config"} <= set(explained)
    assert explained["head_dim"].startswith("width of a head; `None`: `hidden_size / num_attention_heads`")
    assert explained["stack"] == "the component of the slot: a name, a dict or a spec"


def test_every_field_of_a_component_is_explained(pages):
    for slot in catalog.SLOT_NAMES:
        for line in pages[f"zoo/components/{slot}.md"].splitlines():
            if line.startswith("| `"):
                cells = line.strip("| ").split(" | ")
                assert len(cells) >= 3 and cells[-1].strip(), f"{slot}: {line}"


def test_navigation_leads_to_every_page(pages):
    from scripts.docs.navigation import configuration

    written = [path for ending in ("md", "ipynb") for path in assemble.WRITTEN.rglob(f"*.{ending}")]
    text = configuration([*pages, *(str(path.relative_to(assemble.WRITTEN).with_suffix(".md")) for path in written)])
    assert "zoo/luna.md" in text and "*" not in text.partition("nav:")[2]
    with pytest.raises(ValueError, match="does not lead to lost.md"):
        configuration([*pages, "index.md", "lost.md"])

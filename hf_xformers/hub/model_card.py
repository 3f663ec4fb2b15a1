# SPDX-License-Identifier: Apache-2.0
"""Model cards, generated from the code: what a variant is, what it changes, its cost, how to use it, how to cite
it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from ..core.components import SLOTS
from .purposes import purposes
from .result_tables import ResultTable, parted, result_tables

# Head -> task of `transformers.pipeline`, which has none for encoder-decoders of text.
PIPELINES: dict[str, str | None] = {
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "ForSeq2SeqLM": None,
    "ForImageClassification": "image-classification",
    "ForCTC": "automatic-speech-recognition",
}
SHAPES = {
    "ForMaskedLM": "encoder",
    "ForCausalLM": "causal decoder",
    "ForSeq2SeqLM": "encoder-decoder",
    "ForImageClassification": "image encoder",
    "ForCTC": "encoder of sound",
}


REPOSITORY = "https://github.com/hf-xformers/hf_xformers"
_FILE = "results"  # the column that says which file a measured row is from


def shapes(config_class: Any) -> list[str]:
    """The shapes that a variant's family covers."""
    return [shape for head, shape in SHAPES.items() if head in config_class.heads]


def variant_card(model_type: str, measured: list[dict[str, Any]] | None = None, sections: Sequence[str] = ()) -> str:
    """The Markdown card of a variant (metadata block included).

    measured: rows of benchmark results for this variant, shown as a table per file. sections: further Markdown
    behind them.

    Raises:
        ValueError: unknown variant.
    """
    from ..variants import config_class

    cls = config_class(model_type)
    name = cls.model_type
    info, purpose = cls.info, purposes().get(name.removeprefix("xf_"))
    config = cls()
    main = next((head for head in PIPELINES if head in cls.heads), "Model")
    # No task and no language: these are claims about weights, and an architecture has none. The license is the code's.
    data = ModelCardData(
        license="apache-2.0", library_name="transformers", tags=["hf_xformers", name, "architecture"], model_name=name
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name}",
        _first_sentence(cls.__doc__ or "") if name != "xformer" else _free_mix_text(),
        "This card describes an architecture without pretrained weights: `from_config` makes a model with random"
        f" ones. It is part of [hf_xformers]({REPOSITORY}).",
        f"**What it changes:** {info.summary}.",
        purpose.markdown(lambda relative: f"`{_model_type(relative)}`") if purpose else "",
        f"**Architectures:** {', '.join(shapes(cls))}. **Classes:** "
        + ", ".join(f"`{_prefix(cls)}{head}`" for head in cls.heads)
        + ".",
        "## Mechanism",
        f"$$\n{info.equation}\n$$",
        purpose.symbols if purpose else "",
        f"Cost in the number of tokens T and the width D: {info.cost}.",
        f"![attention map](maps/{name}.svg)",
        caption(cls),
        "## Components",
        _component_table(config),
    ]
    if info.notes:
        parts.append(info.notes)
    if measured:
        parts += ["## Measured", *_tables(measured, name)]
    parts += sections
    parts += [
        "## Use",
        f"```python\n{example(cls, main)}\n```",
        "## Paper",
        f"[{info.paper}]({info.url})",
        f"```bibtex\n{info.citation}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def example(cls: Any, head: str) -> str:
    """A runnable example for the card: a small model of the variant, used and reloaded through an Auto class."""
    auto = f"Auto{'ModelF' + head[1:] if head != 'Model' else 'Model'}"
    sizes = {"image": "image_size=32, patch_size=8", "sound": "vocab_size=30"}.get(cls.modality, "vocab_size=1000")
    lines = [
        "import torch",
        f"from transformers import AutoConfig, {auto}",
        "",
        "import hf_xformers  # makes the variants known to the Auto classes",
        "",
        f'config = AutoConfig.for_model("{cls.model_type}", {sizes}, hidden_size=64, num_hidden_layers=2,',
    ]
    if cls.modality == "image":
        lines += [
            "                              num_attention_heads=4, intermediate_size=128)",
            f"model = {auto}.from_config(config)",
            "pixel_values = torch.randn(2, 3, 32, 32)",
            "loss = model(pixel_values=pixel_values, labels=torch.tensor([0, 1])).loss",
            "loss.backward()",
        ]
    elif cls.modality == "sound":
        lines += [
            "                              num_attention_heads=4, intermediate_size=128)",
            f"model = {auto}.from_config(config)",
            "input_features = torch.randn(2, 100, 80)  # 80 features of 100 frames, as a feature extractor gives them",
            "loss = model(input_features=input_features, labels=torch.randint(1, 30, (2, 6))).loss",
            "loss.backward()",
            "print(model.eval().transcribe(input_features))",
        ]
    elif cls.reads_colors == "only":
        lines[-1] = lines[-1].replace("vocab_size=1000", "vocab_size=17")
        lines += [
            "                              num_attention_heads=4, intermediate_size=128,",
            "                              max_position_embeddings=65, bos_token_id=16)",
            f"model = {auto}.from_config(config)",
            "start = torch.full((2, 1), 16)",
            "input_ids = torch.cat([start, torch.randint(16, (2, 64))], 1)  # two images of 8 x 8 pixels, 16 colors",
            "loss = model(input_ids=input_ids, labels=input_ids).loss",
            "loss.backward()",
            "print(model.generate(input_ids[:, :33], max_new_tokens=32))  # the lower halves",
        ]
    else:
        lines += [
            "                              num_attention_heads=4, intermediate_size=128, pad_token_id=0,",
            "                              bos_token_id=1, eos_token_id=2)",
            f"model = {auto}.from_config(config)",
            "input_ids = torch.randint(3, 1000, (2, 16))",
        ]
    text = cls.modality == "text" and cls.reads_colors != "only"
    if head in PIPELINES and text:
        lines += ["loss = model(input_ids=input_ids, labels=input_ids).loss", "loss.backward()"]
    if head in ("ForCausalLM", "ForSeq2SeqLM") and text:
        lines.append("print(model.generate(input_ids, max_new_tokens=8))")
    lines += ['model.save_pretrained("my-model")', f'model = {auto}.from_pretrained("my-model")']
    return "\n".join(lines)


def write_cards(folder: str | Path, results: str | Path | None = None) -> list[Path]:
    """Writes the card and the attention map of every variant to `folder`; returns the paths of the cards.

    results: folder of benchmark results (JSON with `rows` that name a `variant`).
    """
    from ..variants import config_class, model_types
    from .attention_map import attention_maps, draw

    folder = Path(folder)
    (folder / "maps").mkdir(parents=True, exist_ok=True)
    written = []
    for model_type in model_types():
        path = folder / f"{model_type}.md"
        path.write_text(variant_card(model_type, measured_rows(model_type, results)), encoding="utf-8")
        maps = attention_maps(config_class(model_type))
        (folder / "maps" / f"{model_type}.svg").write_text(draw(maps), encoding="utf-8")
        written.append(path)
    return written


def measured_rows(model_type: str, results: str | Path | None) -> list[dict[str, Any]]:
    """Rows about one variant in every result file of `results`, each with the name of its file."""
    rows = []
    for path in sorted(Path(results).glob("*.json")) if results is not None else []:
        for row in json.loads(path.read_text(encoding="utf-8")).get("rows", []):
            if row.get("variant", row.get("model")) == model_type:
                rows.append({_FILE: path.stem, **row})
    return rows


def caption(config_class: Any) -> str:
    """What the picture of a variant's attention shows."""
    from .attention_map import LENGTH, shows_a_global_token, small_parameters

    small = ", ".join(f"`{name}={value}`" for name, value in small_parameters(config_class).items())
    kinds = {"image": "an image", "sound": f"a sound of {LENGTH} states"}
    tokens = kinds.get(config_class.modality, f"{LENGTH} tokens")
    how = f", with {small} to fit so few" if small else ""
    how += " and token 0 global" if shows_a_global_token(config_class()) else ""
    return (
        f"*Attention weights of an untrained model on {tokens}{how}; averaged over heads, white where there is none.*"
    )


def _model_type(name: str) -> str:
    return name if name == "xformer" else f"xf_{name}"


def _prefix(cls: Any) -> str:
    return cls.__name__.removesuffix("Config")


def _free_mix_text() -> str:
    return "The free mix: the vanilla Transformer with any component of this package in any slot."


def _component_table(config) -> str:
    """The components of a config, those that differ from the free mix's defaults in bold."""
    from ..configuration_xformer import XFormerConfig

    default, rows = XFormerConfig(), []
    layers = config.layer_configs()
    for slot in SLOTS:
        specs: list[Any] = []
        for layer in layers:  # each type once, where layers differ
            if getattr(layer, slot) not in specs:
                specs.append(getattr(layer, slot))
        for spec in specs:
            fields = ", ".join(f"{f.name}={getattr(spec, f.name)!r}" for f in dataclasses.fields(spec))
            name = f"**{spec.type}**" if spec != getattr(default, slot) else spec.type
            name += " (some layers)" if len(specs) > 1 else ""
            rows.append({"slot": f"`{slot}`", "component": name, "fields": f"`{fields}`" if fields else ""})
    return _table(rows)


def _tables(rows: list[dict[str, Any]], model_type: str) -> list[str]:
    """The rows of each file as a section: results in a table, and how they were measured folded below it."""
    parts = []
    for file in dict.fromkeys(row.get(_FILE, "") for row in rows):
        known = result_tables().get(file, ResultTable())
        found = [{key: value for key, value in row.items() if key != _FILE} for row in rows if row.get(_FILE) == file]
        mine = [key for key in ("variant", "model") if {row.get(key) for row in found} == {model_type}]
        shown, others = parted(found, file, drop=mine)
        parts += [f"### {known.title or file.replace('_', ' ').capitalize()}", known.caption, _table(shown)]
        if others:
            parts.append(f"<details><summary>Settings and further figures</summary>\n\n{_table(others)}\n\n</details>")
    return parts


def _table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row.get(column)) for column in columns) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    """Two decimals, or two digits that count where these would be zeros; nothing where there is no value."""
    if isinstance(value, float):
        return f"{value:.2f}" if value == 0 or abs(value) >= 0.1 else f"{value:.2g}"
    return "" if value is None else str(value)


def _first_sentence(text: str) -> str:
    """The lines of a docstring up to the first that ends a sentence."""
    lines = text.strip().split("\n\n")[0].splitlines()
    last = next((number for number, line in enumerate(lines) if line.rstrip().endswith(".")), len(lines))
    return " ".join(line.strip() for line in lines[: last + 1])

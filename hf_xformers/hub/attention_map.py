"""A small picture of who attends to whom: the attention weights of an untrained model, drawn as SVG."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..components import SLOTS, build_spec

LENGTH = 16
_CELL, _GAP = 10, 24
# Parameters at which a mechanism shows its pattern in so few tokens: the papers' windows and blocks would hold them all.
SMALL: dict[str, dict[str, Any]] = {
    "adaptive_span": {"start": 0.25, "ramp": 4},
    "band_attention": {"window_size": 4},
    "bigbird": {"block_size": 1, "num_random_blocks": 2},
    "delta_net": {"chunk_size": 8},
    "feedback": {"window": 8},
    "linformer": {"projected_length": 8},
    "longformer": {"attention_window": 4},
    "luna": {"projected_length": 8},
    "nystromformer": {"num_landmarks": 4, "conv_kernel_size": None},
    "reformer": {"chunk_length": 4, "num_hashes": 1},
    "routing_transformer": {"num_clusters": 4, "window_size": 4, "block_size": 4},
    "sparse_transformer": {"stride": 4},
}


def small_parameters(config_class: Any, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields of [`SMALL`] that a variant's attention has and `options` leave open."""
    given = dict((options or {}).get("attention") or {})
    name = given.get("type", _own(config_class, "attention")["type"])
    return {field: value for field, value in SMALL.get(name, {}).items() if field not in given}


def _own(config_class: Any, slot: str) -> dict[str, Any]:
    """The variant's own component, as a dict."""
    field = next(field for field in dataclasses.fields(config_class) if field.name == slot)
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return build_spec(slot, default).to_dict()


def map_config(config_class: Any, options: Mapping[str, Any] | None = None, length: int = LENGTH) -> Any:
    """The tiny configuration that is drawn: `options` are components (as dicts) and fields on top of the variant's own.

    Raises:
        ValueError: options that do not fit.
    """
    known = {field.name for field in dataclasses.fields(config_class)}
    fields: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "max_position_embeddings": length,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if "num_decoder_layers" in known:
        fields["num_decoder_layers"] = 1
    if config_class.modality == "image":
        fields |= {"image_size": 16, "patch_size": 4}
    if "window_size" in known:  # a variant that makes every second layer a band of this width: one of each
        fields |= {"num_hidden_layers": 2, "window_size": SMALL["band_attention"]["window_size"]}
    given = dict(options or {})
    small = small_parameters(config_class, given)
    for slot in SLOTS:
        changes = {**(given.get(slot) or {}), **(small if slot == "attention" else {})}
        if changes:
            given[slot] = changes if "type" in changes else {**_own(config_class, slot), **changes}
    return config_class(**{**fields, **given})


def attention_maps(
    config_class: Any, options: Mapping[str, Any] | None = None, length: int = LENGTH
) -> dict[str, Tensor]:
    """Weights of a tiny model with fixed random parameters, averaged over heads: name of the attention -> [T, S].

    They are those of the literal path (`output_attentions=True`), of layer 0 and of the next ones where layers differ. A
    mechanism without weights of its own gives the matrix by which its output depends on the values; one that has no such
    matrix gives none. options: components and configuration fields that differ from the variant's. Windows and blocks
    that they leave open are cut down to this length ([`SMALL`]).
    """
    config = map_config(config_class, options, length)
    plain = _maps(config, length, 1.0)
    for factor in (8.0, 4.0, 2.0):  # wider than the usual start, so that weights differ visibly; but all still there
        found = _maps(config, length, factor)
        if all(int((found[name] != 0).sum()) >= int((weights != 0).sum()) for name, weights in plain.items()):
            return found
    return plain


def _maps(config: Any, length: int, factor: float) -> dict[str, Tensor]:
    from ..variants import family

    classes = family(config.model_type)
    head = "ForCausalLM" if config.is_decoder else "ForSeq2SeqLM" if config.is_encoder_decoder else "Model"
    model_class = classes[head if head in classes else "Model"]
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(0)
        # In double precision a weight is zero only where the mechanism does not look.
        model = model_class(config).double().eval()
        given = {"input_ids": torch.randint(1, 64, (1, length))}
        if config.modality == "image":
            given = {"pixel_values": torch.randn(1, config.num_channels, *config.image_shape, dtype=torch.double)}
    finally:
        torch.random.set_rng_state(state)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(factor)
        if config.is_encoder_decoder:
            given["decoder_input_ids"] = given["input_ids"]
        output = model(**given, output_attentions=True)
    if config.is_encoder_decoder:
        found = {
            "encoder": output.encoder_attentions,
            "decoder": output.decoder_attentions,
            "decoder reads encoder": output.cross_attentions,
        }
    else:
        found = {"decoder" if config.is_decoder else "encoder": output.attentions}
    return {
        (name if index == 0 else f"{name}, layer {index}"): weights[0].mean(0).float()
        for name, layers in found.items()
        for index, weights in enumerate(layers or ())
    }


def draw(maps: dict[str, Tensor]) -> str:
    """SVG text: one square per (query row, key column), darker for more weight; pairs without weight stay white."""
    width = sum(m.shape[1] * _CELL + _GAP for m in maps.values()) + _GAP
    height = max(m.shape[0] for m in maps.values()) * _CELL + 2 * _GAP
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    left = _GAP
    for name, weights in maps.items():
        parts.append(f'<text x="{left}" y="{_GAP - 8}" font-size="11">{name}: query (down), key (right)</text>')
        peak = float(weights.max()) or 1.0
        for row, values in enumerate(weights.tolist()):
            for column, value in enumerate(values):
                if value > 0:
                    shade = 235 - round(200 * value / peak / 20) * 20
                    x, y = left + column * _CELL, _GAP + row * _CELL
                    fill = f"rgb({max(shade - 60, 0)},{max(shade - 20, 0)},235)"
                    parts.append(f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill="{fill}"/>')
        frame = f'width="{weights.shape[1] * _CELL}" height="{weights.shape[0] * _CELL}" fill="none" stroke="#888"'
        parts.append(f'<rect x="{left}" y="{_GAP}" {frame}/>')
        left += weights.shape[1] * _CELL + _GAP
    parts.append("</svg>")
    return "\n".join(parts) + "\n"

# SPDX-License-Identifier: Apache-2.0
"""A small picture of who attends to whom: the attention weights of an untrained model, drawn as SVG."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

import torch
from torch import Tensor

from ..core.components import SLOTS, build_spec
from ..core.hand_overs import HandOver
from ..embedding.frames import SUBSAMPLING

LENGTH = 16
# Pixels: a pair of tokens; room next to, above and below a map for its axes, its bar and its title.
_CELL, _GAP, _LEFT, _RIGHT, _TOP, _BELOW = 10, 8, 40, 52, 44, 32
_LEAST_WIDTH = 340  # what the title needs
_SHADES = 11
# Parameters at which a mechanism shows its pattern in so few tokens: the papers' windows and blocks would hold them
# all.
SMALL: dict[str, dict[str, Any]] = {
    "adaptive_span": {"start": 0.25, "ramp": 4},
    "axial_transformer": {"columns": 4},
    "band_attention": {"window_size": 4},
    "bigbird": {"block_size": 1, "num_random_blocks": 2},
    "csalr": {"num_landmarks": 4},
    "clustered_attention": {"num_clusters": 4},
    "improved_clustered_attention": {"num_clusters": 4, "topk": 4},
    "delta_net": {"chunk_size": 8},
    "etc": {"local_radius": 2},
    "feedback": {"window": 8},
    "image_transformer": {"block_length": 4, "memory_length": 4},
    "informer": {"sampling_factor": 1},
    "linformer": {"projected_length": 8},
    "longformer": {"attention_window": 4},
    "low_rank_band": {"low_rank": 4, "band_width": 2},
    "luna": {"projected_length": 8},
    "multi_scale_transformer": {"scales": (1, 3, 0.25)},
    "memory_compressed_attention": {"layer_pattern": "M"},
    "nystromformer": {"num_landmarks": 4, "conv_kernel_size": None},
    "poolingformer": {"window1": 2, "window2": 8, "pool_kernel": 3, "pool_stride": 2},
    "reformer": {"chunk_length": 4, "num_hashes": 1},
    "routing_transformer": {"num_clusters": 4, "window_size": 4, "block_size": 4},
    "sac": {"edges_per_node": 3},
    "set_transformer": {"num_inducing": 4},
    "sinkhorn_transformer": {"block_size": 4},
    "sparse_transformer": {"stride": 4},
}
# Mechanisms of which an encoder shows one global token, the first.
_ONE_GLOBAL_TOKEN = frozenset({"longformer"})


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


def shows_a_global_token(config: Any) -> bool:
    """Whether the first token of the map is global."""
    return bool({config.layer(0).attention.type} & _ONE_GLOBAL_TOKEN) and not config.is_decoder


def map_config(config_class: Any, options: Mapping[str, Any] | None = None, length: int = LENGTH) -> Any:
    """The tiny configuration that is drawn: `options` are components (as dicts) and fields on top of the variant's
    own.

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
    attention = (given.get("attention") or {}).get("type", _own(config_class, "attention")["type"])
    kind: Any = SLOTS["attention"].get(attention)
    if HandOver.AXES in kind.reads:  # rows and columns in layers of their own
        fields["num_hidden_layers"] = 3 if given.get("is_decoder") else 2
    if layers := given.get("per_layer_config"):
        fields["num_hidden_layers"] = max(fields["num_hidden_layers"], *(int(index) + 1 for index in layers))
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

    They are those of the literal path (`output_attentions=True`), of layer 0 and of the next ones where layers differ.
    A mechanism without weights of its own gives the matrix by which its output depends on the values; one that has no
    such matrix gives none. options: components and configuration fields that differ from the variant's. Windows and
    blocks that they leave open are cut down to this length ([`SMALL`]).
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
        if config.modality == "sound":  # of as many states
            given = {"input_features": torch.randn(1, SUBSAMPLING * length, config.num_mel_bins, dtype=torch.double)}
        if shows_a_global_token(config):
            given["global_attention_mask"] = torch.eye(1, length, dtype=torch.long)
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
    """SVG text: for each map a square per (query row, key column), darker for more weight, with axes in tokens and a
    bar that tells what the shades mean; pairs without weight stay white. Every map has its own scale."""
    width = max(sum(weights.shape[1] * _CELL + _LEFT + _RIGHT for weights in maps.values()), _LEAST_WIDTH)
    height = max((weights.shape[0] for weights in maps.values()), default=0) * _CELL + _TOP + _BELOW
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    parts.append(_text(_GAP, 15, "attention weights: untrained, mean over heads, float64", size=11))
    left = _LEFT
    for name, weights in maps.items():
        parts += _panel(name, weights, left)
        left += weights.shape[1] * _CELL + _RIGHT + _LEFT
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _panel(name: str, weights: Tensor, left: int) -> list[str]:
    """One map, its axes and its bar, from `left` on."""
    rows, columns = weights.shape
    high, wide = rows * _CELL, columns * _CELL
    peak = float(weights.max()) or 1.0
    parts = [_text(left, _TOP - 8, f"{name}, {rows} x {columns}", size=11)]
    for row, values in enumerate(weights.tolist()):
        for column, value in enumerate(values):
            if value > 0:
                parts.append(_cell(left + column * _CELL, _TOP + row * _CELL, value / peak))
    parts.append(_frame(left, _TOP, wide, high))
    for row in sorted({0, rows // 2, rows - 1}):
        parts.append(_text(left - 4, _TOP + row * _CELL + 8, str(row), anchor="end"))
    for column in sorted({0, columns // 2, columns - 1}):
        parts.append(_text(left + column * _CELL + _CELL // 2, _TOP + high + 11, str(column), anchor="middle"))
    parts.append(_text(left + wide // 2, _TOP + high + 23, "key (token)", anchor="middle"))
    x, y = left - 22, _TOP + high // 2
    parts.append(_text(x, y, "query (token)", anchor="middle", more=f' transform="rotate(-90 {x} {y})"'))
    bar = left + wide + 8
    for step in range(_SHADES):  # from the most weight at the top down to the least
        y = _TOP + step * high // _SHADES
        parts.append(_cell(bar, y, 1 - step / (_SHADES - 1), _TOP + (step + 1) * high // _SHADES - y))
    parts.append(_frame(bar, _TOP, _CELL, high))
    parts.append(_text(bar + _CELL + 3, _TOP + 8, f"{peak:.2g}"))
    parts.append(_text(bar + _CELL + 3, _TOP + high, "0"))
    return parts


def _cell(x: int, y: int, share: float, height: int = _CELL) -> str:
    """A rectangle as dark as its share of the largest weight."""
    shade = 235 - round(200 * share / 20) * 20
    fill = f"rgb({max(shade - 60, 0)},{max(shade - 20, 0)},235)"
    return f'<rect x="{x}" y="{y}" width="{_CELL}" height="{height}" fill="{fill}"/>'


def _frame(x: int, y: int, width: int, height: int) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="none" stroke="#888"/>'


def _text(x: int, y: int, text: str, *, size: int = 9, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{more}>{escape(text)}</text>'

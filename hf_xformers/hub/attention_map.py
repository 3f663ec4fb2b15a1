"""A small picture of who attends to whom: the attention weights of an untrained model, drawn as SVG."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LENGTH = 16
_CELL, _GAP = 10, 24


def attention_maps(config_class: Any) -> dict[str, Tensor]:
    """Layer 0's weights, averaged over heads, of a tiny model with fixed random weights: name of the attention -> [T, S]."""

    from ..variants import family

    config = config_class(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **({"image_size": 16, "patch_size": 4} if config_class.modality == "image" else {}),
    )
    classes = family(config_class.model_type)
    model_class = classes["ForCausalLM"] if config.is_decoder else classes["Model"]
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(0)
        model = model_class(config).eval()
        given = {"input_ids": torch.randint(1, 64, (1, LENGTH))}
        if config.modality == "image":
            given = {"pixel_values": torch.randn(1, config.num_channels, *config.image_shape)}
    finally:
        torch.random.set_rng_state(state)
    with torch.no_grad():
        for parameter in model.parameters():  # wider than the usual start, so that the weights differ visibly
            if parameter.ndim == 2:
                parameter.mul_(8)
        output = model(**given, output_attentions=True)
    if config.is_encoder_decoder:
        found = {
            "encoder": output.encoder_attentions,
            "decoder": output.decoder_attentions,
            "decoder reads encoder": output.cross_attentions,
        }
    else:
        found = {"decoder" if config.is_decoder else "encoder": output.attentions}
    return {name: weights[0][0].mean(0) for name, weights in found.items() if weights}


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

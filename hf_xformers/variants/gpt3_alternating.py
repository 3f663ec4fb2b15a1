# SPDX-License-Identifier: Apache-2.0
"""GPT-3 (Brown et al. 2020): dense and locally banded layers by turns."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from ..compat import LAYER_SETTINGS
from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, build_spec
from ..core.config_checks import layers_with_specs
from ..families import DECODER_HEADS, VariantInfo, make_family

# What the banded layers follow from.
_SOURCES = ("num_hidden_layers", "window_size", "first_layer")


class XFGPT3AlternatingConfig(XFormerConfig):
    """GPT-3 (Brown et al. 2020): dense and locally banded layers by turns.

    window_size: keys that a token of a banded layer reads, its own included (the paper does not state it; 256 is
    GPT-Neo's).
    first_layer: of which kind the first layer is; the other layers take turns. Every second layer is set through
    `per_layer_config`, whose further entries are kept.
    """

    model_type = "xf_gpt3_alternating"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "small": {},
        "medium": {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
        "large": {
            "hidden_size": 1536,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 6144,
        },
        "2.7b": {
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 10240,
        },
        "6.7b": {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 16384,
        },
        "175b": {
            "hidden_size": 12288,
            "num_hidden_layers": 96,
            "num_attention_heads": 96,
            "intermediate_size": 49152,
        },
    }

    vocab_size: int = 50257
    max_position_embeddings: int = 2048
    initializer: Initializer = "scaled_residual"
    pad_token_id: int | None = None
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    is_decoder: bool = True
    residual: SpecLike = "pre_ln"
    window_size: int = 256
    first_layer: Literal["dense", "banded"] = "dense"

    def __setattr__(self, key: str, value: Any) -> None:
        follows = key in _SOURCES and LAYER_SETTINGS in self.__dict__
        own = self.to_dict().get("per_layer_config", {}) if follows else None
        super().__setattr__(key, value)
        if own is not None:
            layers: Any = self._with_bands(own)
            self.per_layer_config = layers or None

    def __post_init__(self, **kwargs):
        if self.window_size < 1:
            raise ValueError(f"`window_size` must be at least 1 (a token reads itself), got {self.window_size}.")
        given = kwargs.pop("per_layer_config", None)
        layers = self._with_bands({} if given is None else self._own_layers(layers_with_specs(self, given)))
        if layers:
            kwargs["per_layer_config"] = layers
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        return self._without_bands(super().to_dict())

    def to_diff_dict(self) -> dict[str, Any]:
        return self._without_bands(super().to_diff_dict())

    def _without_bands(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Bands are derived again when a saved config is read, which may be for another number of layers."""
        own = self._own_layers(saved.pop("per_layer_config", None))
        return {**saved, "per_layer_config": own} if own else saved

    def _bands(self) -> dict[int, dict[str, Any]]:
        """The entries of the banded layers."""
        band = {"attention": {"type": "band_attention", "window_size": self.window_size}}
        return {layer: dict(band) for layer in range(self.first_layer == "dense", self.num_hidden_layers, 2)}

    def _with_bands(self, own: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        layers = self._bands()
        for layer, overrides in own.items():
            layers[layer] = {**layers.get(layer, {}), **overrides}
        return layers

    def _own_layers(self, layers: dict[Any, dict[str, Any]] | None) -> dict[int, dict[str, Any]]:
        """`per_layer_config` without what is derived."""
        bands, own = self._bands(), {}
        for layer, overrides in (layers or {}).items():
            derived = bands.get(int(layer), {}).get("attention")
            kept = {key: value for key, value in overrides.items() if key != "attention" or not _same(value, derived)}
            if kept:
                own[int(layer)] = kept
        return own


def _same(attention: Any, derived: dict[str, Any] | None) -> bool:
    """Whether a spec, or its dict, is the derived band."""
    return derived is not None and build_spec("attention", attention) == build_spec("attention", derived)


INFO = VariantInfo(
    section="4.1",
    summary="every second layer reads a sliding window only",
    paper="Brown et al. 2020",
    url="https://arxiv.org/abs/2005.14165",
    equation=r"o_i^l = \mathrm{softmax}_{N_l(i)}\!\left(\frac{q_i K^\top}{\sqrt{d}}\right) V, \quad "
    r"N_l(i) = \{j \le i\} \ (l \text{ even}), \quad N_l(i) = \{i - w < j \le i\} \ (l \text{ odd})",
    cost="half of the layers in time O(T^2 D), the others in O(T w D) for a window of w",
    cite="brown2020language",
    notes="The paper states neither the window nor which layers are banded; both are config fields (`window_size`, "
    "`first_layer`). The sizes are those of its 125M model.",
)

make_family(XFGPT3AlternatingConfig, "XFGPT3Alternating", DECODER_HEADS, INFO)

# SPDX-License-Identifier: Apache-2.0
"""Conformer (Gulati et al. 2020): attention and convolution between two half feed-forward steps, for speech."""

from __future__ import annotations

from typing import Any, ClassVar

from ..configuration_sound import XFormerSoundConfig
from ..configuration_xformer import Initializer
from ..core.components import SpecLike, preset
from ..families import SOUND_HEADS, VariantInfo, make_family


def _size(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }


class XFConformerConfig(XFormerSoundConfig):
    """Conformer (Gulati et al. 2020): attention and convolution between two half feed-forward steps, for speech.

    Reads `input_features`, 80 log mel energies of frames that are 10 ms apart, and makes a state of four frames.
    `vocab_size` is that of transcripts. Presets have the sizes of the paper's encoders.
    """

    model_type: ClassVar[str] = "xf_conformer"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "small": _size(144, 16, 4),
        "medium": _size(256, 16, 4),
        "large": _size(512, 17, 8),
    }

    vocab_size: int = 1024
    hidden_size: int = 256
    num_hidden_layers: int = 16
    num_attention_heads: int = 4
    intermediate_size: int = 1024
    initializer: Initializer = "xavier"
    attention: SpecLike = preset({"type": "transformer_xl", "share_biases": False})
    residual: SpecLike = preset({"type": "pre_ln", "final_norm": False})
    feedforward: SpecLike = "swish"
    block: SpecLike = "conformer"


INFO = VariantInfo(
    section="8",
    summary="attention, then convolution, between two half feed-forwards, for speech",
    paper="Gulati et al. 2020",
    url="https://arxiv.org/abs/2005.08100",
    equation=(
        r"x \leftarrow x + \tfrac12 \mathrm{FF}_1(x),\; x \leftarrow x + \mathrm{SA}(x),\; x \leftarrow x +"
        r" \mathrm{Conv}(x),\; x \leftarrow \mathrm{LN}(x + \tfrac12 \mathrm{FF}_2(x)), \qquad \mathrm{Conv}(x) ="
        r" \mathrm{swish}(\mathrm{BN}(w * (x W_1 \odot \sigma(x W_g)))) W_2"
    ),
    cost="time O(T^2 D + T D^2 + k T D) for T states of four frames and kernels of k; memory O(T D)",
    notes=(
        "`XFConformerForCTC` transcribes: `pipeline('automatic-speech-recognition', model=folder)` reads a folder that"
        " `hf-xformers finetune --task speech-recognition` wrote. Features are those of transformers'"
        " `ParakeetFeatureExtractor`. `model.transcribe(..., num_beams=8)` searches for the text that is most"
        " probable over all its alignments. The paper's decoder (a transducer with an LSTM) is not part of it."
    ),
    cite="gulati2020conformer",
)

make_family(XFConformerConfig, "XFConformer", SOUND_HEADS, INFO)

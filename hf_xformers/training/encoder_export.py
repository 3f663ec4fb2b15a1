# SPDX-License-Identifier: Apache-2.0
"""The encoder of a trained encoder-decoder as a model of its own (McCann et al. 2017, arXiv 1708.00107, CoVe: what was
learned by translating serves other tasks).

    encoder_only("runs/translation").save_pretrained("runs/encoder")
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def encoder_only(model: PreTrainedModel | str | Path) -> PreTrainedModel:
    """The bare encoder (`<Family>Model`) of an encoder-decoder, or of one that is saved in a folder: the same outputs,
    with its embedding, its positions and no parameter of the decoder.

    Raises ValueError for a model that has no encoder besides a decoder.
    """
    from transformers import AutoModelForSeq2SeqLM

    from ..configuration_xformer import XFormerConfig
    from ..variants import family

    source: Any = AutoModelForSeq2SeqLM.from_pretrained(str(model)) if isinstance(model, (str, Path)) else model
    config = source.config
    if not isinstance(config, XFormerConfig) or not config.is_encoder_decoder:
        raise ValueError(
            f"{type(source).__name__} is no encoder-decoder of this package, whose encoder could be taken out; train"
            " one with `hf-xformers finetune --task translation`, or convert one"
        )
    values = config.to_dict()
    for name in ("model_type", "transformers_version", "architectures", "dtype", "num_decoder_layers"):
        values.pop(name, None)
    values |= {"is_encoder_decoder": False, "is_decoder": False, "decoder": None, "add_pooler": False}
    values |= {"decoder_start_token_id": None, "decoder_vocab_size": None}
    own = type(config)(**values)
    encoder: Any = family(config.model_type)["Model"](own)
    base = getattr(source, source.base_model_prefix, source)
    kept = {name: value for name, value in base.state_dict().items() if name.startswith("trunk.")}
    encoder.load_state_dict(kept)  # strict: nothing is missing, nothing left over
    return encoder.to(dtype=source.dtype).train(source.training)

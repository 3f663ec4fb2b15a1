# SPDX-License-Identifier: Apache-2.0
"""How far a change of a model moved its outputs, on a sample of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..configuration_xformer import XFormerConfig
from ..core.hand_overs import HandOver
from ..core.tasks import any_task

_TOKENS = 512  # of the sample: enough to leave a window, quick on a CPU
_PREDICTIONS = 32  # compared at a time: distributions over a large vocabulary take memory
_MASK_EVERY = 7
_OUTPUTS = ("logits", "prediction_logits", "start_logits", "seq_relationship_logits")
_VECTORS = ("last_hidden_state", "vectors", "prediction_outputs", "reconstruction")  # of a model without predictions
_FRAMES = 256  # of sound


@dataclass(frozen=True)
class Movement:
    """Outputs before and after, on `rows` rows of `length` tokens of `text` (0: of no text).

    Args:
        kl_mean, kl_max: KL(before || after) of the predictions in nats, over `predictions` of them; None for a model
            without predictions.
        agreement: share whose most likely class is the same.
        states: relative change of the last hidden states (or of what the head makes of them: vectors of texts,
            forecasts, pictures), |after - before| / |before|, of a model without predictions.
    """

    text: str
    rows: int
    length: int
    predictions: int
    kl_mean: float | None = None
    kl_max: float | None = None
    agreement: float | None = None
    states: float | None = None

    def __str__(self) -> str:
        sample = f"{self.rows} x {self.length} tokens of {self.text}" if self.length else self.text
        if self.kl_mean is None:
            return f"hidden states moved by {self.states:.3g} of their size, on {sample}"
        return (
            f"KL(before || after) {self.kl_mean:.3g} nats (largest {self.kl_max:.3g}), the same answer in "
            f"{100 * (self.agreement or 0):.1f} % of {self.predictions} predictions, on {sample}"
        )


@torch.no_grad()
def movement(
    before: PreTrainedModel, after: PreTrainedModel, tokenizer: Any | None = None, texts: Iterable[str] | None = None
) -> Movement:
    """Compares two models of this package with the same head.

    texts: the sample, by default the help texts that come with Python. Without a tokenizer the sample is random
    tokens; models of images, sound and series get random values. A masked language model is asked for every 7th token,
    which it does not see, if the tokenizer has a mask; others are asked everywhere. Rows are as long as both models
    allow, 512 tokens in all.
    """
    values = _values(before)
    asked: list[tuple[dict[str, Tensor], Tensor | None]]
    if values is not None:
        text, rows, length, asked = "random values", 1, 0, [(values, None)]
    else:
        text, rows, length, asked = _questions(before, after, tokenizer, texts)
    sums = {"kl": 0.0, "same": 0.0, "count": 0, "moved": 0.0, "size": 0.0}
    largest, predicts = 0.0, False
    for given, wanted in asked:  # a row at a time: two tables of logits are memory enough
        outputs = [model(**given, **_task(model)) for model in (before, after)]
        first, second = (_predictions(output, wanted) for output in outputs)
        if first is None or second is None:
            old, new = (_vectors(output) for output in outputs)
            sums["moved"] += float((new - old).square().sum())
            sums["size"] += float(old.square().sum())
            continue
        predicts = True
        for one, other in zip(first.split(_PREDICTIONS), second.split(_PREDICTIONS)):
            old, new = torch.log_softmax(one.float(), -1), torch.log_softmax(other.float(), -1)
            divergence = (old.exp() * (old - new)).sum(-1).clamp(min=0)
            sums["kl"] += float(divergence.sum())
            sums["same"] += float((old.argmax(-1) == new.argmax(-1)).sum())
            sums["count"] += len(divergence)
            largest = max(largest, float(divergence.max()))
    if not predicts:
        return Movement(text, rows, length, 0, states=math.sqrt(sums["moved"] / max(sums["size"], 1e-30)))
    count = int(sums["count"])
    return Movement(text, rows, length, count, sums["kl"] / count, largest, sums["same"] / count)


def _questions(
    before: PreTrainedModel, after: PreTrainedModel, tokenizer: Any | None, texts: Iterable[str] | None
) -> tuple[str, int, int, list[tuple[dict[str, Tensor], Tensor | None]]]:
    """Of which text, rows, their length, and for each row what models are given and which tokens are asked for."""
    length = min(_TOKENS, *(limit for model in (before, after) for limit in _limits(model)))
    rows = max(1, _TOKENS // length)
    ids, text = _sample(before.config.vocab_size, rows * length, tokenizer, texts)
    rows = max(1, len(ids) // length)
    length = min(length, len(ids))
    ids = ids[: rows * length].view(rows, length).to(before.device)
    asked = torch.ones_like(ids, dtype=torch.bool)
    mask = getattr(tokenizer, "mask_token_id", None)
    if type(before).__name__.endswith("ForMaskedLM") and mask is not None and length > _MASK_EVERY:
        asked = (torch.arange(length, device=ids.device) % _MASK_EVERY == _MASK_EVERY - 1).expand_as(ids)
        ids = ids.masked_fill(asked, mask)
    if type(before).__name__.endswith("ForMultipleChoice"):
        return text, rows, length, [({"input_ids": torch.stack([row, row.flip(0)])[None]}, None) for row in ids]
    return text, rows, length, [({"input_ids": row[None]}, wanted) for row, wanted in zip(ids, asked)]


def _values(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """Random inputs [1, ...] of a model of images, sound or series; None for one of text."""
    config = cast(XFormerConfig, model.config)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator).to(model.device, model.dtype)

    if config.modality == "image":
        return {"pixel_values": drawn(config.num_channels, *config.image_shape)}
    if config.modality == "sound":
        return {"input_features": drawn(_FRAMES, config.num_mel_bins)}
    if HandOver.SERIES not in config.embedding.gives or HandOver.SERIES not in config.head.reads:
        return None
    head, features = config.head, config.embedding.time_features
    made = {"past_values": drawn(head.context_length, config.embedding.channels)}
    if features:
        made["past_time_features"] = drawn(head.context_length, features)
        made["future_time_features"] = drawn(head.prediction_length, features)
    return made


def _predictions(output: Any, wanted: Tensor | None) -> Tensor | None:
    """Logits [predictions, classes] for one row, of tokens those that are wanted; None where nothing is predicted."""
    found = next((output[name] for name in _OUTPUTS if output.get(name) is not None), None)
    if found is None:
        return None
    if found.ndim < 3:
        return found
    kept = found[0] if wanted is None or found.shape[1] != len(wanted) else found[0][wanted]
    return kept.flatten(0, -2)


def _vectors(output: Any) -> Tensor:
    return next(output[name] for name in _VECTORS if output.get(name) is not None).float()


def _task(model: PreTrainedModel) -> dict[str, Tensor]:
    """What one of our models that tells tasks apart is given with one row."""
    return any_task(model.config, 1) if isinstance(model.config, XFormerConfig) else {}


def _limits(model: PreTrainedModel) -> Iterator[int]:
    """Tokens that the model was made for, in each tower."""
    for view in model.config.tower_configs():
        yield max(1, view.max_position_embeddings)


def _sample(count: int, tokens: int, tokenizer: Any | None, texts: Iterable[str] | None) -> tuple[Tensor, str]:
    """Ids [tokens] (fewer if the text is shorter) and what they are of."""
    if tokenizer is not None:
        name = "the text given"
        if texts is None:
            texts, name = _help_texts(), "Python's help texts"
        texts = [texts] if isinstance(texts, str) else texts
        ids: list[int] = []
        for text in texts:
            ids += [token for token in tokenizer(text, verbose=False)["input_ids"] if token < count]
            if len(ids) >= tokens:
                break
        if ids:
            return torch.tensor(ids[:tokens]), name
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(5, count - 1), count, (tokens,), generator=generator), "random tokens"


def _help_texts() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # a trimmed-down Python without help()
        return []
    return [topics[name] for name in sorted(topics)]

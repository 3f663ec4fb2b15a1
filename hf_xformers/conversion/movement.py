"""How far a change of a model moved its outputs, on a sample of text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..configuration_xformer import XFormerConfig
from ..core.tasks import any_task

_TOKENS = 512  # of the sample: enough to leave a window, quick on a CPU
_PREDICTIONS = 32  # compared at a time: distributions over a large vocabulary take memory
_MASK_EVERY = 7
_OUTPUTS = ("logits", "prediction_logits", "start_logits", "seq_relationship_logits")


@dataclass(frozen=True)
class Movement:
    """Outputs before and after, on `rows` rows of `length` tokens of `text`.

    kl_mean, kl_max: KL(before || after) of the predictions in nats, over `predictions` of them; None for a model
    without predictions. agreement: share whose most likely class is the same. states: relative change of the last
    hidden states, |after - before| / |before|, of a model without predictions.
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
        sample = f"{self.rows} x {self.length} tokens of {self.text}"
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
    tokens. A masked language model is asked for every 7th token, which it does not see, if the tokenizer has a mask;
    others are asked everywhere. Rows are as long as both models allow, 512 tokens in all.
    """
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
    sums = {"kl": 0.0, "same": 0.0, "count": 0, "moved": 0.0, "size": 0.0}
    largest, predicts = 0.0, False
    for row, wanted in zip(ids, asked):  # a row at a time: two tables of logits are memory enough
        first, second = _outputs(before, row, wanted), _outputs(after, row, wanted)
        if first is None or second is None:
            old, new = (
                model(input_ids=row[None], **_task(model)).last_hidden_state.float() for model in (before, after)
            )
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


def _outputs(model: PreTrainedModel, row: Tensor, wanted: Tensor) -> Tensor | None:
    """Logits [predictions, classes] for one row of ids, of tokens those that are wanted; None for a model that
    predicts nothing."""
    if type(model).__name__.endswith("ForMultipleChoice"):
        return model(input_ids=torch.stack([row, row.flip(0)])[None]).logits
    output = model(input_ids=row[None], **_task(model))
    found = next((output[name] for name in _OUTPUTS if output.get(name) is not None), None)
    if found is None:
        return None
    return found[0][wanted] if found.ndim == 3 else found


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

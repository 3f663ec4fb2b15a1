# SPDX-License-Identifier: Apache-2.0
"""Which keyword arguments a model reads: an argument that nothing reads is an error, not silence."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor
from transformers.utils import TransformersKwargs

# What transformers and Trainer, `generate` or a data collator may hand to any model, read or not.
_COMMON = frozenset(TransformersKwargs.__annotations__) | {
    "return_dict",
    "cache_position",
    "shift_labels",  # labels that sequence parallelism has shifted
    "logits_to_keep",
    "tokenizer",  # for `stop_strings`
    "assistant_tokenizer",
    # What sentence-transformers writes into the inputs that it has read, and gives again with them.
    *("token_embeddings", "sentence_embedding", "all_layer_embeddings", "scores", "causal_logits"),
    *("token_weights_sum", "sentence_embedding_backbone", "sentence_embedding_encoded"),
    *("sentence_embedding_encoded_4k", "auxiliary_embedding", "decoded_embedding_k", "decoded_embedding_4k"),
    *("decoded_embedding_aux", "decoded_embedding_k_pre_bias"),
}


def check_token_labels(labels: Tensor | None, logits: Tensor, name: str = "labels") -> None:
    """Refuses labels (the input `name`) that are not one for each of the tokens of `logits` [B, T, classes].

    Raises:
        ValueError: another shape.
    """
    if labels is not None and labels.shape != logits.shape[:2]:
        raise ValueError(
            f"`{name}` must be [batch, length] = {list(logits.shape[:2])}, one for each token of the logits, got "
            f"{list(labels.shape)}."
        )


def unread(given: Mapping[str, Any], read: Iterable[str]) -> Iterator[str]:
    """Names of the keyword arguments `given` to a model that nothing reads. read: names that its components read. None
    counts as not given."""
    read = set(read)
    return (name for name, value in given.items() if value is not None and name not in read and name not in _COMMON)


def refuse_unread(model_type: str, given: Mapping[str, Any], read: Iterable[str], named: Iterable[str]) -> None:
    """Checks the keyword arguments `given` to a model besides those that its `forward` names.

    read: names that its components read. named: those of `forward`, for the message. None counts as not given.

    Raises:
        TypeError: no component reads one of them.
    """
    if not given:
        return
    for name in unread(given, read):
        valid = sorted({*read, *named} - {"kwargs", "self"})
        close = difflib.get_close_matches(name, [*valid, "output_attentions", "output_hidden_states"], n=1, cutoff=0.4)
        hint = f"did you mean `{close[0]}`?" if close else f"it takes {', '.join(valid)}."
        if name in ("encoder_hidden_states", "encoder_attention_mask"):
            hint = "build a decoder with `add_cross_attention=True` in its config."
        raise TypeError(f"No component of this {model_type!r} model reads the argument `{name}`; {hint}")


def naming(forward: Any, names: Iterable[str]) -> Any:
    """`forward` of a head, as a function of its own whose signature names these inputs too: Trainer takes out the
    columns of a dataset that it does not name."""
    own = inspect.signature(forward)
    *named, others = own.parameters.values()
    further = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
    made: Any = FunctionType(
        forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    functools.update_wrapper(made, forward)
    made.__kwdefaults__ = forward.__kwdefaults__
    parameters = [*named, *(one for one in further if one.name not in own.parameters), others]
    made.__signature__ = own.replace(parameters=parameters)
    return made

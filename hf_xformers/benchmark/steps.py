# SPDX-License-Identifier: Apache-2.0
"""What is timed: forward and backward of one attention layer, or of a whole model, as a callable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ..core.call import Call
from ..core.initialization import Initialized
from .entries import SHAPES, Entry, make_config

WIDTH, HEADS = 512, 8  # of the attention layer
VOCABULARY = 1000  # of whole models: what differs shall be the layers
LEVELS = ("layer", "model")


def step(
    entry: Entry,
    shape: str,
    length: int,
    *,
    level: str = "layer",
    size: str = "tiny",
    batch_size: int = 1,
    dtype: str = "float32",
    device: str = "cpu",
) -> Callable[[], Any]:
    """A callable that runs forward and backward on [batch_size, length] once, and forgets the gradients.

    Raises:
        ValueError: a configuration that cannot be, or a layer that does not work on its own.
    """
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device}
    if level == "layer":
        return _layer_step(entry, shape, length, batch_size, options)
    return _model_step(entry, shape, length, size, batch_size, options)


def attention_of(config: Any) -> tuple[Any, int]:
    """The attention that is measured for a configuration, and its layer: the first that is not dense, else layer
    0's."""
    specs = [config.layer(index).attention for index in range(config.num_hidden_layers)]
    found = [index for index, spec in enumerate(specs) if spec.type != "dense"]
    index = found[0] if found else 0
    return specs[index], index


def layer_config(entry: Entry, shape: str, length: int) -> Any:
    """The configuration for [`attention_layer`]: 512 wide, 8 heads, without positions where the variant allows
    that."""
    geometry: dict[str, Any] = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 4 * WIDTH}
    geometry["vocab_size"] = VOCABULARY
    bare = Entry(entry.label, entry.variant, {"position": {"type": "none"}, **entry.components}, entry.fields)
    try:
        return make_config(bare, shape, length, **geometry)
    except (ValueError, TypeError):  # the mechanism belongs to the variant's own positions
        return make_config(entry, shape, length, **geometry)


def attention_layer(config: Any) -> Any:
    """The attention sublayer of a configuration with its projections, started as small random matrices."""
    spec, index = attention_of(config)
    view = config.layer(index)
    module = spec.build(view, layer_idx=index)
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)
    parts: list[Any] = list(module.modules())
    for part in parts:
        if isinstance(part, Initialized):
            part.initialize(view, init)
    return module


def _layer_step(entry: Entry, shape: str, length: int, batch_size: int, options: dict[str, Any]) -> Callable[[], Any]:
    config = layer_config(entry, shape, length)
    if config.is_encoder_decoder:
        config = config.tower("trunk")
    module = attention_layer(config).to(**options).train()
    states = torch.randn(batch_size, length, WIDTH, **options)
    index = torch.arange(length, device=options["device"])

    def run() -> None:
        context = Call(None, index[None], index, index, causal=shape == "decoder", fresh=True)
        try:
            module.prepare(context, None)
            output = module(states, context).output
        except (LookupError, ValueError, TypeError, AttributeError) as error:  # what a stack prepares is missing
            raise ValueError(
                f"the attention of {entry.variant!r} works inside its stack, not as a layer on its own ({error}); take"
                " `--level model`"
            ) from error
        output.sum().backward()
        module.zero_grad(set_to_none=True)

    return run


def _model_step(
    entry: Entry, shape: str, length: int, size: str, batch_size: int, options: dict[str, Any]
) -> Callable[[], Any]:
    from ..variants import family

    config = make_config(entry, shape, length, size, vocab_size=VOCABULARY)
    config.use_cache = False
    model = family(entry.variant)[SHAPES[shape].head](config).to(**options).train()
    ids = torch.randint(5, VOCABULARY, (batch_size, length), device=options["device"])

    def run() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)

    return run

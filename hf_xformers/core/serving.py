# SPDX-License-Identifier: Apache-2.0
"""Serving engines that run a model with an attention function of their own, such as vLLM.

An engine registers the function with transformers' attention interface and keeps keys and values itself. Each call of
the model has tokens of many texts side by side in one row, each with its position, and further keyword arguments which
say where the function finds what: these go to the function as they are.
"""

from __future__ import annotations

from typing import Any

from .inputs import unread
from .paging import why_not_side_by_side
from .sharing import is_shared

# What transformers' own attention functions are named; those of kernels from a repository have its name with a "/".
_OWN = ("eager", "sdpa", "flex_attention", "flash_attention", "paged|")


def why_not_served(config: Any) -> str:
    """Why an engine cannot keep a model's keys and values, in a few words that continue from "which"; empty: it
    can."""
    if config.is_encoder_decoder:
        return f"a model of type {config.model_type!r} cannot leave to an engine: it is an encoder-decoder"
    if config.modality != "text":
        return f"a model of type {config.model_type!r} cannot leave to an engine: it reads no text"
    if reason := why_not_side_by_side(config):
        return reason
    for layer in config.layer_configs():
        attention, position = layer.attention, layer.position
        if "interface" not in attention.supports:
            return f"attention {attention.type!r}, as it is set, does not allow: it asks no attention function"
        if "score_bias" in position.acts:
            return f"position {position.type!r} does not allow: its scores have a bias, which an engine does not know"
    stack = config.stack
    if is_shared(config) or {stack.num_steps(config), stack.num_layers(config)} != {config.num_hidden_layers}:
        return "layers that run at several depths do not allow: an engine keeps those of each layer once"
    if stack.exits in ("texts", "tokens"):
        return f"stack {stack.type!r} does not allow: texts may leave it early"
    if config.is_decoder and not config.head.logits(config).plain:
        return f"head {config.head.type!r}, as it is set, does not allow: an engine projects the last states alone"
    return ""


def taken_by_back_end(config: Any, arguments: dict[str, Any], read: tuple[str, ...]) -> dict[str, Any]:
    """What an engine gives its attention function, taken out of the `arguments` of a call. read: names that components
    of the model read.

    Raises:
        ValueError: the model does not go with an engine.
    """
    implementation = config._attn_implementation or "eager"
    if implementation.startswith(_OWN) or "/" in implementation:
        return {}
    names = list(unread(arguments, read))
    if names and (reason := why_not_served(config)):
        raise ValueError(
            f"With attn_implementation {implementation!r} an engine gives `{names[0]}` and keeps keys and values"
            f" itself, which {reason}; call `set_attn_implementation('sdpa')` and use `generate`."
        )
    return {name: arguments.pop(name) for name in names}


def pipeline_plan(config: Any) -> dict[str, tuple[list[str], list[str]]] | None:
    """Names of a base model's modules in the order in which they run -> what they read and give, for engines that give
    each process some of the layers; None where positions act between layers, or where no engine serves the model."""
    if why_not_served(config) or "layer_input" in config.position.acts:
        return None
    states = ["hidden_states"]
    plan = {"trunk.embedding": (["input_ids"], states)}
    return {**plan, **dict.fromkeys(("trunk.layers", "trunk.final_norm"), (states, states))}


class ServedByEngines:
    """transformers' answer to engines, `_supports_attention_backend`: of a model for its config, of a class for the
    defaults of its family."""

    def __get__(self, model: Any, owner: Any) -> bool:
        return not why_not_served(owner.config_class() if model is None else model.config)

# SPDX-License-Identifier: Apache-2.0
"""Which modules of a model are kept whole: by device maps, and by Accelerate where it shards a model (FSDP)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from ..compat import asked_to_shard, weights_from_one_process


class KeptWhole:
    """`_no_split_modules`: names of the classes whose modules are neither divided over devices nor over units of FSDP.

    The two need different answers. A device map brings weights for the calls of the modules that it names, forgets
    the tensors that a module has next to the ones inside, and leaves results where they were computed. Under FSDP a
    module that is named must not be read outside of its calls.
    """

    def __get__(self, model: Any, owner: type) -> Any:
        if model is None:
            return ["XFormerLayer"]  # of the class alone; a model knows the classes of its own layers
        units, others = model.__dict__.get("_kept_whole", (set(), set()))
        if not asked_to_shard(0):
            return units | others
        if weights_from_one_process():
            refuse_saved_buffers(model)
        return set(units)

    def __set__(self, model: Any, names: Any) -> None:
        """names: what transformers gathers, or (the units of FSDP, what else a device map does not divide)."""
        model.__dict__["_kept_whole"] = names if isinstance(names, tuple) else (set(names), set())


def refuse_saved_buffers(model: nn.Module) -> None:
    """For Accelerate's FSDP2 with `cpu_ram_efficient_loading`, which hands sharded parameters to the other processes
    and no buffer of a checkpoint.

    Raises:
        ValueError: the model has such a buffer.
    """
    saved = model.state_dict().keys()
    name = next((name for name, _ in model.named_buffers() if name in saved), None)
    if name is not None:
        raise ValueError(
            "`cpu_ram_efficient_loading` gives other processes the parameters alone, and the checkpoints of"
            f" {type(model).__name__} have the buffer {name!r}, too; leave it off."
        )


def whole_on_a_device(model: Any, layer_class: type) -> set[str]:
    """Names of the classes in `model` that a device map does not divide next to layers: with tensors of their own and
    modules, and a token table in several parts, which may each be tied to a part of the head."""
    table = model.get_input_embeddings()
    return {
        type(module).__name__
        for module in model.modules()
        if module._modules
        and (module._parameters or module._buffers or module is table)
        and not any(isinstance(inner, layer_class) for inner in module.modules() if inner is not module)
    }


def ties_beyond_ends(model: Any) -> bool:
    """Whether a parameter of the token table, or of the output matrix, stands in other modules too: in the table of a
    second tower, in a generator or in a further head. Accelerate's FSDP2 makes a unit of the table and one output
    matrix, and torch refuses a parameter that is in two units."""
    table, output = model.get_input_embeddings(), model.get_output_embeddings()
    ends = [module for module in (table, output) if module is not None]
    weights = {id(module._parameters.get("weight")) for module in ends}
    tied = len(ends) == 2 and len(weights) == 1 and ends[0]._parameters.get("weight") is not None
    own = [{id(parameter) for parameter in module.parameters()} for module in ends]
    inside = {id(module) for end in ends for module in end.modules()}
    rest = {
        id(parameter)
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    }
    units = [set().union(*own)] if tied else own
    return any(one & other for one, other in itertools.combinations([*units, rest], 2))


def end_for(model: Any, end: nn.Module | None) -> nn.Module | None:
    """The token table or output matrix of `model` for whoever asks: None for Accelerate where it shards a model and
    more is tied to it, so that all of it stays in the unit of what is outside of layers."""
    if torch.compiler.is_compiling():  # a graph has no callers
        return end
    return None if asked_to_shard(1) and ties_beyond_ends(model) else end

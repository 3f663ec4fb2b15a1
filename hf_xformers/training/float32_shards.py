# SPDX-License-Identifier: Apache-2.0
"""What stays in float32 does so where FSDP2 shards a model in mixed precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..core.parallel_plans import layers_apart
from ..core.precision import Float32Module
from ..modeling_base import XFormerPreTrainedModel


def keep_float32_in_shards(accelerator: Any, model: Any) -> None:
    """Where `accelerator` is going to shard `model` in mixed precision (FSDP2): what stays in float32 is sharded
    before. To be called in every process, before the optimizer is made; `XFormerTrainer` does so, unless it is given
    one, and any other `Trainer` is ready for it before `train()`.

    Nothing is done where one process alone has read the weights (`cpu_ram_efficient_loading`).
    """
    plugin = accelerator.state.fsdp_plugin if accelerator.is_fsdp2 else None
    if plugin is None or plugin.mixed_precision_policy is None or plugin.cpu_ram_efficient_loading:
        return
    mesh = accelerator.torch_device_mesh
    if mesh is not None:
        mesh = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    shard_in_float32(
        model, mesh=mesh, reshard_after_forward=plugin.reshard_after_forward, offload_policy=plugin.cpu_offload
    )


def shard_in_float32(model: nn.Module, **options: Any) -> None:
    """Makes each [`Float32Module`] in `model` a group of its own for FSDP2, which computes in float32: a policy of
    mixed precision casts all parameters of a group for a pass.

    Left to the groups around them are parameters that stand in other modules, too, and all of a model that runs its
    layers in pieces or shares them (`Spec.layers_apart`).

    options: as of [`torch.distributed.fsdp.fully_shard`], such as `mesh`.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    models = (inner for inner in model.modules() if isinstance(inner, XFormerPreTrainedModel))
    if not all(layers_apart(inner.config) for inner in models):
        return
    uses = _uses(model)
    for module, readers in dict.fromkeys(_groups(model)):
        own = _uses(module)
        if not own or any(count < uses[parameter] for parameter, count in own.items()):
            continue
        fully_shard(module, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **options)
        for name in readers:
            if name != "forward":
                register_fsdp_forward_method(module, name)


def _groups(module: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """What is gathered at once, and by the calls of which methods."""
    if not isinstance(module, Float32Module):
        for child in module.children():
            yield from _groups(child)
    elif module.readers:
        yield module, module.readers
    else:
        yield from ((inner, ()) for inner in module.modules() if inner._parameters)


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """In how many places of `module` each of its parameters stands."""
    return Counter(own for inner in module.modules() for own in inner._parameters.values() if own is not None)

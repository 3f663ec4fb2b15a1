# SPDX-License-Identifier: Apache-2.0
"""Training of mixtures whose experts stand in different processes of a run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from ..core.parallel_plans import check_expert_parallel
from ..core.saved_files import SHARDED_OPTIMIZER, weight_files
from ..modeling_base import XFormerPreTrainedModel

_SCHEDULER = "scheduler.pt"


class ExpertParts:
    """What a Trainer does where each `processes` of a run hold the experts of a mixture together, as many each, and
    every process reads rows of its own. All else is sharded over all processes (FSDP2), as are experts that several
    processes hold.

    transformers' Trainer trains such a model, but resumes none and takes no best one back: that is here. Weights are
    saved whole, the state of the optimizer in parts ([`SHARDED_OPTIMIZER`]).

    Raises:
        ValueError: the model has no experts that so many processes could share, or another option of the Trainer does
            not go with it.
    """

    def __init__(self, trainer: Any, config: Any, processes: int):
        model, args = trainer.model, trainer.args
        if not isinstance(model, XFormerPreTrainedModel):
            raise ValueError(
                f"`expert_parallel` splits a model of this package, and {type(model).__name__} wraps one; leave"
                " `expert_parallel` or the adapters out."
            )
        check_expert_parallel(config, processes, "expert_parallel")
        what = {
            "a model that is split already": model.is_distributed_loading_by_transformers,
            "segment_streams": trainer.segments is not None,
            "fp16 (take bf16)": args.fp16,
            "fsdp, since it shards the model itself": args.fsdp,
            "deepspeed": args.deepspeed,
            "parallelism_config": args.parallelism_config,
        }
        for name, given in what.items():
            if given:
                raise ValueError(f"`expert_parallel` does not go with {name}; leave one of them out.")
        from ..compat import DistributedConfig

        sizes = DistributedConfig(fsdp_size=args.world_size, ep_size=processes)
        self.model = model.maybe_distribute_model(model, sizes, _mesh(dist.group.WORLD, args.world_size, processes))
        trainer.model = trainer.model_wrapped = self.model
        trainer.is_distributed_loading_by_transformers = True  # no wrapper around it, and all take part in a save

    def load(self, folder: str | Path) -> Any:
        """Reads whole weights from a folder; the names that it does not find, and those that it has no place for."""
        state = {name: tensor for path in weight_files(Path(folder)) for name, tensor in load_file(path).items()}
        found = load_whole(self.model, state)
        tied = self.model.all_tied_weights_keys or {}  # which a file has once
        found.missing_keys[:] = [name for name in found.missing_keys if name not in tied]
        return found

    def save_progress(self, optimizer: Any, scheduler: Any, folder: str | Path, *, writes: bool) -> None:
        """Writes where optimizer and schedule stand. All processes have to call it. writes: whether this one has the
        files that are one for all."""
        from ..compat import save_optimizer_distributed

        save_optimizer_distributed(self.model, _plain(optimizer), str(Path(folder) / SHARDED_OPTIMIZER))
        if writes:
            torch.save(scheduler.state_dict(), Path(folder) / _SCHEDULER)

    def load_progress(self, optimizer: Any, scheduler: Any, folder: str | Path) -> None:
        """Raises ValueError for a checkpoint of a run whose experts were not split."""
        from ..compat import load_optimizer_distributed

        place = Path(folder) / SHARDED_OPTIMIZER
        if not place.is_dir():
            raise ValueError(
                f"{str(folder)!r} was saved by a run without `expert_parallel`; resume it without, or start a new run"
                " from its weights."
            )
        load_optimizer_distributed(self.model, _plain(optimizer), str(place))
        scheduler.load_state_dict(torch.load(Path(folder) / _SCHEDULER, weights_only=True))


def load_whole(model: nn.Module, state: dict[str, Any]) -> Any:
    """Whole tensors into a model, of which this process may have parts alone; as `load_state_dict(strict=False)`."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.tensor import DTensor

    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return model.load_state_dict(state, strict=False)
    return set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False))


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer in Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


@functools.lru_cache
def _mesh(world: Any, processes: int, experts: int) -> Any:
    """The mesh of the processes of a group: every one is a dozen groups, which live as long as it."""
    from transformers import PreTrainedModel

    from ..compat import DistributedConfig

    return PreTrainedModel.prepare_distribute_model(DistributedConfig(fsdp_size=processes, ep_size=experts))[2]

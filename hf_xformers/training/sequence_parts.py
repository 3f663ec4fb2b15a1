# SPDX-License-Identifier: Apache-2.0
"""Training on texts that are divided over the processes of a run: over all, or over rows of some."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compat import BatchSamplerShard, DataLoaderShard
from ..core.sequence_parallel import (
    check_sequence_parallel,
    next_tokens,
    part_of_batch,
    sequence_groups,
    sequence_parallel,
)
from ..core.text_parts import Division

_STREAMED = (
    "`sequence_parallel` gives several processes the same rows, and a streamed dataset deals them out; give a dataset"
    " of known length."
)
_DISPATCHED = (
    "`sequence_parallel` has every process read its rows itself; leave `dispatch_batches` of `accelerator_config` at"
    " None or False."
)


def real_rows(rows: int, left_over: int, reader: int) -> int:
    """How many rows of a reader's last batch of `rows` are not repeats that fill it up. left_over: rows of the dataset
    in the last batches of all readers."""
    return min(max(left_over - rows * reader, 0), rows)


class SequenceParts:
    """What a Trainer does where every process of a row ([`SequenceGroups`]) reads a part of each text of one and the
    same batch, and rows read other batches.

    processes: of a row. The groups are of its own, so that exchanges inside a model and those of
    DistributedDataParallel, which run at the same time, cannot be taken for one another.

    Raises:
        ValueError: the model, or another option of the Trainer, does not go with it.
    """

    def __init__(self, trainer: Any, config: Any, processes: int):
        check_sequence_parallel(config)
        what = {
            "segment_streams": trainer.segments is not None,
            "Recipe(max_tokens=...)": trainer.recipe.max_tokens is not None,
            "label_smoothing_factor": trainer.label_smoother is not None,
            "compute_loss_func": trainer.compute_loss_func is not None,
        }
        for name, given in what.items():
            if given:
                raise ValueError(
                    f"`sequence_parallel` gives every process a part of each text, and `{name}` reads whole"
                    " batches in each; leave one of them out."
                )
        evaluated = trainer.eval_dataset
        for dataset in (trainer.train_dataset, *(evaluated.values() if isinstance(evaluated, dict) else [evaluated])):
            if isinstance(dataset, torch.utils.data.IterableDataset):
                raise ValueError(_STREAMED)
        if trainer.args.accelerator_config.dispatch_batches:
            raise ValueError(_DISPATCHED)
        self.groups = sequence_groups(processes)
        self.group, self.count = self.groups.sequence, processes
        self.replica, self.replicas = self.groups.replica, self.groups.replicas

    @contextlib.contextmanager
    def dividing(self) -> Iterator[None]:
        with sequence_parallel(self.group):
            yield

    def part(self, batch: dict[str, Any]) -> dict[str, Any]:
        """What this process reads of a batch that all have."""
        return part_of_batch(batch, self.group)

    def targets(self, part: dict[str, Any], next_token: bool) -> Tensor:
        """[B, t]: what the tokens of a part predict."""
        if not next_token:
            return part["labels"]
        return next_tokens(part["labels"], part.get("attention_mask"), Division(self.group))

    def total(self, numbers: Tensor) -> Tensor:
        """The sum of the numbers of a row's processes."""
        return self._summed(numbers, self.group)

    def total_of_all(self, numbers: Tensor) -> Tensor:
        """The sum of all processes' numbers."""
        return self._summed(self.total(numbers), self.groups.data)

    @staticmethod
    def _summed(numbers: Tensor, group: Any) -> Tensor:
        numbers = numbers.clone()
        dist.all_reduce(numbers, group=group)
        return numbers

    def agreed(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch of a row's first process, in all of it: collators may draw random numbers."""
        first = dist.get_global_rank(self.group, 0)
        heading: list[Any] = [
            {
                name: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
                for name, value in batch.items()
            }
        ]
        tensors = {name: value.device for name, value in batch.items() if isinstance(value, Tensor)}
        dist.broadcast_object_list(heading, src=first, group=self.group)
        found = dict(heading[0])
        for name, device in tensors.items():
            shape, dtype = found[name]
            own = batch[name]
            alike = own.shape == shape and own.dtype == dtype
            found[name] = own.contiguous() if alike else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(found[name], src=first, group=self.group)
        return found

    def give_whole(self, loader: Any) -> Any:
        """A loader that Accelerate has made, giving every batch to all processes of a row. One row alone gets a last
        batch that may be smaller; several get as many batches of one size.

        Raises:
            ValueError: the loader deals a streamed dataset out, or its first process reads for all.
        """
        shard = loader.batch_sampler
        if isinstance(loader.dataset, torch.utils.data.IterableDataset):
            raise ValueError(_STREAMED)
        if not (isinstance(loader, DataLoaderShard) and isinstance(shard, BatchSamplerShard)):
            raise ValueError(_DISPATCHED)
        shard.num_processes, shard.process_index = self.replicas, self.replica
        shard.even_batches = self.replicas > 1
        return loader

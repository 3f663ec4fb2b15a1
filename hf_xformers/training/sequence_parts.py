"""Training on texts that are divided over all processes of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.sequence_parallel import check_sequence_parallel, next_tokens, part_of_batch, sequence_parallel
from ..core.text_parts import Division


class SequenceParts:
    """What a Trainer does where every process reads a part of each text of one and the same batch.

    The group is one of its own, so that exchanges inside a model and those of DistributedDataParallel, which run at
    the same time, cannot be taken for one another.

    Raises:
        ValueError: the model, or another option of the Trainer, does not go with it.
    """

    def __init__(self, trainer: Any, config: Any):
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
                    f"`sequence_parallel=True` gives every process a part of each text, and `{name}` reads whole"
                    " batches in each; leave one of them out."
                )
        for dataset in (trainer.train_dataset, trainer.eval_dataset):
            if isinstance(dataset, torch.utils.data.IterableDataset):
                raise ValueError(
                    "`sequence_parallel=True` gives all processes the same rows, and a streamed dataset deals them"
                    " out; give a dataset of known length."
                )
        self.group = dist.new_group(list(range(dist.get_world_size())))
        self.count, self.first = dist.get_world_size(), dist.get_rank() == 0

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
        """The sum of all processes' numbers."""
        numbers = numbers.clone()
        dist.all_reduce(numbers, group=self.group)
        return numbers

    def agreed(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The first process's batch, in all: collators may draw random numbers."""
        heading: list[Any] = [
            {
                name: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
                for name, value in batch.items()
            }
        ]
        tensors = {name: value.device for name, value in batch.items() if isinstance(value, Tensor)}
        dist.broadcast_object_list(heading, src=0, group=self.group)
        found = dict(heading[0])
        for name, device in tensors.items():
            shape, dtype = found[name]
            own = batch[name]
            alike = own.shape == shape and own.dtype == dtype
            found[name] = own.contiguous() if alike else torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(found[name], src=0, group=self.group)
        return found

    @staticmethod
    def give_whole(loader: Any) -> Any:
        """A loader that Accelerate has made, giving every batch to all processes."""
        shard = loader.batch_sampler
        shard.num_processes, shard.process_index, shard.even_batches = 1, 0, False
        return loader


__all__ = ["SequenceParts"]

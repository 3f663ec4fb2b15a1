# SPDX-License-Identifier: Apache-2.0
"""Attention transfer: every chosen layer learns to give what the softmax attention in whose place it stands gave.

One forward pass serves all layers: each new attention reads its input and is compared with the source's attention on
the same input, and it is the source's output that flows on. So every layer sees the source's hidden states, and no
layer's error is another's.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.shared.base import Attention
from ..blocks.base import XFormerLayer
from ..core.call import Call, SublayerOutput
from ..core.evaluating import evaluating
from ..modeling_xformer import XFormerModel
from .head_pieces import head_left_out, leaves_head_out
from .partial_checkpoints import TrainedAlone, share_frozen
from .randomness import preserved_randomness
from .trainer import XFormerTrainer

TransferLoss = Literal["output", "weights"]
_QUERIES_AND_KEYS = ("q_proj", "k_proj")


@dataclass(frozen=True)
class Pair:
    """One attention of the student and the source's at the same place."""

    layer: int
    student: Attention
    source: Attention

    def trained(self) -> list[nn.Parameter]:
        """The student's parameters that the source does not have (feature maps, mixing factors, gates); of a mechanism
        without any the projections of queries and keys, which its scores are made of."""
        known = {name: parameter.shape for name, parameter in self.source.named_parameters()}
        new = [own for name, own in self.student.named_parameters() if known.get(name) != own.shape]
        if new:
            return new
        return [
            own for name, own in self.student.named_parameters() if name.partition(".")[0] in _QUERIES_AND_KEYS
        ] or list(self.student.parameters())


def attention_pairs(student: PreTrainedModel, source: PreTrainedModel, layers: Iterable[int]) -> list[Pair]:
    """The attentions of `layers` in both models, which have the same arrangement of layers."""
    own, theirs = _layers(student), _layers(source)
    return [
        Pair(index, cast(Attention, own[index].function(entry)), cast(Attention, theirs[index].function(entry)))
        for index in layers
        for entry in own[index].plan
        if entry.kind == "attention"
    ]


def _layers(model: PreTrainedModel) -> Sequence[XFormerLayer]:
    base = model if isinstance(model, XFormerModel) else model.model
    return cast("Sequence[XFormerLayer]", base.trunk.layers)


def train_only(model: nn.Module, parameters: Iterable[nn.Parameter]) -> int:
    """Freezes all other parameters; how many numbers are left to train."""
    chosen = list(parameters)
    model.requires_grad_(False)
    for parameter in chosen:
        parameter.requires_grad_(True)
    return sum(parameter.numel() for parameter in chosen)


@dataclass
class _Comparison:
    """What hooks on the student's attentions find during one forward pass: losses by place in `pairs`."""

    pairs: Sequence[Pair]
    loss: TransferLoss
    found: dict[int, list[Tensor]] = field(default_factory=dict)

    def hook(self, place: int) -> Any:
        pair = self.pairs[place]

        def compare(_: nn.Module, given: tuple, named: dict[str, Any], result: SublayerOutput) -> SublayerOutput:
            context: Call = given[1]
            seen = copy.copy(context)
            seen.made, seen.states = dict(context.made), dict(context.states)
            with torch.no_grad():
                pair.source.prepare(seen, None)
                taught = pair.source(given[0], seen, step=named.get("step"))
            mask = context.query_padding_mask
            if self.loss == "output":
                error = output_error(result.output, taught.output, mask)
            else:
                error = weight_cross_entropy(result.weights, taught.weights, mask)
            self.found.setdefault(place, []).append(error)
            return taught

        return compare


@contextlib.contextmanager
def comparison(pairs: Sequence[Pair], loss: TransferLoss) -> Iterator[dict[int, list[Tensor]]]:
    """Inside the block a forward pass of the student is one of the source, and leaves here, by place in `pairs`, how
    far each attention is from the source's."""
    made = _Comparison(pairs, loss)
    hooks = [
        pair.student.register_forward_hook(made.hook(place), with_kwargs=True) for place, pair in enumerate(pairs)
    ]
    try:
        yield made.found
    finally:
        for hook in hooks:
            hook.remove()


def output_error(own: Tensor, taught: Tensor, mask: Tensor | None) -> Tensor:
    """|own - taught|^2 / |taught|^2 over real tokens: own and taught [B, T, D], mask [B, T], True = real."""
    own, taught = own.float(), taught.float()
    if mask is not None:
        own, taught = own * mask[..., None], taught * mask[..., None]
    return (own - taught).square().sum() / taught.square().sum().clamp(min=1e-12)


def weight_cross_entropy(own: Tensor | None, taught: Tensor | None, mask: Tensor | None) -> Tensor:
    """Mean over heads and real queries of -sum_j taught_ij log own_ij: own and taught [B, H, T, S] (Zhang et al. 2024,
    arXiv 2402.04347, section 4.2).

    Raises:
        ValueError: one of them gives no weights.
    """
    if own is None or taught is None:
        raise ValueError(
            "`transfer_loss='weights'` compares attention weights, which one of the mechanisms does not give; take"
            " 'output'."
        )
    entropy = -(taught.float() * (own.float() + 1e-8).log()).sum(-1)
    if mask is None:
        return entropy.mean()
    keep = mask[:, None].expand_as(entropy)
    return (entropy * keep).sum() / keep.sum().clamp(min=1)


class AttentionTransferTrainer(TrainedAlone, XFormerTrainer):
    """[`XFormerTrainer`] whose loss is the mean over the chosen layers of how far the model's attention is from the
    source's: `output`, the relative squared error of what the sublayer gives (Zhang et al. 2024, arXiv 2410.10254,
    section 3.2), or `weights`, the cross-entropy of attention weights, which needs the matrix of all pairs. Nothing
    but what [`Pair.trained`] names is trained, without dropout, and checkpoints hold nothing else; what is frozen is
    kept once, for both models. Evaluation is that of the whole model by itself."""

    def __init__(
        self, *args: Any, source: PreTrainedModel, layers: Sequence[int], loss: TransferLoss, **kwargs: Any
    ) -> None:
        self.pairs = attention_pairs(kwargs["model"], source, layers)
        self.transfer_loss = loss
        train_only(kwargs["model"], [parameter for pair in self.pairs for parameter in pair.trained()])
        super().__init__(*args, **kwargs)
        module: Any = source
        module.to(self.args.device).requires_grad_(False).eval()
        share_frozen(kwargs["model"], module)
        self.models_beside = [module]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        model.eval()
        try:
            loss = torch.stack(transfer_losses(model, self.pairs, inputs, self.transfer_loss)).mean()
        finally:
            model.train()
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:  # of a step each micro-batch is a part
            loss = loss / self.current_gradient_accumulation_steps
        return (loss, {"loss": loss}) if return_outputs else loss


def transfer_losses(
    model: nn.Module, pairs: Sequence[Pair], inputs: dict[str, Any], loss: TransferLoss = "output"
) -> list[Tensor]:
    """By pair, how far the student's attention is from the source's on `inputs`. model: the student, or a wrapper of
    it."""
    given = {name: value for name, value in inputs.items() if name != "labels"}
    inner = extract_model_from_parallel(model)
    predictions = head_left_out(inner) if leaves_head_out(inner) else contextlib.nullcontext()  # nobody reads them
    with comparison(pairs, loss) as found, predictions:
        model(**given, output_attentions=loss == "weights")
    return [torch.stack(found[place]).mean() for place in range(len(pairs))]


@torch.no_grad()
def layer_errors(
    student: PreTrainedModel, source: PreTrainedModel, layers: Sequence[int], batches: Iterable[dict[str, Any]]
) -> list[float]:
    """Relative squared error of each chosen layer's attention on the source's hidden states, a mean over batches."""
    pairs = attention_pairs(student, source, layers)
    device = student.device
    module: Any = source
    module.to(device).eval()
    sums: list[float] = []
    with preserved_randomness(), evaluating(student):
        for batch in batches:
            inputs = {key: value.to(device) for key, value in batch.items() if isinstance(value, Tensor)}
            sums.append(torch.stack(transfer_losses(student, pairs, inputs)).cpu())  # type: ignore[arg-type]
    return torch.stack(sums).mean(0).tolist() if sums else []  # type: ignore[arg-type]

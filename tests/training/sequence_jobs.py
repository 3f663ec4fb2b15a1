"""What the processes of test_sequence_parallel.py do: every case is compared with the same model in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from hf_xformers import (
    XFormerConfig,
    XFormerForCausalLM,
    XFormerForMaskedLM,
    XFormerForTokenClassification,
    part_of_batch,
    sequence_groups,
    sequence_parallel,
)
from hf_xformers.core.components import SLOTS, names
from hf_xformers.core.sequence_parallel import why_not_sequence_parallel
from tests.helpers import NO_DROPOUT, make_strong, tokens

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    **NO_DROPOUT,
}
LINEAR = {"attention": "linear_transformer"}
PERFORMER = {"attention": {"type": "performer", "num_features": 8}}
DELTA = {"attention": {"type": "delta_net", "nu": 1, "chunk_size": 4}, "position": "none"}
BAND = {"attention": {"type": "band_attention", "window_size": 3}}
BLOCKS = {"attention": {"type": "block_local_attention", "block_size": 4, "blocks_before": 1}}
SINKS = {"attention": {"type": "sliding_window", "window_size": 2, "sinks": 2}}
LONGFORMER = {"attention": {"type": "longformer", "attention_window": 4}}
LINFORMER = {"attention": {"type": "linformer", "projected_length": 4}}
XL = {
    "attention": "transformer_xl",
    "position": "none",
    "stack": {"type": "segment_recurrent", "memory_length": 3},
    "residual": "pre_ln",
}
LONG_MEMORY = {**XL, "stack": {"type": "segment_recurrent", "memory_length": 9}}


class PartCase(NamedTuple):
    """A model and a batch. rows: `full` of text, padded on the `right` or the `left`, `packed` with documents, or cut
    by hand with padding on the left (`left as it is`). segments: one process reads the parts one after the other."""

    fields: dict[str, Any]
    model: type = XFormerForCausalLM
    length: int = 12
    rows: str = "right"
    checkpointing: bool = False
    segments: bool = False


ENCODER = XFormerForMaskedLM
CASES: dict[str, PartCase] = {
    "linear encoder": PartCase(LINEAR, ENCODER),
    "linear encoder, rotary, uneven": PartCase({**LINEAR, "position": "rotary"}, ENCODER, 13, "full"),
    "performer encoder, left": PartCase(PERFORMER, ENCODER, 11, "left"),
    "performer encoder, left as it is": PartCase(PERFORMER, ENCODER, 12, "left as it is"),
    "tags": PartCase({**LINEAR, "num_labels": 40}, XFormerForTokenClassification),
    "linear decoder": PartCase(LINEAR),
    "linear decoder, one token each": PartCase(LINEAR, length=2),
    "linear decoder, checkpointing": PartCase({**LINEAR, "position": "rotary"}, length=13, checkpointing=True),
    "performer decoder": PartCase({**PERFORMER, "position": "sinusoidal_absolute"}, length=11),
    "performer decoder, left as it is": PartCase(PERFORMER, rows="left as it is"),
    "hedgehog": PartCase({"attention": "hedgehog", "num_key_value_heads": 2}, length=9, rows="full"),
    "arc-cosine features": PartCase({"attention": "arccos_attention"}, length=13),
    "learned features": PartCase({"attention": "t2r"}, ENCODER, 13),
    # Its features are drawn anew for every pass in training, and one process makes a pass more.
    "random Fourier features": PartCase({"attention": {"type": "rfa", "redraw_interval": 0}}, length=13),
    "random Fourier features, encoder": PartCase({"attention": {"type": "rfa", "redraw_interval": 0}}, ENCODER),
    "sum rule": PartCase({"attention": {"type": "dpfp", "attention_normalize": False}}, length=9),
    "delta rule": PartCase(DELTA),
    "delta rule, uneven": PartCase({**DELTA, "position": "rotary"}, length=13, rows="left"),
    "delta rule, random features": PartCase(
        {"attention": {"type": "delta_net", "feature_map": "favor", "num_features": 4}}, length=7, rows="left as it is"
    ),
    "band": PartCase(BAND, ENCODER),
    "band wider than a part": PartCase(
        {"attention": {"type": "band_attention", "window_size": 9}}, ENCODER, 13, "left"
    ),
    "band, packed": PartCase({**BAND, "position": "rotary"}, length=13, rows="packed"),
    "band, packed encoder": PartCase(BAND, ENCODER, 12, "packed"),
    "band, left as it is": PartCase({**BAND, "position": "alibi"}, length=12, rows="left as it is"),
    "band, bias": PartCase({**BAND, "position": "t5_relative_bias"}, ENCODER, 11),
    "band by layer, block of its own": PartCase(
        {"attention": {"type": "band_attention", "window_size": (2, 5)}, "block": "macaron"}, length=9, rows="full"
    ),
    "holes": PartCase({"attention": {"type": "dilated_attention", "window_size": 2, "dilation": (1, (1, 2, 2, 3))}}),
    "holes, packed": PartCase(
        {"attention": {"type": "dilated_attention", "window_size": 2, "dilation": 2}}, length=13, rows="packed"
    ),
    "blocks": PartCase(BLOCKS, ENCODER, 13, "left"),
    "blocks, decoder": PartCase(BLOCKS, length=14),
    "first tokens in sight": PartCase({**SINKS, "position": "rotary"}, length=13),
    "first tokens in sight, left": PartCase(SINKS, ENCODER, 12, "left as it is"),
    "learned sinks": PartCase(
        {"attention": {"type": "sliding_window", "window_size": 3, "sinks": 0, "learned_sinks": True}}, length=9
    ),
    "longformer": PartCase(LONGFORMER, ENCODER, 13),
    "longformer, left": PartCase(LONGFORMER, ENCODER, 12, "left as it is"),
    "longformer, one projection": PartCase(
        {"attention": {**LONGFORMER["attention"], "separate_global_projections": False}}, ENCODER, 9, "full"
    ),
    "longformer decoder": PartCase(LONGFORMER, length=13),
    "linformer": PartCase(LINFORMER, ENCODER, 13),
    "linformer, left": PartCase(LINFORMER, ENCODER, 12, "left as it is"),
    "linformer, a projection for all layers": PartCase(
        {"attention": {**LINFORMER["attention"], "sharing": "layerwise"}}, ENCODER, 12, "full"
    ),
    "linformer, projections by head": PartCase(
        {"attention": {**LINFORMER["attention"], "sharing": "none"}}, ENCODER, 11, "left"
    ),
    "transformer-xl": PartCase(XL, segments=True),
    "transformer-xl, uneven": PartCase(XL, length=13, rows="full", segments=True),
    "transformer-xl, memory longer than a part": PartCase(LONG_MEMORY, length=14, segments=True),
    "transformer-xl, left as it is": PartCase(LONG_MEMORY, rows="left as it is", segments=True),
    "transformer-xl, learned distances, checkpointing": PartCase(
        {**XL, "attention": {"type": "transformer_xl", "distances": "learned", "clamp": 5, "share_biases": False}},
        length=11,
        rows="left",
        checkpointing=True,
        segments=True,
    ),
    "transformer-xl, encoder": PartCase(LONG_MEMORY, ENCODER, 13, segments=True),
    "transformer-xl, no memory": PartCase(
        {**XL, "stack": {"type": "segment_recurrent", "memory_length": 0}}, segments=True
    ),
}


def batch_of(case: PartCase) -> dict[str, Tensor]:
    """Two rows of unequal lengths (or of documents), with labels, and global tokens where a model reads them."""
    ids = tokens(2, case.length, high=40)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if case.model is not XFormerForCausalLM:
        batch["labels"][:, ::3] = -100
    place = torch.arange(case.length)
    if case.rows == "packed":
        batch["position_ids"] = torch.stack([place % 5, (place + 4) % 7])
    elif case.rows != "full":
        short = max(case.length - 5, 1)
        real = place < torch.tensor([case.length, short])[:, None]
        real = real.flip(1) if case.rows.startswith("left") else real
        batch["attention_mask"] = real.long()
        batch["labels"] = batch["labels"].masked_fill(~real, -100)
    name = case.fields["attention"]
    if not isinstance(name, str) and name["type"] == "longformer" and case.model is ENCODER:
        batch["global_attention_mask"] = ((place % 6 == 2) | (place == case.length - 1)).long().expand(2, -1).clone()
    return batch


def part_by_hand(batch: dict[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
    """Contiguous parts of rows as they are, filled up on the right."""
    length = next(iter(batch.values())).shape[1]
    size, lacking = -(-length // world), -length % world
    filled = {
        name: pad(value, (*[0, 0] * (value.ndim - 2), 0, lacking), value=-100 if name == "labels" else 0)
        for name, value in batch.items()
    }
    return {name: value[:, rank * size : (rank + 1) * size] for name, value in filled.items()}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    found = {
        name: torch.zeros_like(value) if value.grad is None else value.grad.clone()
        for name, value in model.named_parameters()
    }
    model.zero_grad()
    return found


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest number, or to a small one."""
    if not found.numel():
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


def model_of(fields: dict[str, Any], model: type) -> nn.Module:
    torch.manual_seed(0)
    return make_strong(model(XFormerConfig(**{**SIZES, **fields, "is_decoder": model is XFormerForCausalLM})).double())


def read_in_segments(model: nn.Module, batch: dict[str, Tensor], size: int) -> tuple[Tensor, Tensor]:
    """Logits [B, T, V] and loss of one process that reads segments of `size` tokens, each with the memory that the one
    before has left."""
    memory, logits, length = None, [], batch["input_ids"].shape[1]
    for first in range(0, length, size):
        segment = {name: value[:, first : first + size] for name, value in batch.items() if name != "labels"}
        output = model(**segment, segment_memory=memory)
        memory = output.segment_memory
        logits.append(output.logits)
    whole, labels = torch.cat(logits, dim=1), batch["labels"]
    if isinstance(model, XFormerForCausalLM):
        real = batch.get("attention_mask", torch.ones_like(labels))
        labels = labels.masked_fill(real.cumsum(1) <= 1, -100)  # nothing predicts a text's first token
        return whole, cross_entropy(whole[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return whole, cross_entropy(whole.flatten(0, 1), labels.flatten())


def compared(case: PartCase, rank: int, world: int) -> dict[str, float]:
    model, batch = model_of(case.fields, case.model).train(), batch_of(case)
    if case.segments:
        if case.rows == "left":  # where the parts' rows begin
            batch = {
                name: torch.stack([value[0], value[1].roll(-(case.length - max(case.length - 5, 1)))])
                for name, value in batch.items()
            }
        whole_logits, whole_loss = read_in_segments(model, batch, -(-case.length // world))
    else:
        whole = model(**batch)
        whole_logits, whole_loss = whole.logits, whole.loss
    whole_loss.backward()
    expected = gradients_of(model)
    if case.checkpointing:
        model.activation_checkpointing_enable()
    texts = {**batch, "logits": whole_logits.detach()}
    own = part_by_hand(texts, rank, world) if case.rows == "left as it is" else part_of_batch(texts)
    logits = own.pop("logits")
    with sequence_parallel():
        part = model(**own)
    part.loss.backward()
    gradients = gradients_of(model)
    for gradient in gradients.values():  # as DistributedDataParallel does
        dist.all_reduce(gradient)
        gradient /= world
    real = torch.ones_like(own["input_ids"]) if "attention_mask" not in own else own["attention_mask"]
    real = (real != 0) & (torch.arange(real.shape[1]) + rank * real.shape[1] < case.length)
    return {
        "logits": difference(part.logits[real].detach(), logits[real]),
        "loss": difference(part.loss.detach(), whole_loss.detach()),
        **{f"gradient of {name}": difference(gradients[name], expected[name]) for name in expected},
    }


OF_THREE = [
    "linear encoder, rotary, uneven",
    "linear decoder",
    "performer decoder, left as it is",
    "delta rule, uneven",
    "band wider than a part",
    "band, packed",
    "blocks",
    "first tokens in sight, left",
    "longformer",
    "linformer, left",
]


OF_FOUR = [
    "transformer-xl",
    "transformer-xl, uneven",
    "transformer-xl, memory longer than a part",
    "transformer-xl, left as it is",
    "transformer-xl, encoder",
    "linear decoder, checkpointing",
    "delta rule, uneven",
]


def forms(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Outputs, losses and gradients as differences from those of whole texts: of every case in two processes, of some
    in three and four."""
    names: list[str] = {1: [], 2: list(CASES), 3: OF_THREE, 4: OF_FOUR}[world]
    return {name: compared(CASES[name], rank, world) for name in names}


def promised() -> dict[str, PartCase]:
    """Beside linear attention, each component of the other slots that is let through: it promises to look at single
    tokens."""
    found = {}
    for slot in SLOTS:
        for name in () if slot in ("attention", "cross_attention") else names(slot):
            try:
                config = XFormerConfig(**{**SIZES, **LINEAR, slot: name, "is_decoder": True})
            except ValueError:  # it stands in no such model
                continue
            if not why_not_sequence_parallel(config):
                found[f"{slot} {name}"] = PartCase({**LINEAR, slot: name}, length=13)
    return found


def components(rank: int, world: int, folder: str) -> dict[str, Any]:
    if world == 1:
        return {}
    return {name: compared(case, rank, world) for name, case in promised().items()}


# ------------------------------------------------------------------------------------------------ traffic

MEASURED = {
    "linear encoder": (LINEAR, ENCODER),
    "performer encoder": (PERFORMER, ENCODER),
    "linear decoder": (LINEAR, XFormerForCausalLM),
    "delta rule": (DELTA, XFormerForCausalLM),
    "band": (BAND, ENCODER),
    "linformer": (LINFORMER, ENCODER),
}


def bytes_sent(fields: dict[str, Any], model: type, length: int, layers: int) -> int:
    """Bytes of numbers that this process puts into exchanges in a pass and its gradients."""
    built = model_of({**fields, "num_hidden_layers": layers}, model)
    ids, sent = tokens(1, length, high=40), [0]

    def count(tensor: Tensor) -> None:
        sent[0] += tensor.numel() * tensor.element_size() if tensor.is_floating_point() else 0

    reduce, gather, swap = dist.all_reduce, dist.all_gather, dist.batch_isend_irecv

    def all_reduce(tensor, *args, **kwargs):
        count(tensor)
        return reduce(tensor, *args, **kwargs)

    def all_gather(found, tensor, *args, **kwargs):
        count(tensor)
        return gather(found, tensor, *args, **kwargs)

    def exchange(steps):
        for step in steps:
            if step.op is dist.isend:
                count(step.tensor)
        return swap(steps)

    counted = {"all_reduce": all_reduce, "all_gather": all_gather, "batch_isend_irecv": exchange}
    with mock.patch.multiple(dist, **counted), sequence_parallel():
        built(**part_of_batch({"input_ids": ids, "labels": ids})).loss.backward()
    return sent[0]


def traffic(rank: int, world: int, folder: str) -> dict[str, Any]:
    """For texts of two lengths: the bytes that a layer sends."""
    if world != 2:
        return {}
    return {
        name: [bytes_sent(*case, length, 2) - bytes_sent(*case, length, 1) for length in (16, 64)]
        for name, case in MEASURED.items()
    }


# ------------------------------------------------------------------------------------------------ data x sequence

OF_MESH = ["linear decoder", "delta rule", "band", "transformer-xl"]


def mesh(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Two rows of two processes, each with other texts: gradients against those of one process that reads all texts;
    and what is said of rows that the processes do not make."""
    if world != 4:
        return {}
    groups, found = sequence_groups(2), {}
    for name in OF_MESH:
        case = CASES[name]
        model, half = model_of(case.fields, case.model).train(), batch_of(case)
        more = {**half, "input_ids": (half["input_ids"] + 7) % 40, "labels": half["labels"].roll(1, 1)}
        batch = {name: torch.cat([half[name], more[name].flip(0)[:1]]) for name in half}  # rows of other sizes
        if case.segments:
            _, loss = read_in_segments(model, batch, -(-case.length // 2))
        else:
            loss = model(**batch).loss
        loss.backward()
        expected = gradients_of(model)
        targets = batch["labels"]
        if case.model is XFormerForCausalLM:
            targets = targets.masked_fill(batch["attention_mask"].cumsum(1) <= 1, -100)
        own = {name: value[2 * groups.replica : 2 * groups.replica + 2] for name, value in batch.items()}
        with sequence_parallel(groups.sequence):
            count = (targets != -100).sum() / groups.replicas
            part = model(**part_of_batch(own, groups.sequence), num_items_in_batch=count)
        part.loss.backward()
        gradients, losses = gradients_of(model), part.loss.detach() / world
        dist.all_reduce(losses)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= world
        found[name] = {
            "loss": difference(losses, loss.detach()),
            **{f"gradient of {key}": difference(gradients[key], expected[key]) for key in expected},
        }
    try:
        sequence_groups(3)
    except ValueError as error:
        found["refusal"] = str(error)
    return found


# ------------------------------------------------------------------------------------------------ refusals


def refusals(rank: int, world: int, folder: str) -> dict[str, str]:
    """What is said of texts that a memory cannot be read for, of documents that a sum would mix, and of rows that are
    dealt out."""
    if world != 2:
        return {}
    model, found = model_of(XL, XFormerForCausalLM), {}
    ids, place = tokens(2, 6, high=40), torch.arange(6) + 6 * rank
    given: dict[str, dict[str, Any]] = {
        "memory": {"segment_memory": model(ids, use_cache=False).segment_memory},
        "documents": {"position_ids": (place % 4).expand(2, -1)},
        "gap": {"attention_mask": (place % 4 != 1).long().expand(2, -1)},
    }
    packed = {name: model_of({"attention": name}, XFormerForCausalLM) for name in ("linear_transformer", "longformer")}
    calls = [(name, model, inputs) for name, inputs in given.items()]
    calls += [(name, of_sums, given["documents"]) for name, of_sums in packed.items()]
    for name, called, inputs in calls:
        try:
            with sequence_parallel():
                called(ids, **inputs)
        except ValueError as error:
            found[name] = str(error)
    return {**found, **dealt_out(folder)}


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([])


def dealt_out(folder: str) -> dict[str, str]:
    """What `sequence_parallel` says of rows that it cannot give to all processes."""
    from transformers import TrainingArguments

    from hf_xformers.training.trainer import XFormerTrainer

    def build(rows: Any, **options: Any) -> Any:
        arguments = TrainingArguments(
            output_dir=folder, report_to="none", use_cpu=True, ddp_backend="gloo", disable_tqdm=True, **options
        )
        model = model_of(LINEAR, XFormerForCausalLM)
        return XFormerTrainer(model=model, args=arguments, eval_dataset=rows, sequence_parallel=True)

    steps = {
        "streamed": lambda: build(Streamed()),
        "streamed, one of several": lambda: build({"one": [], "two": Streamed()}),
        "streamed later": lambda: build([]).evaluate(Streamed()),
        "dispatched": lambda: build([], accelerator_config={"dispatch_batches": True}),
    }
    found = {}
    for name, step in steps.items():
        try:
            step()
        except ValueError as error:
            found[name] = str(error)
    return found


# ------------------------------------------------------------------------------------------------ Trainer

RUNS: dict[str, tuple[dict[str, Any], type, dict[str, Any]]] = {
    "linear decoder": (LINEAR, XFormerForCausalLM, {}),
    "delta rule, accumulated, checkpointed": (
        DELTA, XFormerForCausalLM, {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
    ),
    "band encoder": (BAND, ENCODER, {"average_tokens_across_devices": False}),
}  # fmt: skip


def trainer(rank: int, world: int, folder: str) -> dict[str, Any]:
    """`XFormerTrainer(sequence_parallel=True)`: in one process, where it changes nothing, and in two; in four each two
    of them read other rows (`sequence_parallel=2`)."""
    if world == 3:
        return {}
    from transformers import TrainingArguments

    from hf_xformers.training.trainer import XFormerTrainer

    found: dict[str, Any] = {}
    for number, (name, (fields, kind, options)) in enumerate(RUNS.items()):
        rows_of_process = 1 if world == 4 else 2
        if options.get("average_tokens_across_devices") is False and world == 4:
            continue  # there rows of processes have losses of their own
        ids = tokens(7, 11, high=40)
        lengths = torch.tensor([11, 4, 9, 2, 11, 7, 5])[:, None]
        mask = (torch.arange(11)[None] < lengths).long()
        labels = ids.masked_fill(mask == 0, -100)
        rows = [{"input_ids": ids[row], "attention_mask": mask[row], "labels": labels[row]} for row in range(7)]
        arguments = TrainingArguments(
            output_dir=str(Path(folder) / f"{number}-{world}"),
            per_device_train_batch_size=rows_of_process,
            per_device_eval_batch_size=rows_of_process,
            num_train_epochs=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo" if world > 1 else None,
            seed=3,
            include_num_input_tokens_seen="all",
            **options,
        )
        divided = 2 if world == 4 else True
        run = XFormerTrainer(
            model=model_of(fields, kind),
            args=arguments,
            train_dataset=rows,
            eval_dataset=rows,
            sequence_parallel=divided,
        )
        run.train()
        metrics = run.evaluate()
        prediction = run.predict(rows)
        unlabelled = run.predict([{key: row[key] for key in ("input_ids", "attention_mask")} for row in rows])
        seen: list[tuple[int, ...]] = []
        own = XFormerTrainer(
            model=run.model,
            args=arguments,
            eval_dataset=rows,
            compute_metrics=lambda prediction: seen.append(prediction.predictions.shape) or {},
            sequence_parallel=divided,
        ).evaluate()
        run.args.prediction_loss_only = True
        found[name] = {
            "rows": torch.from_numpy(prediction.predictions),
            "test_loss": prediction.metrics["test_loss"],
            "logits": torch.from_numpy(unlabelled.predictions),
            "own": (seen, own["eval_loss"], run.evaluate()["eval_loss"]),
            "losses": [entry["loss"] for entry in run.state.log_history if "loss" in entry],
            "metrics": {
                key: value for key, value in metrics.items() if "_per_second" not in key and "runtime" not in key
            },
            "state": {key: value.detach().clone() for key, value in run.model.state_dict().items()},
        }
    return found

"""What the processes of test_expert_parallel.py do: the steps of models whose experts are split over processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments

from hf_xformers.cli import main
from hf_xformers.training.trainer import XFormerTrainer
from tests.common.cases import Case
from tests.helpers import NO_DROPOUT
from tests.training.distributed_jobs import ROWS, case_of, dataset, global_batch, state_of, token_loss
from tests.training.runs import SHAPE, flags, history, summary, weights, write_text

COMMON = {"num_experts": 4, "every": 1}
# What could hide a difference has to be there: experts that are full, padding, biases, gates and no gates.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "switch": (
        "xf_switch_transformer",
        "seq2seq",
        {"type": "switch_transformer", **COMMON, "jitter": 0.0, "capacity_factor": 0.5, "z_loss_weight": 0.1},
    ),
    "gshard": (
        "xf_gshard_moe",
        "encoder",
        {"type": "gshard_moe", **COMMON, "second_expert": "all", "capacity_factor": 1.0, "bias": True},
    ),
    "sparsely gated": ("xf_sparsely_gated_moe", "decoder", {"type": "sparsely_gated_moe", **COMMON, "noise": False}),
    "prototypes": ("xf_expert_prototyping", "encoder", {"type": "expert_prototyping", **COMMON}),
    "hashes": ("xf_hash_layers", "decoder", {"type": "hash_layers", "num_experts": 8}),
}
# name -> what is split, by the number of processes; those of one `tp_size` group have one batch
LAYOUTS: dict[str, dict[int, dict[str, Any]]] = {
    "one batch": {n: {"tp_size": n, "tp_plan": {}, "ep_size": n} for n in (2, 4)},
    "one batch, all-reduce": {
        n: {"tp_size": n, "tp_plan": {}, "ep_size": n, "ep_implementation": "all_reduce"} for n in (2, 4)
    },
    "a batch each": {n: {"fsdp_size": n, "ep_size": n} for n in (2, 4)},
    "heads and experts": {
        2: {"tp_size": 2, "ep_size": 2},
        4: {"tp_size": 2, "fsdp_size": 2, "ep_size": 2},  # every expert in two processes
    },
}
# What four processes split as well: the layouts are the same code for every family, which two processes show.
OF_FOUR = ("switch", "hashes")
LOADED = "heads and experts"  # which `from_pretrained` distributes; the others stand in memory before


def whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def step(case: Case, model: nn.Module, part: int, parts: int) -> dict[str, Any]:
    """Loss, auxiliary losses and gradients in training, logits in evaluation; of rows `part` of `parts`."""
    share = ROWS // parts
    rows = slice(part * share, (part + 1) * share)
    ids, mask = global_batch(0)
    labels = ids.masked_fill(mask == 0, -100)
    model.train()
    found: dict[str, Any] = {}
    if parts == 1:  # balance and all, as `loss.backward()` has it
        more = {"decoder_input_ids": ids, "decoder_attention_mask": mask} if case.shape == "seq2seq" else {}
        output = model(input_ids=ids, attention_mask=mask, labels=labels, **more)
        output.loss.backward()
        found["aux"] = {name: loss.detach().clone() for name, loss in (output.aux_losses or {}).items()}
        found["loss"] = output.loss.detach().clone()
        found["gradients"] = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
    token_loss(case, model, rows, parts, 0).backward()  # a process balances its own rows: the task alone
    found["task gradients"] = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.eval()
    with torch.no_grad():
        found["logits"] = case.run(model, ids, mask)
    return found


def expert_parallel(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Every layout of every family: a step, and the checkpoint, read again as a plain model."""
    found: dict[str, Any] = {}
    meshes: dict[str, Any] = {}
    if world > 1:
        from transformers.distributed import DistributedConfig

        for layout, sizes in LAYOUTS.items():
            sharding = DistributedConfig(**sizes[world])
            mesh = None if layout == LOADED else PreTrainedModel.prepare_distribute_model(sharding)[2]
            meshes[layout] = sharding, mesh
    names = OF_FOUR if world == 4 else CASES
    for number, (name, (model_type, shape, feedforward)) in enumerate((name, CASES[name]) for name in names):
        case = case_of(model_type, shape)
        if world == 1:
            model = case.build(strong=True, **NO_DROPOUT, feedforward=feedforward)
            found[name] = {**step(case, model, 0, 1), "state": state_of(model)}
            continue
        for which, (layout, (sharding, mesh)) in enumerate(meshes.items()):
            model = case.build(strong=True, **NO_DROPOUT, feedforward=feedforward)
            if layout == LOADED:
                start = Path(folder) / f"{number}-start-{world}"
                model.save_pretrained(start)  # only the first process writes
                torch.distributed.barrier()
                model = type(model).from_pretrained(start, dtype="float64", distributed_config=sharding)
            else:  # one mesh for all: each is a dozen groups, and every group keeps threads until the process ends
                model = model.maybe_distribute_model(model, sharding, mesh)
            local = {p.to_local().shape[0] for p_name, p in model.named_parameters() if p_name.endswith("up_proj")}
            group = sharding.tp_size
            done = step(case, model, rank // group, world // group)
            place = Path(folder) / f"{number}-{which}-{world}"
            model.save_pretrained(place)
            torch.distributed.barrier()
            done["experts"] = local
            done["state"] = state_of(type(model).from_pretrained(place, dtype="float64"))
            found[f"{name}, {layout}"] = done
    return found


# ------------------------------------------------------------------------------------------------ Trainer

# A process balances its own rows, so that no loss but the task's is compared.
UNBALANCED = {
    "switch": {"balance_loss_weight": 0.0, "z_loss_weight": 0.0},
    "gshard": {"balance_loss_weight": 0.0},
    "sparsely gated": {"importance_loss_weight": 0.0, "load_loss_weight": 0.0},
}
# A run for each option that meets split experts, whatever family they are of.
# What differs from two epochs of 6 rows, 4 a step: the last step of an epoch has 2 that count.
RUNS: dict[str, dict[str, Any]] = {
    "switch": {"gradient_accumulation_steps": 2, "num_train_epochs": 3, "save_strategy": "no"},
    "gshard": {
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
        "eval_strategy": "steps", "eval_steps": 2,
    },
    "sparsely gated": {"gradient_checkpointing": True},
}  # fmt: skip
SAVED = 2
# What a number of processes trains, over how many of them experts are split, and what it resumes.
TRAINED: dict[int, dict[str, bool | int]] = {
    1: dict.fromkeys(RUNS, False),
    2: dict.fromkeys(RUNS, True),
    4: {"switch": 2},
}
RESUMED = {2: "sparsely gated"}


def trainer_of(name: str, world: int, folder: Path) -> XFormerTrainer:
    model_type, shape, feedforward = CASES[name]
    case = case_of(model_type, shape)
    model = case.build(strong=True, **NO_DROPOUT, feedforward={**feedforward, **UNBALANCED[name]})
    options = {"num_train_epochs": 2, "save_steps": SAVED, **RUNS[name]}
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS // world,
        per_device_eval_batch_size=ROWS // world,
        learning_rate=1e-2,
        weight_decay=0.1,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo" if world > 1 else None,
        **options,
    )
    data = dataset(case, 6)
    split = TRAINED[world][name]
    return XFormerTrainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data[:5], expert_parallel=split
    )


def trainer(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Every run from its start, some again from a checkpoint; and the models that they save."""
    found: dict[str, Any] = {}
    for number, name in enumerate(TRAINED[world]):
        place = Path(folder) / f"{number}-{world}"
        first = trainer_of(name, world, place)
        first.train()
        first.save_model(str(place / "end"))
        metrics = first.evaluate()
        kind = next(base for base in type(first.model).__mro__ if base.__module__.startswith("hf_xformers"))
        found[name] = {
            "losses": [entry["loss"] for entry in first.state.log_history if "loss" in entry],
            "metrics": {key: value for key, value in metrics.items() if not key.endswith(("time", "second"))},
            "best": first.state.best_global_step,
            "state": state_of(kind.from_pretrained(place / "end", dtype="float64")),
        }
        if name == RESUMED.get(world):
            again = trainer_of(name, world, place)
            again.train(resume_from_checkpoint=str(place / f"checkpoint-{SAVED}"))
            again.save_model(str(place / "again"))
            found[name]["resumed"] = state_of(kind.from_pretrained(place / "again", dtype="float64"))
            found[name]["resumed losses"] = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
    return found


# ------------------------------------------------------------------------------------------------ commands


def commands(rank: int, world: int, folder: str) -> dict[str, Any]:
    """`pretrain --expert_parallel` with the mean of its checkpoints, and `finetune --expert_parallel` of what it
    saves."""
    Accelerator.end_training = lambda self: None  # which leaves the group that the second command needs
    place, rows = Path(folder) / str(world), ROWS // world
    place.mkdir(parents=True, exist_ok=True)
    split = {"expert_parallel": "2"} if world > 1 else {}
    common = {
        "per_device_train_batch_size": rows, "per_device_eval_batch_size": rows, "max_steps": 3, "seed": 3,
        "logging_steps": 1, "use_cpu": "true", "report_to": "none", "disable_tqdm": "true",
        **({"ddp_backend": "gloo"} if world > 1 else {}),
    }  # fmt: skip
    feedforward = {"num_experts": 4, "every": 1, "jitter": 0.0, "balance_loss_weight": 0.0}
    model = {
        **SHAPE, "variant": "switch_transformer", "objective": "clm", "hidden_dropout_prob": 0.0, "block_size": 16,
        "attention_probs_dropout_prob": 0.0, **{f"feedforward.{name}": value for name, value in feedforward.items()},
    }  # fmt: skip
    saving = {"save_strategy": "steps", "save_steps": 1, "average_checkpoints": 2}
    text, table = place / f"text-{rank}.txt", place / f"rows-{rank}.csv"
    write_text(text)
    table.write_text(
        "text,label\n" + "".join(f"{('lo', 'ka')[row % 2]}ran selmi {row},{row % 2}\n" for row in range(20))
    )
    first, second = place / "pretrained", place / "finetuned"
    assert main(["pretrain", *flags(data=text, output_dir=first, **model, **common, **saving, **split)]) == 0
    task = {"task": "classification", "data": table, "model": first, "output_dir": second}
    assert main(["finetune", *flags(**task, **common, **split)]) == 0
    if world > 1:
        torch.distributed.barrier()
    return {
        folder.name: {
            "losses": [entry["loss"] for entry in history(folder) if "loss" in entry],
            "summary": summary(folder),
            "state": weights(folder),
        }
        for folder in (first, second)
    }

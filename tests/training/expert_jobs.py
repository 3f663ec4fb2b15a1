"""What the processes of test_expert_parallel.py do: the steps of models whose experts are split over processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.common.cases import Case
from tests.helpers import NO_DROPOUT
from tests.training.distributed_jobs import ROWS, case_of, global_batch, state_of, token_loss

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
LOADED = "heads and experts"  # which `from_pretrained` distributes; the others stand in memory before
# torch's FSDP2 divides float64 gradients twice where a parameter's group is a single process.
DTYPES = {"a batch each": torch.float32}


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
    for number, (name, (model_type, shape, feedforward)) in enumerate(CASES.items()):
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
                model = model.to(DTYPES.get(layout, torch.float64))
                model = model.maybe_distribute_model(model, sharding, mesh)
            local = {p.to_local().shape[0] for p_name, p in model.named_parameters() if p_name.endswith("up_proj")}
            group = sharding.tp_size
            done = step(case, model, rank // group, world // group)
            place = Path(folder) / f"{number}-{which}-{world}"
            model.save_pretrained(place)
            torch.distributed.barrier()
            done["experts"] = local
            done["state"] = state_of(type(model).from_pretrained(place, dtype=DTYPES.get(layout, torch.float64)))
            found[f"{name}, {layout}"] = done
    return found

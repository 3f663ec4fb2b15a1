"""What the processes of test_distributed.py do: each job runs in every process, see [`processes.run_jobs`]."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from hf_xformers.core.components import SLOTS
from hf_xformers.core.parallel_plans import layers_apart
from hf_xformers.core.precision import Float32Module
from hf_xformers.training.float32_shards import keep_float32_in_shards
from hf_xformers.training.trainer import XFormerTrainer
from hf_xformers.variants import model_types
from tests.common.cases import CASES, Case, components, covering
from tests.helpers import NO_DROPOUT, VOCAB, tokens

ROWS, LENGTH, STEPS = 4, 12, 2  # the second step starts from what the first one changed

# What would hide a difference, or what a comparison with one process has to do without: noise.
CHANGES: dict[str, dict[str, Any]] = {
    "xf_adaptive_span": {"attention": {"type": "adaptive_span", "start": 0.5}},  # its clamp is not linear in gradients
    "xf_conditional_computation_transformer": {"stack": {"type": "conditional_computation", "noise_max": 0.0}},
    "xf_gshard_moe": {"feedforward": {"type": "gshard_moe", "num_experts": 4, "second_expert": "all"}},
    "xf_performer": {"attention": {"type": "performer", "num_features": 8, "redraw_interval": 1}},
    "xf_power_norm": {"normalization": {"type": "power_norm", "warmup_iters": 1}},
    "xf_sac": {"attention": {"type": "sac", "edges_per_node": 3, "sample_edges": False}},
    "xf_sinkhorn_transformer": {"attention": {"type": "sinkhorn_transformer", "noise": False}},
    "xf_sparsely_gated_moe": {"feedforward": {"type": "sparsely_gated_moe", "num_experts": 4, "noise": False}},
    "xf_switch_transformer": {"feedforward": {"type": "switch_transformer", "jitter": 0.0, "num_experts": 4}},
}


def breadth_cases() -> list[Case]:
    """Every model type in its first shape."""
    first: dict[str, Case] = {}
    for case in CASES:
        if case.name in model_types():
            first.setdefault(case.name, case)
    return list(first.values())


AROUND = ("embedding", "position", "block", "stack", "head")  # slots of what stands around a layer's own mechanisms


def trained_parts(case: Case) -> set[Any]:
    """What a step changes: parameters, and buffers (statistics, centroids, counters, features) where there are any;
    and the components that decide which of them take part."""
    model = case.shared()
    weights = {("parameter", name.split(".")[-2]) for name, _ in model.named_parameters()}
    states = {("buffer", name.split(".")[-1]) for name, _ in model.named_buffers()}
    return weights | states | {(slot, name) for slot, name, *_ in components(case) if slot in AROUND}


def sharded_parts(case: Case) -> set[Any]:
    """What a plan of shards can go wrong with: whatever may read parameters outside their layer's call, layers that
    share them, tied tables, mixtures, layers that are no unit of their own. A mechanism that reads its own parameters
    in its own call is like any other."""
    config = case.preset
    layers = [layer for tower in config.tower_configs() for layer in tower.layer_configs()]
    specs = [getattr(layer, slot) for layer in layers for slot in SLOTS]
    around = {(slot, name) for slot, name, *_ in components(case) if slot in AROUND}
    in_pieces = {(spec.slot, spec.type) for spec in specs if not spec.layers_apart}
    return (
        around
        | in_pieces
        | {
            case.shape,
            ("tied", config.tie_word_embeddings),
            ("shared by layers", config.distinct_layers is not None),
            ("experts", bool(config.feedforward.expert_count())),
            ("layers apart", layers_apart(config)),
        }
    )


def trained_cases() -> list[Case]:  # builds every model, which is why no test is collected by it
    return covering(breadth_cases(), trained_parts)


def sharded_cases() -> list[Case]:
    few = covering(breadth_cases(), sharded_parts)
    return [case for case in breadth_cases() if case in few or case.name in OF_FOUR]


# Four processes show what two do not: tables and heads that four does not divide, a row each. What a layer or a stack
# does with its shards, two show; here are tied tables, two towers, a mixture, a narrow table, layers without graphs,
# and lengths that change.
OF_FOUR = ("xf_bert", "xf_t5", "xf_switch_transformer", "xf_albert", "xf_reformer", "xf_funnel_transformer")
SAVED_OF_FOUR = ("xf_bert", "xf_t5", "xf_switch_transformer")


def cases_of_four() -> list[Case]:
    """What four processes train as well."""
    return [case for case in breadth_cases() if case.name in OF_FOUR]


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    """Ids and mask [4, 12] of a step, rows of unequal lengths."""
    ids = tokens(ROWS, LENGTH, seed=step, high=VOCAB - 1)  # the last one some family never predicts
    lengths = torch.tensor([LENGTH, 5 + step, 3, 9])
    return ids, (torch.arange(LENGTH)[None] < lengths[:, None]).long()


def token_loss(case: Case, model: nn.Module, rows: slice, world: int, step: int) -> Tensor:
    """This process's share of the mean over all tokens, so scaled that the mean over processes is that mean."""
    ids, mask = global_batch(step)
    labels = ids.masked_fill(mask == 0, -100)
    more = {"decoder_input_ids": ids[rows], "decoder_attention_mask": mask[rows]} if case.shape == "seq2seq" else {}
    output = model(input_ids=ids[rows], attention_mask=mask[rows], labels=labels[rows], **more)
    wanted = F.cross_entropy(output.logits.flatten(0, 1), labels[rows].flatten(), reduction="sum")
    # Auxiliary losses are not linear in the batch; they take part with weight 0, so that every parameter has a
    # gradient.
    return wanted * world / (labels != -100).sum() + 0.0 * output.loss


def data_parallel(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Steps of plain DistributedDataParallel (buffers are not broadcast)."""
    found: dict[str, Any] = {}
    share = ROWS // world
    rows = slice(rank * share, (rank + 1) * share)
    for case in trained_cases():
        found[case.name] = _train(case, rows, world)
    return found


def _train(case: Case, rows: slice, world: int) -> dict[str, Tensor]:
    model = case.build(strong=True, **NO_DROPOUT, **CHANGES.get(case.name, {})).train()
    module = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False) if world > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        token_loss(case, module, rows, world, step).backward()
        optimizer.step()
    return state_of(model)


# ------------------------------------------------------------------------------------------------ Trainer


SWITCH = {"feedforward": {**CHANGES["xf_switch_transformer"]["feedforward"], "balance_loss_weight": 0.0}}
BALANCED = {"feedforward": {**CHANGES["xf_switch_transformer"]["feedforward"], "every": 1}}
ROUTING = {
    "attention": {
        "type": "routing_transformer",
        "num_clusters": 4,
        "window_size": 4,
        "block_size": 4,
        "commitment_weight": 0.0,
    }
}
PONDERING = {"stack": {"type": "universal", "act": "accumulated", "act_loss_weight": 1.0}}
PLAIN: dict[str, Any] = {"trainer": Trainer}
# name -> (model type, shape, changes of the config, rows, what differs from 4 rows a step)
RUNS: dict[str, tuple[str, str, dict[str, Any], int, dict[str, Any]]] = {
    "uneven": ("xf_bert", "encoder", {}, 21, {}),
    "uneven, accumulated, checkpointed": (
        "xf_gpt2", "decoder", {}, 23, {"gradient_checkpointing": True, "gradient_accumulation_steps": 2},
    ),
    "plain trainer": ("xf_gpt2", "decoder", {}, 24, PLAIN),
    "plain trainer, accumulated, with a loss beside": (
        "xf_universal_transformer", "encoder", PONDERING, 24, {**PLAIN, "gradient_accumulation_steps": 2},
    ),
    "reversible": ("xf_reformer", "decoder", {}, 22, {}),
    "experts": ("xf_switch_transformer", "encoder", SWITCH, 22, {}),
    "experts with losses": ("xf_switch_transformer", "encoder", BALANCED, 24, {}),
    "streams": ("xf_transformer_xl", "decoder", {}, 24, {"segment_streams": True}),
    "running statistics": ("xf_power_norm", "encoder", CHANGES["xf_power_norm"], 21, {}),
    "statistics of queries": (
        "xf_product_key_memory", "decoder", CHANGES.get("xf_product_key_memory", {}), 23,
        {"gradient_accumulation_steps": 2},
    ),
    "centroids": ("xf_routing_transformer", "encoder", ROUTING, 22, {}),
    "two towers": ("xf_t5", "seq2seq", {}, 22, {}),
    "plain trainer, two towers": ("xf_t5", "seq2seq", {}, 24, PLAIN),
}  # fmt: skip
SAVED = 5  # the step of the checkpoint, inside the second epoch (or the first, with accumulation)


def dataset(case: Case, rows: int) -> list[dict[str, Tensor]]:
    ids = tokens(rows, LENGTH, seed=7)
    lengths = torch.randint(2, LENGTH + 1, (rows,), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(LENGTH)[None] < lengths[:, None]).long()
    if case.name == "xf_transformer_xl":  # a stream has no gaps
        mask = torch.ones_like(mask)
    labels = ids.masked_fill(mask == 0, -100)
    extra = {"decoder_input_ids": ids, "decoder_attention_mask": mask} if case.shape == "seq2seq" else {}
    columns = {"input_ids": ids, "attention_mask": mask, "labels": labels, **extra}
    return [{name: column[row] for name, column in columns.items()} for row in range(rows)]


def trainer_of(name: str, world: int, folder: Path, **more: Any) -> Trainer:
    """The Trainer of a run: a step has 4 rows over all processes, times the accumulation steps."""
    model_type, shape, changes, rows, options = RUNS[name]
    options = {**options, **more}
    case = case_of(model_type, shape)
    model = case.build(strong=True, **NO_DROPOUT, **changes)
    streams = {"segment_streams": True} if options.pop("segment_streams", False) else {}
    return trainer_of_model(model, dataset(case, rows), world, folder, streams, **options)


def trainer_of_model(
    model: nn.Module, data: list, world: int, folder: Path, streams: dict | None = None, **options: Any
) -> Trainer:
    kind = options.pop("trainer", XFormerTrainer)
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS // world,
        per_device_eval_batch_size=ROWS // world,
        num_train_epochs=2,
        logging_steps=1,
        save_steps=SAVED,
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo" if world > 1 else None,
        **{"learning_rate": 1e-2, **options},
    )
    if options.get("fsdp"):  # which Accelerate leaves out on a processor
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return kind(model=model, args=arguments, train_dataset=data, eval_dataset=data[:10], **(streams or {}))


def trainer_runs(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Every run from its start, and again from its checkpoint: losses, metrics and final state."""
    found: dict[str, Any] = {}
    for number, name in enumerate(RUNS):
        place = Path(folder) / f"{number}-{world}"
        first = trainer_of(name, world, place)
        first.train()
        again = trainer_of(name, world, place)
        again.train(resume_from_checkpoint=str(place / f"checkpoint-{SAVED}"))
        found[name] = {
            "losses": [entry["loss"] for entry in first.state.log_history if "loss" in entry],
            "metrics": {key: value for key, value in first.evaluate().items() if not key.endswith(("time", "second"))},
            "state": state_of(first.model),
            "resumed": state_of(again.model),
        }
    return found


# ------------------------------------------------------------------------------------------------ shards


# name -> (model type, shape, changes of the config)
SPLIT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dense encoder": ("xf_bert", "encoder", {}),
    "dense decoder": ("xf_gpt2", "decoder", {}),
    "rotations": ("xf_roformer", "encoder", {"num_key_value_heads": 2, "feedforward": "swiglu"}),
    "two towers": ("xf_transformer", "seq2seq", {}),
    "a bias for each head": ("xf_t5", "seq2seq", {}),
    "two feed-forwards": ("xf_macaron", "encoder", {}),
    "scores handed on": ("xf_realformer", "encoder", {}),
    "features": ("xf_linear_transformer", "decoder", {}),
    "random features": ("xf_performer", "encoder", {}),
    "keys and values for all heads": ("xf_multi_query_attention", "decoder", {}),
    "experts": ("xf_switch_transformer", "encoder", {**SWITCH, "position": "learned_absolute"}),
    "reversible": ("xf_reformer", "encoder", {}),
    "a narrow table": ("xf_albert", "encoder", {}),
    "characters beside the table": ("xf_tener", "encoder", {}),
    "a table that pointers read": ("xf_indigo", "decoder", {}),
}


SPLIT_OF_FOUR = ("dense encoder", "two towers", "experts", "a narrow table")


def case_of(model_type: str, shape: str) -> Case:
    return next(case for case in CASES if (case.name, case.shape) == (model_type, shape))


def step_of(case: Case, model: nn.Module, rows: slice, world: int) -> dict[str, Any]:
    """Loss, logits and the state after a step of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = token_loss(case, model.train(), rows, world, 0)
    loss.backward()
    optimizer.step()
    model.eval()
    ids, mask = global_batch(1)
    with torch.no_grad():
        return {"loss": loss.detach(), "logits": case.run(model, ids, mask)}


def tensor_parallel(rank: int, world: int, folder: str) -> dict[str, Any]:
    """`from_pretrained(distributed_config=...)` with both processes on one batch; saved whole, and read again."""
    found: dict[str, Any] = {}
    split = {name: SPLIT[name] for name in SPLIT_OF_FOUR} if world == 4 else SPLIT
    for number, (name, (model_type, shape, changes)) in enumerate(split.items()):
        case, place = case_of(model_type, shape), Path(folder) / f"{number}-{world}"
        model = case.build(strong=True, **NO_DROPOUT, **changes)
        if world > 1:
            from transformers.distributed import DistributedConfig

            model.save_pretrained(place / "start")  # only the first process writes
            torch.distributed.barrier()
            sharding = DistributedConfig(tp_size=world, tp_plan="auto")
            model = type(model).from_pretrained(place / "start", dtype="float64", distributed_config=sharding)
        found[name] = step_of(case, model, slice(None), 1)
        if world > 1:
            found[name]["split"] = sorted(
                key for key, tensor in model.named_parameters() if type(tensor.data).__name__ == "DTensor"
            )
        model.save_pretrained(place / "end")
        if world > 1:
            torch.distributed.barrier()
        found[name]["state"] = state_of(type(model).from_pretrained(place / "end", dtype="float64"))
    return found


SPLIT_RUNS = {
    "decoder": ("xf_gpt2", "decoder", {}),
    "experts with losses": ("xf_switch_transformer", "encoder", {**BALANCED, "position": "learned_absolute"}),
}


def trainer_of_split(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Trainer with a model that both processes hold parts of: they read one batch. 11 rows in batches of 4, and 12,
    where the last batch is full."""
    from accelerate.parallelism_config import ParallelismConfig

    found: dict[str, Any] = {}
    for number, ((name, (model_type, shape, changes)), rows) in enumerate(product(SPLIT_RUNS.items(), (11, 12))):
        case, place = case_of(model_type, shape), Path(folder) / f"{number}-{world}"
        model = case.build(strong=True, **NO_DROPOUT, **changes)
        if world > 1:
            from transformers.distributed import DistributedConfig

            model.save_pretrained(place / "start")
            torch.distributed.barrier()
            sharding = DistributedConfig(tp_size=world, tp_plan="auto")
            model = type(model).from_pretrained(place / "start", dtype="float64", distributed_config=sharding)
        data = dataset(case, rows)
        arguments = TrainingArguments(
            output_dir=str(place),
            per_device_train_batch_size=ROWS,
            per_device_eval_batch_size=ROWS,
            num_train_epochs=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            include_num_input_tokens_seen="all",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo" if world > 1 else None,
        )
        # Accelerate lets models be split on accelerators alone.
        with mock.patch.object(ParallelismConfig, "_validate_accelerator", lambda *_: None):
            run = XFormerTrainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:7])
            run.train()
            metrics, prediction = run.evaluate(), run.predict(data[:7])
        run.save_model(str(place / "end"))
        if world > 1:
            torch.distributed.barrier()
        found[f"{name}, {rows}"] = {
            "losses": [entry["loss"] for entry in run.state.log_history if "loss" in entry],
            "metrics": {key: value for key, value in metrics.items() if not key.endswith(("time", "second"))},
            "rows": torch.from_numpy(prediction.predictions),
            "state": state_of(type(model).from_pretrained(place / "end", dtype="float64")),
        }
    return found


def fully_sharded(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A step under the FSDP plan of the config, each process with its rows; the state gathered."""
    share = ROWS // world
    rows = slice(rank * share, (rank + 1) * share)
    found: dict[str, Any] = {}
    saved: set[str] = set()  # stacks whose checkpoint was written and read: a family of each
    if world > 1:  # one mesh for all: each is a dozen groups, and every group keeps threads until the process ends
        from transformers.distributed import DistributedConfig

        sharding, _, mesh = PreTrainedModel.prepare_distribute_model(DistributedConfig(fsdp_size=world))
    for case in cases_of_four() if world == 4 else sharded_cases():
        model = case.build(strong=True, **NO_DROPOUT, **CHANGES.get(case.name, {}))
        if world > 1:
            model = model.maybe_distribute_model(model, sharding, mesh)
            split = sum(type(value.data).__name__ == "DTensor" for value in model.parameters())
        found[case.name] = step_of(case, model, rows, world)
        if world > 1:
            from transformers.distributed.utils import gather_full_state_dict

            found[case.name]["split"] = split, len(list(model.parameters()))
            found[case.name]["state"] = gather_full_state_dict(model)  # in the first process alone
            if case.name in SAVED_OF_FOUR if world == 4 else case.preset.stack.type not in saved:
                saved.add(case.preset.stack.type)
                model.save_pretrained(Path(folder) / case.name)  # the first process writes all of it
                torch.distributed.barrier()
                again = type(model).from_pretrained(Path(folder) / case.name, dtype="float64")
                found[case.name]["saved"] = state_of(again)
        else:
            found[case.name]["state"] = state_of(model)
    return found


SHARDED_RUNS = (
    *("uneven", "uneven, accumulated, checkpointed", "reversible", "two towers", "plain trainer, two towers"),
)


def sharded_trainer(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Trainer with Accelerate's FSDP2, resumed from its checkpoint, and the model that it saves; alone: without
    FSDP."""
    found: dict[str, Any] = {}
    options = {} if world == 1 else {"fsdp": True, "fsdp_config": {"version": 2}}
    for number, name in enumerate(SHARDED_RUNS):
        place = Path(folder) / f"{number}-{world}"
        more = {**options, "max_grad_norm": 1.0}
        first = trainer_of(name, world, place, **more)
        first.train()
        split = {type(parameter.data).__name__ for parameter in first.model.parameters()}
        first.save_model(str(place / "end"))
        metrics = first.evaluate()
        again = trainer_of(name, world, place, **more)
        again.train(resume_from_checkpoint=str(place / f"checkpoint-{SAVED}"))
        again.save_model(str(place / "again"))
        kind = type(again.accelerator.unwrap_model(again.model))
        kind = next(base for base in kind.__mro__ if base.__module__.startswith("hf_xformers"))
        found[name] = {
            "losses": [entry["loss"] for entry in first.state.log_history if "loss" in entry],
            "split": split,
            "eval_loss": metrics["eval_loss"],
            "state": state_of(kind.from_pretrained(place / "end", dtype="float64")),
            "resumed": state_of(kind.from_pretrained(place / "again", dtype="float64")),
        }
    return found


def float32_cases() -> list[Case]:  # builds every model
    """Families that together have every module that stays in float32 and learns."""

    def classes(case: Case) -> set[Any]:
        kept = (module for module in case.shared().modules() if isinstance(module, Float32Module))
        return {type(module) for module in kept if list(module.parameters())}

    return covering(breadth_cases(), classes)


def sharded_in_half(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A step of SGD under Accelerate's FSDP2 with `bf16`, of every other family by transformers' own `Trainer`; alone:
    in float32. read: the names, types and classes of parameters that stay in float32, in the calls that read them;
    step: how all parameters moved."""
    found: dict[str, Any] = {}
    options: dict[str, Any] = {"max_steps": 1, "save_strategy": "no", "optim": "sgd", "learning_rate": 0.1}
    if world > 1:
        options.update(fsdp=True, fsdp_config={"version": 2}, bf16=True)
    for number, case in enumerate(float32_cases()):
        place, read = Path(folder) / f"{number}-{world}", set()
        model = case.build(strong=True, **NO_DROPOUT, **CHANGES.get(case.name, {})).float()
        start = state_of(model)
        _watch(model, read)
        kind = (XFormerTrainer, Trainer)[number % 2]
        run = trainer_of_model(model, dataset(case, ROWS), world, place, trainer=kind, **options)
        if kind is Trainer:
            keep_float32_in_shards(run.accelerator, run.model)
        run.train()
        run.save_model(str(place))  # the first process writes
        if world > 1:
            torch.distributed.barrier()
        end = state_of(type(case.shared()).from_pretrained(place))
        moved = [(end[name] - start[name]).flatten() for name, _ in case.shared().named_parameters()]
        found[case.name] = {"read": read, "step": torch.cat(moved)}
    return found


def _watch(model: nn.Module, read: set[Any]) -> None:
    def watch(name: str, module: nn.Module, method: str) -> None:
        call = getattr(module, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            read.update((f"{name}.{key}", value.dtype, type(value)) for key, value in module.named_parameters())
            return call(*args, **kwargs)

        setattr(module, method, watched)

    for name, module in model.named_modules():
        if isinstance(module, Float32Module):
            for method in module.readers:
                watch(name, module, method)
            for inner, child in module.named_children() if not module.readers else ():
                watch(f"{name}.{inner}", child, "forward")


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

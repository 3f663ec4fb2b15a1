"""Every variant that models text, pretrained alike: its held-out loss at equal steps and at equal time.

HF_HUB_OFFLINE=1 python benchmarks/pretraining.py [--only xf_luna,xf_gpt2/rotary] [--minutes 60]
HF_HUB_OFFLINE=1 python benchmarks/pretraining.py --time

Each variant is trained by `hf-xformers pretrain` on the documentation of Python's standard library, as a decoder, else
by masked LM, else by span corruption. The dense models that they are compared with are GPT-2, BERT and T5, the former
two with other positions as well (`xf_gpt2/rotary`), which are worth more than most mechanisms. What is not in
`results/pretraining.json` is trained: all once, then with the next higher and lower learning rates until both
neighbors of the best are worse, then the other seeds with the best. What is there stays, an interrupted run
continues, and several may run at once if each has its own `--only`. `--time` measures a training step of each next to
the dense model's; nothing else may run then.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import interleaved_seconds, write_results
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, set_seed

from hf_xformers.benchmark.quality import state_size
from hf_xformers.cli import main as command
from hf_xformers.training.run_folder import SUMMARY_FILE
from hf_xformers.variants import config_class, model_types

PATH = Path(__file__).parent / "results" / "pretraining.json"
STEPS, ROWS, LENGTH = 600, 16, 64
SEEDS = (0, 1, 2)
RATES, FIRST_RATE = (0.001, 0.003, 0.01, 0.03), 0.003
SHORTER_AND_LONGER = (150, 300, 1200, 2400)  # steps of dense models, for what they reach in another's time
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "hidden_dropout_prob": 0,
    "attention_probs_dropout_prob": 0,
}
# About a quarter of a row, where the papers' windows, blocks and summaries would hold all of it; states as wide as
# heads.
WINDOW, HEAD = LENGTH // 4, 16
OF_ATTENTION: dict[str, dict[str, Any]] = {
    "xf_adaptive_span": {"start": 0.25, "ramp": 4},
    "xf_arccos_attention": {"num_features": 64},
    "xf_bigbird": {"block_size": WINDOW // 2, "num_random_blocks": 1},
    "xf_clustered_attention": {"num_clusters": WINDOW},
    "xf_csalr": {"num_landmarks": WINDOW},
    "xf_delta_product": {"key_width": HEAD, "value_width": HEAD},
    "xf_etc": {"local_radius": WINDOW // 2},
    "xf_feedback_transformer": {"window": WINDOW},
    "xf_gated_delta_net": {"key_width": HEAD, "value_width": HEAD},
    "xf_gla": {"key_width": HEAD},
    "xf_image_transformer": {"block_length": WINDOW, "memory_length": WINDOW},
    "xf_improved_clustered_attention": {"num_clusters": WINDOW, "topk": WINDOW // 2},
    "xf_kimi_delta_attention": {"key_width": HEAD, "value_width": HEAD},
    "xf_lightning_attention": {"key_width": HEAD, "value_width": HEAD},
    "xf_linformer": {"projected_length": WINDOW},
    "xf_longformer": {"attention_window": WINDOW},
    "xf_low_rank_band": {"low_rank": WINDOW, "band_width": WINDOW // 2},
    "xf_luna": {"projected_length": WINDOW},
    "xf_mamba2": {"key_width": HEAD},
    "xf_memory_compressed_attention": {"block_size": WINDOW},
    "xf_moba": {"block_size": WINDOW // 2, "num_blocks": 2},
    "xf_multi_head_latent_attention": {
        **{"kv_lora_rank": 2 * HEAD, "qk_nope_head_dim": HEAD, "qk_rope_head_dim": HEAD // 2, "v_head_dim": HEAD}
    },
    "xf_multi_scale_transformer": {"scales": (1, 3, 0.25)},
    "xf_native_sparse_attention": {"block_size": WINDOW // 2, "num_blocks": 3, "window_size": WINDOW},
    "xf_nystromformer": {"num_landmarks": WINDOW},
    "xf_performer": {"num_features": 64},
    "xf_performer_v1": {"num_features": 64},
    "xf_poolingformer": {"window1": WINDOW // 2, "window2": WINDOW, "pool_kernel": 3, "pool_stride": 2},
    "xf_reformer": {"chunk_length": WINDOW // 2},
    "xf_routing_transformer": {"window_size": WINDOW},
    "xf_rwkv7": {"decay_rank": HEAD, "rate_rank": HEAD, "value_rank": HEAD // 2, "gate_rank": HEAD},
    "xf_set_transformer": {"num_inducing": WINDOW},
    "xf_sinkhorn_transformer": {"block_size": WINDOW},
    "xf_sparse_transformer": {"stride": WINDOW // 2},
}
OBJECTIVES = {"clm": "ForCausalLM", "mlm": "ForMaskedLM", "span": "ForSeq2SeqLM"}  # the first that a variant has
ARCHITECTURES = {"clm": "decoder", "mlm": "encoder", "span": "encoder-decoder"}
DENSE = {"clm": "xf_gpt2", "mlm": "xf_bert/mlm", "span": "xf_t5"}
BASELINES = [
    *(f"{DENSE[name]}{kind}" for name in ("clm", "mlm") for kind in ("", "/none", "/rotary", "/sinusoidal_absolute")),
    "xf_t5",
]
CLEAR = 0.1  # nats below the loss of token frequencies, at least
COLUMNS = [
    *("variant", "architecture", "position", "loss", "spread", "dense loss"),
    *("dense, at equal time", "rotary, at equal time", "time ratio"),
    *("token frequencies", "accuracy", "dense accuracy", "parameters", "state", "residual paths", "settings"),
    *("learning rate", "rates tried", "seeds", "others busy"),
]


# ------------------------------------------------------------------------------------------------ what is trained


def objective_of(key: str) -> str:
    """What a key is trained on: `xf_bert/mlm` names it, else the first that the variant has a head for."""
    name, *changes = key.split("/")
    heads = config_class(name).heads
    return "mlm" if "mlm" in changes else next(kind for kind, head in OBJECTIVES.items() if head in heads)


def position_of(key: str) -> str:
    """The position that a key names in place of the variant's, if any."""
    return next((change for change in key.split("/")[1:] if change != "mlm"), "")


def keys() -> list[str]:
    """Dense models, and all variants that model the language of text."""

    def of_text(name: str) -> bool:
        made = config_class(name)
        return made.modality == "text" and made.reads_colors != "only" and bool({*OBJECTIVES.values()} & {*made.heads})

    return list(dict.fromkeys([*BASELINES, *(name for name in model_types() if name != "xformer" and of_text(name))]))


def fields(key: str) -> dict[str, Any]:
    """Of the configuration: sizes, and what differs from the variant's own."""
    name, position = key.split("/")[0], position_of(key)
    given: dict[str, Any] = dict(SIZES)
    if config_class(name)().to_dict()["residual"]["type"] == "post_ln":
        given["residual"] = "pre_ln"  # post-LN leaves the level of token frequencies late, whatever the mechanism
    if position:
        given["position"] = position
    if position == "sinusoidal_absolute":
        given["embedding"] = {"type": "token", "scale": True}  # else tokens drown in sinusoids
    if name in OF_ATTENTION:
        given["attention"] = {**config_class(name)().to_dict()["attention"], **OF_ATTENTION[name]}
    try:
        config_class(name)(**given)
    except ValueError:
        if given.pop("residual", None) is None:
            raise
    return given


def train(key: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """Summary of a run of the command."""
    given = {field: value for field, value in fields(key).items() if not isinstance(value, dict)}
    given |= {f"attention.{field}": value for field, value in OF_ATTENTION.get(key.split("/")[0], {}).items()}
    if "embedding" in fields(key):
        given["embedding.scale"] = True
    options = {
        **{"variant": key.split("/")[0], "objective": objective_of(key), "data": "stdlib", "block_size": LENGTH},
        **{"max_steps": steps, "per_device_train_batch_size": ROWS, "learning_rate": rate, "warmup_steps": 50},
        **{"seed": seed, "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "report_to": "none"},
        **given,
    }
    with tempfile.TemporaryDirectory() as folder:
        words = [word for option, value in options.items() for word in (f"--{option}", _word(value))]
        if command(["pretrain", *words, "--output_dir", folder]):
            raise SystemExit("it cannot be trained this way; the lines above say why")
        return json.loads((Path(folder) / SUMMARY_FILE).read_text(encoding="utf-8"))


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


# ------------------------------------------------------------------------------------------------ what was found


def stored() -> dict[str, dict[str, Any]]:
    """Key -> what its runs found."""
    return json.loads(PATH.read_text(encoding="utf-8"))["runs"]


def keep(notes: dict[str, Callable[[dict[str, Any]], None]]) -> None:
    """Lets each note add to what is known of its key, and writes all results anew; runs may be several at once."""
    folder = os.open(PATH.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        runs = stored()
        for key, note in notes.items():
            note(runs.setdefault(key, {"losses": {}, "accuracies": {}}))
        write(dict(sorted(runs.items())))
    finally:
        os.close(folder)


def best_rate(found: dict[str, Any]) -> str:
    """The learning rate whose first seed has the lowest loss."""
    return min(found["losses"], key=lambda rate: found["losses"][rate][0], default=str(FIRST_RATE))


def next_rates(found: dict[str, Any]) -> list[float]:
    """What is left to try near the best learning rate of those tried: a higher one, a lower one."""
    if not found["losses"]:
        return [FIRST_RATE]
    best = RATES.index(float(best_rate(found)))
    neighbors = [*RATES[best + 1 : best + 2], *RATES[max(best - 1, 0) : best]]
    return [rate for rate in neighbors if str(rate) not in found["losses"]]


def wanted() -> list[tuple[str, float, int, int]]:
    """Key, rate, seed and steps of the runs that are missing: all once, higher rates, lower ones, steps, seeds."""
    runs = stored()
    found: list[tuple[int, tuple[str, float, int, int]]] = []
    for key in keys():
        known = runs.get(key, {"losses": {}})
        if "failed" in known:
            continue
        best, rates = best_rate(known), next_rates(known)
        if rates:
            first, higher = not known["losses"], rates[0] > float(best)
            found.append((0 if first else 1 if higher else 2, (key, rates[0], SEEDS[0], STEPS)))
            continue
        if key in BASELINES:
            stands = known.get("by steps", {}).get(best, {})
            counts = [count for count in SHORTER_AND_LONGER if str(count) not in stands]
            found += [(3, (key, float(best), SEEDS[0], count)) for count in counts]
        found += [(4, (key, float(best), seed, STEPS)) for seed in SEEDS[len(known["losses"][best]) :]]
    return [run for _, run in sorted(found, key=lambda entry: entry[0])]


def add_run(key: str, rate: float, seed: int, steps: int) -> None:
    try:
        report = train(key, rate, seed, steps)
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        print(f"{key}, rate {rate}, seed {seed}: {reason}", flush=True)
        keep({key: lambda found: found.setdefault("failed", reason)})
        return

    def note(found: dict[str, Any]) -> None:
        found |= {"baseline": report["eval_baseline_loss"], "baseline accuracy": report["eval_baseline_accuracy"]}
        if steps != STEPS:
            found.setdefault("by steps", {}).setdefault(str(rate), {})[str(steps)] = report["eval_loss"]
            return
        for name, value in (("losses", report["eval_loss"]), ("accuracies", report["eval_accuracy"])):
            known = found[name].setdefault(str(rate), [])
            if len(known) == SEEDS.index(seed):  # else another process has trained it meanwhile
                known.append(value)

    keep({key: note})
    print(f"{key}, rate {rate}, seed {seed}, {steps} steps: {report['eval_loss']:.3f}", flush=True)


# ------------------------------------------------------------------------------------------------ time and state


def model_of(key: str) -> Any:
    classes = {"clm": AutoModelForCausalLM, "mlm": AutoModelForMaskedLM, "span": AutoModelForSeq2SeqLM}
    decoder = {"is_decoder": True} if objective_of(key) == "clm" else {}
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    made = config_class(key.split("/")[0])
    if objective_of(key) == "span":
        special["decoder_start_token_id"] = 0
    config = made(**fields(key), **decoder, **special, max_position_embeddings=LENGTH)
    set_seed(0)
    return classes[objective_of(key)].from_config(config)


def step_of(model: Any) -> Callable[[], None]:
    """A step of training as the runs have it, without their data."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(5, SIZES["vocab_size"], (ROWS, LENGTH))
    model.train()

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def dense_key(key: str, runs: dict[str, dict[str, Any]]) -> str:
    """The dense model with the same objective and position, or with its own where the variant has others."""
    kind = position_of(key) or config_class(key.split("/")[0])().to_dict()["position"]["type"]
    learned = DENSE[objective_of(key)]
    return f"{learned}/{kind}" if f"{learned}/{kind}" in runs else learned


def rotary_key(key: str) -> str | None:
    """The dense model with the same objective and rotary positions, as models of today have them."""
    rotary = f"{DENSE[objective_of(key)]}/rotary"
    return rotary if rotary in BASELINES else None


def measure(key: str, dense: dict[str, Callable[[], None]], rounds: int = 5) -> dict[str, Any]:
    """Time of a step by those of dense models, parameters, and numbers that generation keeps of a row."""
    model = model_of(key)
    seconds = interleaved_seconds({**dense, "own": step_of(model)}, rounds)
    found: dict[str, Any] = {"others busy": seconds.others_busy}
    for name in dense:
        pairs = zip(seconds["own"], seconds[name], strict=True)
        found[name] = statistics.median(own / other for own, other in pairs)
    found["parameters"] = sum(part.numel() for part in model.parameters())
    if objective_of(key) == "clm":
        found["state"] = state_size(model, torch.randint(5, SIZES["vocab_size"], (1, LENGTH)))
    print(f"{key}: {found['time ratio']:.2f}", flush=True)
    return found


def measure_all(chosen: list[str]) -> None:
    """Measures what was trained and not yet measured alone, next to all that it is compared with."""
    torch.set_num_threads(1)
    runs = stored()

    def measured(key: str) -> bool:
        compared = rotary_key(key) is None or "rotary ratio" in runs[key]
        return compared and runs[key].get("others busy", 1) <= 0.2

    left = [key for key in chosen if key in runs and runs[key]["losses"] and not measured(key)]
    steps = functools.cache(lambda name: step_of(model_of(name)))
    for key in left:
        dense = {"time ratio": dense_key(key, runs), "rotary ratio": rotary_key(key)}
        new = measure(key, {name: steps(other) for name, other in dense.items() if other})
        keep({key: lambda known, new=new: known.update(new)})


def compared_rate(key: str, runs: dict[str, dict[str, Any]]) -> str:
    """The best learning rate; the first one for all of an architecture until each has its best."""
    alike = [runs.get(other, {"losses": {}}) for other in keys() if objective_of(other) == objective_of(key)]
    found = all("failed" in other or not next_rates(other) for other in alike)
    return best_rate(runs[key]) if found else str(FIRST_RATE)


def losses_by_steps(key: str, runs: dict[str, dict[str, Any]]) -> dict[int, float]:
    """Steps -> loss of a dense model, for as many as it was trained for."""
    dense, rate = runs[key], compared_rate(key, runs)
    points = {int(steps): loss for steps, loss in dense.get("by steps", {}).get(rate, {}).items()}
    return dict(sorted({**points, STEPS: statistics.fmean(dense["losses"][rate])}.items()))


def at_equal_time(points: dict[int, float], ratio: float | None) -> float | None:
    """The loss that a dense model reaches when it is trained for as long as a variant that takes `ratio` of its time:
    between its runs (points: steps -> loss), linear in the logarithm of steps; None beyond them."""
    steps = STEPS * (ratio or 0)
    for low, high in itertools.pairwise(points):
        if low <= steps <= high:
            share = math.log(steps / low) / math.log(high / low)
            return points[low] + (points[high] - points[low]) * share
    return None


# ------------------------------------------------------------------------------------------------ the table


def row_of(key: str, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found, partner, name, given = runs[key], dense_key(key, runs), key.split("/")[0], fields(key)
    dense, rate, of_dense = runs[partner], compared_rate(key, runs), compared_rate(partner, runs)
    losses, rotary = found["losses"][rate], rotary_key(key)
    own = config_class(name)().to_dict()
    row = {
        **{
            "variant": name,
            "architecture": ARCHITECTURES[objective_of(key)],
            "position": position_of(key) or own["position"]["type"],
        },
        "loss": statistics.fmean(losses),
        "spread": max(losses) - min(losses) if len(losses) > 1 else None,
        "dense loss": statistics.fmean(dense["losses"][of_dense]),
        "dense, at equal time": at_equal_time(losses_by_steps(partner, runs), found.get("time ratio")),
        "rotary, at equal time": at_equal_time(
            losses_by_steps(rotary, runs) if rotary in runs else {}, found.get("rotary ratio")
        ),
        "token frequencies": found["baseline"],
        "accuracy": statistics.fmean(found["accuracies"][rate]),
        "dense accuracy": statistics.fmean(dense["accuracies"][of_dense]),
        "residual paths": given.get("residual", own["residual"]["type"]),
        "settings": ", ".join(f"{field}={_word(value)}" for field, value in OF_ATTENTION.get(name, {}).items()),
        **{"learning rate": float(rate), "rates tried": len(found["losses"]), "seeds": len(losses)},
        **{name: found.get(name) for name in ("time ratio", "parameters", "state", "others busy")},
    }
    return {column: row[column] for column in COLUMNS if row[column] not in (None, "")}


def by_steps(runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Losses of dense models that were trained for fewer and more steps."""
    rows = []
    for key in (key for key in BASELINES if "by steps" in runs.get(key, {})):
        named = {"variant": key.split("/")[0], "position": row_of(key, runs)["position"]}
        rows.append(named | {f"{steps:,} steps": loss for steps, loss in losses_by_steps(key, runs).items()})
    return rows


def write(runs: dict[str, dict[str, Any]]) -> None:
    """The rows of all that learned something, the lowest loss of each kind first."""
    rows = [row_of(key, runs) for key, found in runs.items() if found["losses"] and dense_key(key, runs) in runs]
    clear = [row["loss"] < row["token frequencies"] - CLEAR for row in rows]
    poor = [f"{row['variant']} ({row['position']})" for row, learned in zip(rows, clear, strict=True) if not learned]
    rows = [row for row, learned in zip(rows, clear, strict=True) if learned]
    order = list(ARCHITECTURES.values())
    rows.sort(key=lambda row: (order.index(row["architecture"]), row["loss"], row["variant"]))
    failed = [key for key, found in runs.items() if "failed" in found and not found["losses"]]
    rates, counts = (", ".join(map(str, each)) for each in (RATES, sorted({*SHORTER_AND_LONGER, STEPS})))
    note = (
        "Held-out loss (nats per target, lower is better) of small models, alike: two layers of width 64,"
        f" {STEPS} steps of {ROWS} rows of {LENGTH} tokens, a vocabulary of 512, the documentation of Python's"
        " standard library, pre-LN in place of post-LN wherever the variant takes it, windows, blocks and summaries of"
        " about a quarter of a row (`settings`). Variants with a causal decoder learn to continue texts, others fill"
        " masks, or spans where they have two stacks.\n\n"
        "`loss` is a mean over `seeds`, which set weights and order of rows; `spread`: the largest less the smallest."
        f" `learning rate`: {FIRST_RATE} for all of an architecture until each has the best of {rates} for the first"
        " seed, whose neighbors are worse; `rates tried`: how many of them were. `dense loss`:"
        " dense attention with the same position (GPT-2, BERT or T5; where the variant has a position of its own, with"
        " theirs), which stand in the table as well. `time ratio`: processor time of a training step by that dense"
        " model's. `dense, at equal time`: what it reaches when it is trained for as long, between runs of"
        f" {counts} steps, each with its own schedule; blank beyond them. `rotary, at equal time`: the same of dense"
        " attention with rotary positions, as models of today have them. `state`: numbers that a decoder keeps of a"
        " row for generation. What small models learn in little time from short rows says nothing of long memories,"
        " nor of savings on length."
    )
    if poor:
        note += f"\n\nNot {CLEAR:g} nats below the frequencies of tokens, and without a row: {', '.join(poor)}."
    left = [key for key in keys() if not runs.get(key, {}).get("losses") and key not in failed]
    if left:
        note += f"\n\nNot trained so far: {', '.join(left)}."
    if failed:
        note += f"\n\nCannot be trained in this setting: {', '.join(failed)}."
    further = {"Dense attention by steps": by_steps(runs), "runs": runs}
    write_results("pretraining", rows, COLUMNS, "Pretraining, all variants alike", note, **further)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="model types, a position behind a slash, separated by commas")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    parser.add_argument("--time", action="store_true", help="measure steps that were not measured; trains nothing")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",") if arguments.only else keys()
    if arguments.time:
        return measure_all(chosen)
    end = time.monotonic() + 60 * arguments.minutes
    done: set[tuple[str, float, int, int]] = set()
    while time.monotonic() < end:
        left = [run for run in wanted() if run[0] in chosen and run not in done]
        if not left:
            return
        done.add(left[0])
        add_run(*left[0])


if __name__ == "__main__":
    main()

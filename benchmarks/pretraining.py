"""Validation loss of variants against the dense baseline, at equal steps and at equal time.

HF_HUB_OFFLINE=1 python benchmarks/pretraining.py [--corpora stdlib,shakespeare,wikitext2] [--only xf_performer,...]

Every variant is pretrained from nothing at size tiny (hidden 128, four layers) by `hf-xformers pretrain`, on the
same rows in the same order, one thread. Causal language models, which learn from every token, are compared with
`gpt2`; variants that are none with `bert` on masked tokens, for more steps, or with `t5` on span corruption. `loss` is
the held-out loss (nats per target) after all steps, `token frequencies` what knowing those alone would reach; `at
equal time` is the loss that the baseline had reached in the processor time that the variant's run took (at most after
all its steps), by linear interpolation between its evaluations.

All stand on one backbone, `pre-LN`: presets whose residual paths are post-LN take a few hundred steps to learn more
than the frequencies of tokens, whatever their mechanism, and would all show that number. For masked tokens the same
holds of positions that are added to the input, so that those of convolutions (`CPE`) take their place or, in a stack
with positions of its own, rotary ones. `control` is the loss of the very same configuration with dense attention,
where attention is what the variant changes, or with the plain choice of what it does change. `stdlib` comes with
Python; the others are read from $HF_XFORMERS_DATA. Rows that `results/pretraining.json` has already (same steps and
backbone) are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import write_results

TWIN, FLOOR = "control", "token frequencies"
CLEAR = 0.1  # nats below the loss of token frequencies, at least
DENSE = {"attention": "dense"}
# What takes the place of a mechanism that is no attention.
PLAIN: dict[str, dict[str, Any]] = {
    "xf_adanorm": {"normalization": "layer_norm"},
    "xf_admin": {"residual": "post_ln"},
    "xf_expert_prototyping": {"feedforward": "relu"},
    "xf_funnel_transformer": {"stack": "plain"},
    "xf_gshard_moe": {"feedforward": "relu"},
    "xf_hash_layers": {"feedforward": "relu"},
    "xf_hi_transformer": {"stack": "plain", "block": "vanilla"},
    "xf_macaron": {"block": "vanilla"},
    "xf_power_norm": {"normalization": "layer_norm"},
    "xf_product_key_memory": {"feedforward": "gelu"},
    "xf_rezero": {"residual": "pre_ln"},
    "xf_sandwich": {"block": "vanilla"},
    "xf_scale_norm": {"normalization": "layer_norm"},
    "xf_sparsely_gated_moe": {"feedforward": "relu"},
    "xf_switch_transformer": {"feedforward": "relu"},
    "xf_transparent_attention": {"stack": "plain"},
    "xf_universal_transformer": {"stack": "plain"},
}
COLUMNS = [
    "variant",
    "corpus",
    "objective",
    "backbone",
    "steps",
    FLOOR,
    "loss at start",
    "loss",
    "dense loss",
    TWIN,
    "dense, at equal time",
    "time ratio",
]
# Fields that change nothing in these runs, or are set by them.
NO_MATTER = {
    "model_type",
    "vocab_size",
    "max_position_embeddings",
    "type_vocab_size",
    "layer_norm_eps",
    "add_pooler",
    "head",
}
NO_MATTER |= {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}
LEAST_FOR_SPANS = 361  # bytes, special tokens and the sentinels of span corruption
BASELINES = {"mlm": "xf_bert", "clm": "xf_gpt2", "span": "xf_t5"}
STEPS = {"mlm": 300, "clm": 200, "span": 200}
# How many times as many steps, with their baseline, as in fewer these learn no more than the frequencies of tokens.
LONGER = {
    ("xf_axial_transformer", "wikitext2"): 2,
    ("xf_tener", "shakespeare"): 4,
    ("xf_graphormer", "shakespeare"): 4,
}
SCHEDULE = ["--learning_rate", "3e-3", "--warmup_steps", "0.1", "--validation_fraction", "0.02"]


@dataclass(frozen=True)
class Corpus:
    """file: below $HF_XFORMERS_DATA, or empty for the corpus of the package; vocabulary: ids of the tokenizer."""

    file: str
    vocabulary: int

    def data(self) -> str:
        return str(Path(os.environ["HF_XFORMERS_DATA"]) / self.file) if self.file else "stdlib"


CORPORA = {
    "stdlib": Corpus("", 2048),
    "shakespeare": Corpus("tinyshakespeare/input.txt", 261),  # bytes and special tokens: character level
    "wikitext2": Corpus("wikitext2/train.txt", 2048),
}
# Mechanism parameters for rows of 128 tokens, where the papers' would read everything.
OPTIONS = {
    "xf_longformer": ["--attention.attention_window", "32"],
    "xf_bigbird": ["--attention.block_size", "16"],
    "xf_sparse_transformer": ["--attention.stride", "16"],
    "xf_reformer": ["--attention.chunk_length", "16"],
    "xf_routing_transformer": ["--attention.window_size", "16"],
    "xf_linformer": ["--attention.projected_length", "32"],
    "xf_nystromformer": ["--attention.num_landmarks", "16"],
    "xf_csalr": ["--attention.num_landmarks", "16"],
    "xf_memory_compressed_attention": ["--attention.block_size", "16"],
    "xf_clustered_attention": ["--attention.num_clusters", "16"],
    "xf_improved_clustered_attention": ["--attention.num_clusters", "16", "--attention.topk", "8"],
    "xf_luna": ["--attention.projected_length", "16"],
    "xf_performer": ["--attention.num_features", "64"],
    "xf_performer_v1": ["--attention.num_features", "64"],
    "xf_arccos_attention": ["--attention.num_features", "64"],
    # A quarter of the usual weight draws 128 tokens as hard as the paper's draws 512.
    "xf_attention_guidance": ["--attention.losses", '[{"type": "attention_guidance", "weight": 25}]'],
}
# At the rate of the others these stay at the frequencies of tokens. Guidance then takes what tells tokens apart out of
# the residual stream in the first steps, and it does not come back.
SLOWER = dict.fromkeys(
    ("xf_attention_guidance", "xf_graphormer", "xf_informer", "xf_star_transformer", "xf_tener"), "1e-3"
)


def objective_for(variant: str) -> str | None:
    """What a variant is compared on."""
    from hf_xformers.variants import config_class

    heads = config_class(variant).heads
    wanted = (("clm", "ForCausalLM"), ("mlm", "ForMaskedLM"), ("span", "ForSeq2SeqLM"))
    return next((name for name, head in wanted if head in heads), None)


def on_backbone(variant: str, objective: str) -> tuple[str, list[str]]:
    """The backbone's name, and the options that put a preset on it."""
    from hf_xformers.variants import config_class

    made = config_class(variant)
    given = made().to_dict()
    name, changes = "own", {}
    if given["residual"]["type"] == "post_ln":
        name, changes = "pre-LN", {"residual": "pre_ln"}
    position = given["position"]["type"]
    if objective == "mlm" and position in ("learned_absolute", "none"):
        convolutions = {"block": "cpe", "position": "none"}
        kind, change = ("rotary", {"position": "rotary"}) if position == "none" else ("CPE", convolutions)
        with contextlib.suppress(ValueError):  # attention with positions of its own has no place for others
            made(**changes, **change)
            name, changes = f"{name}, {kind}", {**changes, **change}
    return name, [text for field, value in changes.items() for text in (f"--{field}", value)]


def plain_twin(variant: str) -> str | None:
    """What remains of the variant's preset at this size with dense attention, or with the plain choice in `PLAIN`, as
    text; None where neither says what is left."""
    from hf_xformers.training.presets import size_fields
    from hf_xformers.variants import config_class

    made = config_class(variant)
    attention = made().to_dict()["attention"]
    bound = not isinstance(attention, dict) or attention["type"] in ("dense", "transformer_xl", "complex_order")
    if variant not in PLAIN and bound:
        return None
    fields = PLAIN.get(variant) or {**DENSE, "cross_attention": "dense"}
    try:
        config = made(**fields, **size_fields(made, "tiny", two_towers=False)).to_dict()
    except ValueError:
        return None
    return json.dumps(
        {key: value for key, value in config.items() if key not in NO_MATTER}, sort_keys=True, default=str
    )


class Runs:
    """Trained once each: what `result` is asked for again is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: dict[tuple[str, str, int, str], dict[str, Any]] = {}

    def result(
        self,
        variant: str,
        corpus: str,
        objective: str,
        steps: int,
        options: list[str] | None = None,
        key: str | None = None,
    ) -> dict[str, Any]:
        """Evaluations (step, loss) of a run and its processor seconds; or `error`, a line, which is printed too. key:
        what makes runs the same, if not the variant. The first run of a corpus and objective makes the tokenizer of
        all."""
        backbone = on_backbone(variant, objective)[1]
        if variant in SLOWER:
            backbone += ["--learning_rate", SLOWER[variant]]
        whole = (corpus, objective, steps, f"{key or variant} {backbone}")
        if whole not in self.done:
            start = self.folder / f"{corpus}-{objective}"
            made = [*(options or OPTIONS.get(variant, [])), *backbone]
            with tempfile.TemporaryDirectory() as scratch:
                if start.exists():
                    made += ["--tokenizer", str(start), "--output_dir", f"{scratch}/run"]
                else:
                    made += ["--output_dir", str(start)]
                self.done[whole] = train(variant, objective, corpus, steps, made)
            if "error" in self.done[whole]:
                print(f"{variant} on {corpus} {options or ''}: {self.done[whole]['error']}", flush=True)
        return self.done[whole]


def train(variant: str, objective: str, corpus: str, steps: int, options: list[str]) -> dict[str, Any]:
    """One run, in a fork of this process."""
    found, folder = CORPORA[corpus], options[-1]
    vocabulary = max(found.vocabulary, LEAST_FOR_SPANS) if objective == "span" else found.vocabulary
    command = ["pretrain", "--variant", variant, "--objective", objective, "--data", found.data()]
    command += [
        "--vocab_size",
        str(vocabulary),
        "--size",
        "tiny",
        "--max_steps",
        str(steps),
        "--use_cpu",
        "true",
    ]
    command += ["--block_size", "128", "--eval_strategy", "steps", "--eval_steps", str(steps // 4)]
    command += ["--per_device_train_batch_size", "8", "--eval_on_start", "true", "--save_strategy", "no"]
    command += ["--report_to", "none", "--seed", "0", "--disable_tqdm", "true", *SCHEDULE, *options]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_train, args=(command, folder, queue))
    child.start()
    made = queue.get()
    child.join()
    return made


def _train(command: list[str], folder: str, queue: Any) -> None:
    from transformers import TrainerCallback

    from hf_xformers.cli import pretrain

    class Clock(TrainerCallback):
        seconds = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.seconds = -time.process_time()

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds += time.process_time()

    clock = Clock()
    try:
        with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            pretrain.run(command[1:], callbacks=[clock])
        history = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
        evaluations = [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]
        floor = next(entry["eval_baseline_loss"] for entry in history if "eval_baseline_loss" in entry)
        queue.put({"evaluations": evaluations, "seconds": clock.seconds, "baseline": floor})
    except BaseException as error:  # the parent continues with the other variants and reports this one
        queue.put({"error": f"{type(error).__name__}: {error}"[-300:]})


def at_seconds(run: dict[str, Any], seconds: float) -> float:
    """The loss of a run after so much processor time, taking every step to cost the same."""
    points = run["evaluations"]
    step = points[-1][0] * min(seconds / run["seconds"], 1.0)
    for (low, first), (high, second) in itertools.pairwise(points):
        if step <= high:
            return first + (second - first) * (step - low) / max(high - low, 1)
    return points[-1][1]


def clears(row: dict[str, Any]) -> bool:
    """Whether a run learned more than the frequencies of tokens, where these are known."""
    return row[FLOOR] is None or row["loss"] < row[FLOOR] - CLEAR


def write(rows: list[dict[str, Any]]) -> None:
    """Writes the rows that say something."""
    rows = [row for row in rows if clears(row)]
    note = (
        "Held-out loss after a few hundred steps from nothing at size tiny (hidden 128, 4 layers, rows of 128 tokens,"
        " 8 rows a step), compared with dense attention's: gpt2 for causal language models, bert for masked tokens,"
        " t5 for span corruption. Backbone `pre-LN`: a post-LN preset with its residual paths changed, as those take"
        " a few hundred steps to learn more than the frequencies of tokens; `CPE`: a preset for masked tokens with the"
        " positions of convolutions, as learned ones take as long there; bert itself has both. `rotary`: the same in"
        f" a stack that has positions of its own. `{TWIN}`: the very same configuration with dense attention, where"
        " attention is what the variant changes, or with a dense network, layer norm, plain residual paths, the"
        f" vanilla order, layers of their own, where that is. `{FLOOR}`: what a model reaches that knows nothing else"
        " (blank where a row is older than this column). A run whose loss is not below that by"
        f' {CLEAR:g} nats has shown nothing at these steps and has no row; the section "Every variant, trained alike"'
        " of the documentation's results has all variants, smaller, after more steps. There SAC, whose edges a network"
        " chooses that learns from rewards, and disagreement of heads, which pulls at a model that knows nothing yet,"
        " come close to GPT-2, and ETC, which is clear of the frequencies on Shakespeare alone here, is far below"
        " them. Axial Transformer reads a text as an image of short rows. At this length nothing sub-quadratic is"
        f" expected to be faster. {len(SLOWER)} variants learn at a third of the others' rate"
        f" ({', '.join(name.removeprefix('xf_') for name in SLOWER)}), their controls as well. Where `steps` are"
        " more than those of others, dense attention has as many."
    )
    write_results("pretraining", rows, COLUMNS, "Pretraining against the dense baseline", note)


def main() -> None:
    from hf_xformers.variants import config_class, model_types

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", default="stdlib")
    parser.add_argument("--only", default="", help="model types, separated by commas; default: all that read text")
    arguments = parser.parse_args()
    variants = [name for name in arguments.only.split(",") if name] or [
        name
        for name in model_types()
        if name != "xformer" and config_class(name).modality == "text" and config_class(name).reads_colors != "only"
    ]
    stored = Path(__file__).parent / "results" / "pretraining.json"
    rows = json.loads(stored.read_text())["rows"] if stored.exists() else []
    import hf_xformers.training.trainer  # noqa: F401  (imported once, before the forks)

    with tempfile.TemporaryDirectory() as scratch:
        runs = Runs(Path(scratch))
        for corpus, variant in itertools.product(arguments.corpora.split(","), variants):
            objective = objective_for(variant)
            if objective is None:
                continue
            backbone = on_backbone(variant, objective)[0]
            steps = STEPS[objective] * LONGER.get((variant, corpus), 1)
            known = {(row["variant"], row["corpus"], row["objective"], row["backbone"], row["steps"]) for row in rows}
            if (variant, corpus, objective, backbone, steps) in known:
                continue
            twin = plain_twin(variant)
            dense = runs.result(BASELINES[objective], corpus, objective, steps)
            run = runs.result(variant, corpus, objective, steps)
            plain = [text for name, value in PLAIN.get(variant, DENSE).items() for text in (f"--{name}", value)]
            same = runs.result(variant, corpus, objective, steps, plain, twin) if twin is not None else None
            if "error" in run or "error" in dense:
                continue
            row = {
                "variant": variant,
                "corpus": corpus,
                "objective": objective,
                "backbone": backbone,
                "steps": steps,
                FLOOR: run["baseline"],
                "loss at start": run["evaluations"][0][1],
                "loss": run["evaluations"][-1][1],
                "dense loss": dense["evaluations"][-1][1],
                TWIN: None if same is None or "error" in same else same["evaluations"][-1][1],
                "dense, at equal time": at_seconds(dense, run["seconds"]),
                "time ratio": run["seconds"] / dense["seconds"],
            }
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            rows = [r for r in rows if (r["variant"], r["corpus"]) != (variant, corpus)] + [row]
            rows.sort(key=lambda r: (r["corpus"], r["objective"], r["variant"]))
            write(rows)


if __name__ == "__main__":
    main()

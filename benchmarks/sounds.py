"""Speech and music compared with what needs no model: word errors of a Conformer, perplexities of a Music Transformer.

python benchmarks/sounds.py [--seeds 3]

Speech: words spelt in pairs of tones, in noise, learned by `hf-xformers finetune --task speech-recognition` and
measured on sounds that it has not heard, with the weights after the last step. Music: tunes in ABC notation, learned
by `hf-xformers pretrain` and measured on held-out ones; next to the Music Transformer a GPT-2 of the same width, depth
and steps, whose positions are absolute, one vector for each instead of tables in every layer.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import write_results
from seeds import together, trained

sys.path.append(str(Path(__file__).resolve().parent.parent))

from examples.sounds import write_tone_speech
from examples.tunes import write_tunes

COLUMNS = ["data", "model", "parameters", "steps", "metric", "seeds", "held out", "spread", "baseline", "of"]
COLUMNS += ["processor seconds"]
HEARD, UNHEARD, NOISES = 96, 48, (0.05, 0.3)
TUNES, MUSIC_STEPS = 1500, 500
COMMON = "--report_to none --use_cpu true --disable_tqdm true --hidden_dropout_prob 0 --attention_probs_dropout_prob 0"
SPEECH = (
    "--task speech-recognition --variant conformer --num_mel_bins 24 --hidden_size 48 --num_hidden_layers 2"
    " --num_attention_heads 2 --intermediate_size 96 --block.conv_kernel 5 --embedding.channels 8 --warmup_steps 12"
    " --learning_rate 8e-3 --num_train_epochs 10 --per_device_train_batch_size 8 --eval_strategy no"
    " --save_strategy no --validation_fraction 0"
)
MUSIC = (
    f"--size tiny --vocab_size 320 --block_size 128 --max_steps {MUSIC_STEPS} --per_device_train_batch_size 16"
    " --learning_rate 2e-3 --save_strategy no"
)


def row(runs: list[tuple[dict[str, Any], float]], figures: list[float], known: dict[str, Any]) -> dict[str, Any]:
    sizes = {name: runs[0][0][name] for name in ("parameters", "steps")}
    return together(figures, [seconds for _, seconds in runs], **known, **sizes)


def speech(scratch: Path, seeds: int) -> Iterator[dict[str, Any]]:
    for noise in NOISES:
        place = scratch / f"speech {noise}"
        write_tone_speech(place / "train", HEARD, seed=1, noise=noise)
        write_tone_speech(place / "test", UNHEARD, seed=2, noise=noise)
        data = ["--data", str(place / "train"), "--test_data", str(place / "test")]
        runs = [
            trained([*f"finetune {SPEECH} {COMMON} --seed {seed}".split(), *data], place / f"run {seed}")
            for seed in range(seeds)
        ]
        known = {"data": f"speech in tones, noise {noise:g}", "model": "xf_conformer", "metric": "word error rate"}
        known |= {"baseline": runs[0][0]["baseline_test"]["wer"], "of": "the best constant transcript"}
        yield row(runs, [summary["test_wer"] for summary, _ in runs], known)


def music(scratch: Path, seeds: int) -> Iterator[dict[str, Any]]:
    write_tunes(scratch / "tunes.txt", TUNES)
    for variant in ("music_transformer", "gpt2"):
        words = [*f"pretrain --variant {variant} {MUSIC} {COMMON}".split(), "--data", str(scratch / "tunes.txt")]
        runs = [trained([*words, "--seed", str(seed)], scratch / f"{variant} {seed}") for seed in range(seeds)]
        known = {"data": "tunes", "model": f"xf_{variant}", "metric": "perplexity of a token"}
        floor = statistics.mean(math.exp(summary["eval_baseline_loss"]) for summary, _ in runs)
        known |= {"baseline": floor, "of": "frequencies of tokens"}
        yield row(runs, [math.exp(summary["eval_loss"]) for summary, _ in runs], known)


def write(rows: list[dict[str, Any]]) -> None:
    note = (
        "Means over seeds and their spread, largest less smallest. Speech: words of five letters, spelt in tones,"
        f" up to three in a sound, in white noise; {HEARD} sounds to learn from, {UNHEARD} others measured. Music:"
        f" {TUNES} generated tunes, rows of 128 tokens; both models of one width and depth, of which the Music"
        " Transformer has tables of distances in every layer besides that."
    )
    write_results("sounds", rows, COLUMNS, "Speech and music", note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for part in (speech, music):
            for found in part(Path(scratch), given.seeds):
                print(found, flush=True)
                rows.append(found)
                write(rows)


if __name__ == "__main__":
    main()

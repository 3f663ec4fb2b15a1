# SPDX-License-Identifier: Apache-2.0
"""A Music Transformer learns tunes and continues one: python examples/music.py --folder music

Makes tunes in ABC notation, pretrains the model on them with `hf-xformers pretrain`, measures held-out tunes against
the baseline of token frequencies, lets the model continue the first bars of a tune that it has not seen, and writes
prompt and continuation to continued.wav (and the whole of that tune to original.wav) for listening. Takes some minutes
on a processor.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from examples.sounds import write_wav
from examples.tunes import make_tune, notes_of, sound_of, write_tunes
from hf_xformers.cli import main as hf_xformers

RATE = 16000
UNSEEN = 500_000  # the number of a tune beyond those that are written


def options(folder: Path, steps: int) -> list[str]:
    """Of the command that trains the model."""
    given = {
        "variant": "music_transformer",
        "data": folder / "tunes.txt",
        "output_dir": folder / "model",
        "size": "tiny",
        "vocab_size": 320,
        "block_size": 128,
        "max_steps": steps,
        "per_device_train_batch_size": 16,
        "learning_rate": 2e-3,
        "eval_steps": steps,
        "save_steps": steps,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "overwrite_output_dir": "true",
        "use_cpu": "true",
    }
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def train(folder: Path, count: int, steps: int) -> dict[str, float]:
    """Perplexity of held-out tunes by token, and that of token frequencies alone."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tunes(folder / "tunes.txt", count)
    if make_tune(UNSEEN) in (folder / "tunes.txt").read_text(encoding="utf-8"):
        raise SystemExit(f"among {count} tunes is the one that the model shall not have seen; take fewer `--tunes`")
    if hf_xformers(["pretrain", *options(folder, steps)]):
        raise SystemExit("the training did not end; see above")
    summary = json.loads((folder / "model" / "training_summary.json").read_text())
    return {"perplexity": math.exp(summary["eval_loss"]), "baseline": math.exp(summary["eval_baseline_loss"])}


def go_on(folder: Path, bars: int = 3) -> tuple[str, str]:
    """(a tune that the model has not seen, its first bars with the model's continuation), also as sound."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tune = make_tune(UNSEEN)
    prompt = "|".join(tune.split("|")[:bars]) + "|"
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    room = model.config.max_position_embeddings - ids.shape[1]
    made = model.generate(ids, max_new_tokens=min(96, room), do_sample=False, pad_token_id=tokenizer.pad_token_id)
    written = tokenizer.decode(made[0], skip_special_tokens=True).partition("]")[0]
    for name, text in (("original", tune), ("continued", written)):
        write_wav(folder / f"{name}.wav", sound_of(notes_of(text), RATE), RATE)
        (folder / f"{name}.abc").write_text(text + "\n", encoding="utf-8")
    return tune, written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("music"))
    parser.add_argument("--tunes", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    figures = train(arguments.folder, arguments.tunes, arguments.steps)
    tune, written = go_on(arguments.folder)
    print(f"perplexity of held-out tunes {figures['perplexity']:.2f}, of token frequencies {figures['baseline']:.2f}")
    print(f"the tune:        {tune}\nthe model wrote: {written}")
    print(f"listen to {arguments.folder}/original.wav and {arguments.folder}/continued.wav")


if __name__ == "__main__":
    main()

"""Tries all families with the versions of transformers, torch, accelerate and peft that the package admits.

    python scripts/versions.py                              the lowest, the pinned and the newest versions
    python scripts/versions.py --only 5.21 5.22 newest      these; 5.21: of transformers, with the pins
    python scripts/versions.py --folder /tmp/versions       environments go there, stay, and are used again
    python scripts/versions.py --only here                  the environment that this runs in

Each set of versions is installed into a fresh environment, where every head of every family below is computed forward
and backward, continues texts of different lengths, is saved and loaded again, and trained for a step. What holds is
printed as a Markdown table. The lowest versions are the lower bounds of pyproject.toml, the pinned ones those of
scripts/constraints.txt, and the newest are what pip chooses within the bounds. Needs a package index that pip can
reach; torch alone may be several hundred MB for each environment.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("transformers", "torch", "accelerate", "peft")
STEPS = ("forward", "backward", "generate", "save and load", "Trainer", "LoRA")
HEADS = ("ForMaskedLM", "ForCausalLM", "ForSeq2SeqLM", "ForImageClassification", "ForCTC")


def dependencies() -> dict[str, str]:
    """Name -> range of versions, of what the package needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["dependencies"] + project["optional-dependencies"]["train"]
    return dict(re.fullmatch(r"([\w-]+)(.*)", item).groups() for item in listed)


def minor_versions(bounds: str) -> list[str]:
    """Those of transformers in such bounds as ">=5.21,<5.25": 5.21 to 5.24."""
    major, first, end = re.fullmatch(r">=(\d+)\.(\d+)[.\d]*,<\1\.(\d+)", bounds).groups()
    return [f"{major}.{minor}" for minor in range(int(first), int(end))]


def requirements(name: str) -> list[str]:
    """What pip is asked for in the environment of a set of versions.

    Raises:
        ValueError: no such set.
    """
    bounds = dependencies()
    if name == "newest":
        return [package + found for package, found in bounds.items()]
    if name == "lowest":
        lowest = {package: re.match(r">=([\d.]+)", found) for package, found in bounds.items()}
        return [f"{package}=={found[1]}" if found else package for package, found in lowest.items()]
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "scripts" / "constraints.txt").read_text(), re.MULTILINE))
    if name in minor_versions(bounds["transformers"]):
        pinned["transformers"] = f"{name}.*"
    elif name != "pinned":
        known = ["lowest", "pinned", "newest", "here", *minor_versions(bounds["transformers"])]
        raise ValueError(f"There is no set of versions {name!r}; choose among {', '.join(known)}.")
    return [
        f"{package}=={pinned[package]}" if package in pinned else package + found for package, found in bounds.items()
    ]


# What runs inside an environment.


def models(pattern: str) -> Iterator[tuple[str, Any]]:
    """(name, tiny model in training mode) of every head of every family that is tried."""
    import torch

    from hf_xformers.variants import config_class, family, model_types
    from tests.helpers import tiny_fields

    kinds = {"ForMaskedLM": "encoder", "ForCausalLM": "decoder", "ForSeq2SeqLM": "seq2seq"}
    for model_type in model_types():
        if not re.fullmatch(pattern, model_type):
            continue
        heads, config = family(model_type), config_class(model_type)
        for head in HEADS:
            if head in heads:
                kind = kinds.get(head, "encoder")
                shape = (
                    {"is_decoder": kind == "decoder", "is_encoder_decoder": kind == "seq2seq"} if head in kinds else {}
                )
                torch.manual_seed(0)
                yield f"{model_type} {head}", heads[head](config(**tiny_fields(config, kind, **shape))).train()


def rows(model: Any) -> dict[str, Any]:
    """A batch of two with labels. Texts are padded on the left, as `generate` reads them."""
    import torch

    from tests.helpers import tokens

    if model.main_input_name == "pixel_values":
        shape = (2, model.config.num_channels, *model.config.image_shape)
        return {"pixel_values": torch.randn(shape), "labels": torch.tensor([1, 0])}
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(2, 40, model.config.num_mel_bins), "labels": tokens(2, 3)}
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    ids[1, :4], mask[1, :4] = model.config.pad_token_id, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def steps(model: Any, folder: str) -> dict[str, Callable[[], None]]:
    """What is tried of a model, by the names of `STEPS`."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import TrainingArguments

    from hf_xformers.training import XFormerTrainer

    batch = rows(model)
    prompt = {name: value for name, value in batch.items() if name != "labels"}

    def backward() -> None:
        model(**batch).loss.backward()
        assert all(
            torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None
        )

    def generate() -> None:
        if not model.can_generate():
            return
        with_cache, without = (
            model.eval().generate(**prompt, max_new_tokens=4, do_sample=False, use_cache=use) for use in (True, False)
        )
        assert torch.equal(with_cache, without), "a cache changes what is written"

    def save_and_load() -> None:
        again = dict(batch) if model.config.is_encoder_decoder else prompt
        with torch.no_grad():
            before = model.eval()(**again).logits
            model.save_pretrained(folder)
            after = type(model).from_pretrained(folder).eval()(**again).logits
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)

    def train() -> None:
        data = [{name: value[row] for name, value in batch.items()} for row in range(2)]
        given = {"per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
        arguments = TrainingArguments(output_dir=folder, max_steps=1, save_strategy="no", **given)
        XFormerTrainer(model=model, args=arguments, train_dataset=data).train()

    def lora() -> None:
        adapted = get_peft_model(model, LoraConfig(target_modules=r".*\.[qo]_proj|.*\.up_proj"))
        adapted(**batch).loss.backward()

    return dict(zip(STEPS, (lambda: model(**batch), backward, generate, save_and_load, train, lora)))


def smoke(result: str, pattern: str = ".*") -> None:
    """Writes {"versions": {library: version}, "tried": number of models, "failures": [[step, model, error]]}."""
    from hf_xformers import compat

    failures, tried = [], 0

    def attempt(step: str, name: str, run: Callable[[], Any]) -> None:
        try:
            run()
        except Exception as error:
            failures.append([step, name, f"{type(error).__name__}: {error}".splitlines()[0][:200]])

    for borrowed in compat.BORROWED:
        attempt("import", borrowed, partial(getattr, compat, borrowed))
    for name, model in models(pattern):
        tried += 1
        with tempfile.TemporaryDirectory() as folder:
            for step, run in steps(model, folder).items():
                attempt(step, name, run)
    found = {"versions": {name: version(name) for name in LIBRARIES}, "tried": tried, "failures": failures}
    Path(result).write_text(json.dumps(found))


# What stands around environments.


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row for each set of versions, and below it what failed."""
    lines = [f"| set | {' | '.join(LIBRARIES + STEPS)} |", "|---" * (1 + len(LIBRARIES + STEPS)) + "|"]
    for name, found in results.items():
        if "error" in found:
            lines.append(f"| {name} | {found['error']}" + " |" * len(LIBRARIES + STEPS))
            continue
        failed = [step for step, _, _ in found["failures"]]
        counts = [f"{found['tried'] - failed.count(step)} of {found['tried']}" for step in STEPS]
        lines.append(f"| {' | '.join([name, *found['versions'].values(), *counts])} |")
    for name, found in results.items():
        lines += [f"\n{name}: {step} of {model}: {error}" for step, model, error in found.get("failures", ())]
    return "\n".join(lines)


def try_versions(name: str, folder: Path) -> dict[str, Any]:
    """What holds in the environment of a set of versions, which is made in `folder` unless it is there."""
    python, result = Path(sys.executable), folder / f"{name}.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if name != "here":
        wanted, python = requirements(name), folder / name / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
        print(f"versions: {name}: installing {' '.join(wanted)}", file=sys.stderr, flush=True)
        if subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", *wanted]).returncode:
            return {"error": "pip cannot install these versions"}
    command = [python, "-W", "ignore", "-c", f"from scripts.versions import smoke; smoke({str(result)!r})"]
    if subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, cwd=ROOT).returncode:
        return {"error": "the package cannot be imported, or ends the process"}
    return json.loads(result.read_text())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where environments go (default: a temporary folder)")
    parser.add_argument("--only", nargs="+", metavar="SET", help="lowest, pinned, newest, here, or e.g. 5.22")
    given = parser.parse_args(arguments)
    chosen = given.only or ["lowest", "pinned", "newest"]
    for name in chosen:
        name == "here" or requirements(name)  # refuses unknown names before anything is installed
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder.resolve() if given.folder else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        results = {name: try_versions(name, folder) for name in chosen}
    print(table(results))
    return int(any(found.get("error") or found["failures"] for found in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())

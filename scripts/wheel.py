"""Builds the distributions, checks them, and uses the wheel as somebody who installs nothing else does.

    python scripts/wheel.py                                      in an environment of this Python
    python scripts/wheel.py --python python3.12 python3.13       in one of each of these
    python scripts/wheel.py --folder /tmp/wheel                  environments go there, stay, and are used again

In each environment, which has torch and transformers by the pins of scripts/constraints.txt: what the wheel brings
besides them, how long `import hf_xformers` takes (seconds of a processor) and what it loads, the model examples of the
README, a model that is trained in a loop of one's own, saved and loaded, and what a command says that needs the extra
`train`. Ends with another exit code than 0 where one of these fails. Needs a package index that pip can reach.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_PACKAGES, MOST_SECONDS = 3, 0.15

IMPORT = """
import json, sys, time
start = time.process_time()
import hf_xformers
seconds = time.process_time() - start
print(json.dumps([seconds, sorted({"torch", "transformers", "numpy"} & set(sys.modules)), hf_xformers.__file__]))
"""
OWN_LOOP = """
import tempfile
import torch
from hf_xformers import XFormerConfig, XFormerForCausalLM
sizes = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
model = XFormerForCausalLM(XFormerConfig(**sizes, attention="sliding_window", position="rotary", is_decoder=True))
optimizer, ids = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.arange(5, 45).view(2, 20)
losses = []
for _ in range(30):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, losses
with tempfile.TemporaryDirectory() as folder:
    model.eval().save_pretrained(folder)
    again = XFormerForCausalLM.from_pretrained(folder).eval()
assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
assert again.generate(ids[:, :5], max_new_tokens=3).shape == (2, 8)
"""


def run(*command: str | Path, code: int = 0, cwd: Path | None = None) -> str:
    """What a command prints. Raises RuntimeError where its exit code is another."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    if done.returncode != code:
        raise RuntimeError(
            f"{' '.join(map(str, command))[:200]}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout + done.stderr


def environment(folder: Path, python: str) -> Path:
    """The Python of a fresh environment."""
    if not (folder / "bin" / "python").exists():
        run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def install(python: Path, *packages: str | Path) -> None:
    run(python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *packages)


def installed(python: Path) -> set[str]:
    listed = run(python, "-m", "pip", "--disable-pip-version-check", "list", "--format=json")
    return {entry["name"] for entry in json.loads(listed[: listed.rindex("]") + 1])}


def built(folder: Path) -> Path:
    """The wheel, checked, of the files that git knows."""
    tools, source = environment(folder / "tools", sys.executable), folder / "source"
    install(tools, "build", "twine")
    source.mkdir(exist_ok=True)
    archive = folder / "source.tar"
    run("git", "archive", "--output", archive, "HEAD", cwd=ROOT)
    run("tar", "xf", archive, "-C", source)
    run(tools, "-m", "build", "--outdir", folder / "dist", source)
    found = sorted((folder / "dist").iterdir())
    print(run(tools, "-m", "twine", "check", "--strict", *found).strip())
    return next(path for path in found if path.suffix == ".whl")


def use(python: Path, wheel: Path, folder: Path) -> None:
    """Everything that is asked of the wheel in one environment."""
    pins = dict(re.findall(r"^(\w+)==(\S+)", (ROOT / "scripts" / "constraints.txt").read_text(), re.MULTILINE))
    install(python, *(f"{name}=={pins[name]}" for name in ("torch", "transformers")))
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "hf_xformers")
    before = installed(python)
    install(python, wheel)
    brought = sorted(installed(python) - before - {"hf_xformers"})
    assert len(brought) <= MOST_PACKAGES, brought
    folder.mkdir(exist_ok=True)
    found = [json.loads(run(python, "-c", IMPORT, cwd=folder)) for _ in range(5)]
    seconds, (_, loaded, file) = min(entry[0] for entry in found), found[0]
    assert not loaded and seconds < MOST_SECONDS and not file.startswith(str(ROOT)), (seconds, loaded, file)
    readme = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    run(python, "-c", "\n".join(readme), cwd=folder)
    run(python, "-c", OWN_LOOP, cwd=folder)
    text = run(python, "-m", "hf_xformers", "pretrain", "--variant", "bert", "--data", "stdlib", code=2, cwd=folder)
    assert "pip install 'hf_xformers[train]'" in text, text
    assert "performer" in run(python, "-m", "hf_xformers", "list", cwd=folder)
    version = run(python, "--version").strip()
    print(f"{version}: brings {brought or 'nothing more'}; import {seconds:.3f} s; examples, loop and commands hold")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters to make environments with")
    parser.add_argument("--folder", help="where environments go; default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        wheel = built(folder)
        for number, python in enumerate(arguments.python):
            use(environment(folder / f"python{number}", python), wheel, folder / f"work{number}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

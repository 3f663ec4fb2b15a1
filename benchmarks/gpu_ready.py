"""Has the kernels of the GPU benchmarks compiled and tuned, in many processes at once.

    python benchmarks/gpu_ready.py [--output_dir DIR] [--minutes 1.5]

What they leave in the caches of torch and Triton is there when a case is measured. Cases that are not ready in time
are written down, and left out of the measurements that follow.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpu_layers
import gpu_models
from gpu_common import DEVICE, NOT_READY, parse

from hf_xformers.benchmark import tables


def main() -> None:
    arguments = parse(__doc__)
    end = time.monotonic() + 60 * arguments.minutes
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "1"}
    children = {}
    for module in (gpu_layers, gpu_models) if DEVICE.type == "cuda" else ():
        for case in module.COMPILED:
            command = [sys.executable, str(module.__file__), "--tune", case]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            children[case] = subprocess.Popen(command, env=environment, start_new_session=True, **quiet)
    late = []
    for case, child in children.items():
        try:
            child.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # with the compilers that it started
            late.append(case)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    tables.write_json(Path(arguments.output_dir) / NOT_READY, late)
    print(f"{len(children) - len(late)} of {len(children)} cases are compiled; not ready: {', '.join(late) or 'none'}")


if __name__ == "__main__":
    main()

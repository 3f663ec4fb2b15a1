#!/usr/bin/env python
"""Runs transformers' own common model tests over the families that hf_xformers registers.

    python scripts/conformance.py -n 2
    python scripts/conformance.py -n 2 --sample
    python scripts/conformance.py --model-type 'xf_bert,xf_long*' --kinds encoder -k save_load
    python scripts/conformance.py --builtin bert,gpt2            the runner itself, on models of transformers

The tests come from the source archive of the installed transformers, downloaded once with pip into
`$HF_XFORMERS_CACHE` (default: the user's cache folder); where that is impossible nothing is tested, and the last
line of the output says so. Exit status: 0 no failure, or nothing could be tested; 1 failures; 2 no verdict.
`tests/conformance/README.md` tells what the tests are and what `overrides.json` may say.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tests" / "conformance"
sys.path[:0] = [str(TOOLS), str(ROOT)]

from discovery import KINDS, discover, load_overrides, print_families  # noqa: E402
from report import print_report, summarise  # noqa: E402
from transformers_tests import Unavailable, cache_folder, lay_out  # noqa: E402

# One family for each engine, kind of stack, and thing that a model does in its own way: what `--sample` tests. The
# whole set takes about a minute a family. Heads know nothing of what lies below them, so each is tested on one family;
# of the others the base model and those that predict tokens.
SAMPLE = (
    "xf_t5",
    "xf_pabee",
    "xf_compressive_transformer",
    "xf_clustered_attention",
    "xf_deberta",
    "xf_delta_net",
    "xf_etc",
    "xf_feedback_transformer",
    "xf_funnel_transformer",
    "xf_longformer",
    "xf_performer",
    "xf_reformer",
    "xf_switch_transformer",
    "xf_universal_transformer",
    "xf_vision_transformer",
)
# Encoder-decoders put the same layers into two towers: one of each type of cross-attention and stack is
# enough, besides T5.
TWO_TOWERS = ("xf_performer", "xf_reformer")
EVERY_HEAD = ("xf_t5", "xf_compressive_transformer", "xf_universal_transformer", "xf_pabee", "xf_vision_transformer")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog="See tests/conformance/README.md for more."
    )
    parser.add_argument("--package", default="hf_xformers", help="package whose import registers the families")
    parser.add_argument("--builtin", type=_names, default=[], help="test these models of transformers instead")
    parser.add_argument("--model-type", type=_names, action="extend", default=[], help="model types or globs")
    parser.add_argument("--sample", action="store_true", help="one family for each engine and kind of stack")
    parser.add_argument("--kinds", type=_names, default=[], help=f"some of {','.join(KINDS)}")
    parser.add_argument("-k", dest="expression", help="pytest's expression for the names of tests")
    parser.add_argument("-n", dest="workers", type=int, default=0, help="processes (default: this one alone)")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one test (default: 300)")
    parser.add_argument("--slow", action="store_true", help="also the tests that transformers marks as slow")
    parser.add_argument("--overrides", action="append", default=[], help="a further file like overrides.json")
    parser.add_argument("--json", type=Path, help="where the results go (default: a file in the cache)")
    parser.add_argument("--list", action="store_true", help="only list the families and their classes")
    parser.add_argument("-v", dest="verbose", action="store_true", help="show the output of pytest")
    arguments = parser.parse_args(argv)
    unknown = [kind for kind in arguments.kinds if kind not in KINDS]
    if unknown:
        parser.error(f"unknown type {unknown[0]!r}; choose from {', '.join(KINDS)}")
    if arguments.sample:
        arguments.model_type += SAMPLE
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    overrides = [str(TOOLS / "overrides.json"), *(os.path.abspath(path) for path in arguments.overrides)]
    try:
        load_overrides(overrides)
    except (OSError, ValueError) as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 2
    spec = {
        "package": None if arguments.builtin else arguments.package,
        "builtin": arguments.builtin,
        "model_types": arguments.model_type,
        "kinds": arguments.kinds,
        "overrides": overrides,
        "every_head": list(EVERY_HEAD) if arguments.sample else ["*"],
        "two_towers": list(TWO_TOWERS) if arguments.sample else ["*"],
        "sample": arguments.sample,
    }
    if arguments.list:
        print_families(discover(spec["package"], spec["builtin"]))
        return 0
    with tempfile.TemporaryDirectory(prefix="hf_xformers-conformance-") as folder:
        return run(arguments, spec, Path(folder))


def run(arguments: argparse.Namespace, spec: dict[str, Any], work: Path) -> int:
    results, spec_file, layout = work / "results.json", work / "spec.json", work / "layout"
    spec_file.write_text(json.dumps(spec))
    search_path = [str(TOOLS), str(layout), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_XFORMERS_CONFORMANCE_RESULTS": str(results),
        "HF_XFORMERS_CONFORMANCE_SPEC": str(spec_file),
        "PYTHONPATH": os.pathsep.join(search_path),
        "RUN_TRAINING_TESTS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if arguments.slow:
        environment["RUN_SLOW"] = "1"
    if arguments.workers:
        environment.setdefault("OMP_NUM_THREADS", "1")
    version = importlib.metadata.version("transformers")
    try:
        lay_out(layout, version)
    except Unavailable as reason:
        print(f"conformance: SKIPPED, nothing was tested: {reason}")
        return 0

    # The project's pytest settings and conftest files are not for these tests: hence the empty configuration.
    command = [sys.executable, "-m", "pytest", str(TOOLS / "conformance_cases.py")]
    command += ["-c", os.devnull, f"--rootdir={work}", "--noconftest"]
    command += ["-p", "no:cacheprovider", "-p", "conformance_plugin"]
    command += ["-q", "--no-header", "--tb=short", "-W", "ignore", f"--timeout={arguments.timeout}"]
    if arguments.expression:
        command += ["-k", arguments.expression]
    if arguments.workers:
        command += ["-n", str(arguments.workers)]
    started = time.monotonic()
    output = None if arguments.verbose else subprocess.PIPE
    done = subprocess.run(command, env=environment, cwd=work, stdout=output, stderr=subprocess.STDOUT, text=True)
    entries = json.loads(results.read_text()) if results.exists() else {}
    if done.returncode not in (0, 1) or not entries:
        print((done.stdout or "")[-6000:])
        print(f"conformance: no verdict; pytest ended with {done.returncode}, after {len(entries)} tests")
        return 2

    report = summarise(entries)
    report |= {"transformers": version, "seconds": round(time.monotonic() - started, 1)}
    target = arguments.json or cache_folder() / "last-results.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(report, indent=1))
    print_report(report)
    print(f"every test with its errors: {target}")
    return 1 if report["totals"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

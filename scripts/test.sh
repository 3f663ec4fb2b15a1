#!/usr/bin/env bash
# Sets the environment up and runs the tests.
#
#   scripts/test.sh                 the whole suite, then transformers' common tests over one family for each engine and stack
#                                   (over all of them: scripts/conformance.py -n 2)
#   scripts/test.sh ARGUMENT ...    pytest alone, with these arguments: scripts/test.sh tests/attention -k performer
#
# The tests need no network. The second step downloads transformers' source archive once, and passes over itself with a
# message where it cannot.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash scripts/setup.sh test
python=${HF_XFORMERS_VENV:-$root/.venv}/bin/python

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1

"$python" -m pytest -n 2 "$@"
if [ $# -eq 0 ]; then
    "$python" scripts/conformance.py -n 2 --sample
fi

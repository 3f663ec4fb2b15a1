#!/usr/bin/env bash
# Sets the environment up and runs the tests.
#
#   scripts/test.sh                 the whole suite, then transformers' common tests over one family for each engine and stack
#                                   (over all of them: scripts/conformance.py -n 2)
#   scripts/test.sh --quick         a first look in less than two minutes: tests of as many files as there is time for
#   scripts/test.sh --changed [REVISION]   in less than three minutes: what the files that differ from REVISION can reach
#                                   (without it: from where the branch left main); says first what it will run
#   scripts/test.sh ARGUMENT ...    pytest alone, with these arguments: scripts/test.sh tests/attention -k performer
#
# The tests need no network. After the whole suite, transformers' source archive is downloaded once for its tests, which
# are passed over with a message where that cannot be.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
if [ "${1:-}" = --changed ]; then
    bash scripts/setup.sh test dev # the graph of imports is read by what checks it
else
    bash scripts/setup.sh test
fi
python=${HF_XFORMERS_VENV:-$root/.venv}/bin/python

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
export PYTHONDONTWRITEBYTECODE= # where it is set, pytest would rewrite every test file at every start

if [ "${1:-}" = --changed ]; then
    shift
    exec "$python" scripts/affected.py "$@" -n 2 --dist worksteal
fi
# worksteal: each worker begins with half of the tests in their order, and goes on with a part of what the other has
# left, so that what a file makes for all of its tests is made once.
run=("$python" -m pytest -n 2 --dist worksteal)
case "${1:-}" in
    "") printf '%s\n' 'Runs all tests in two processes, then a sample of the tests of transformers: 30 to 45 minutes on two cores.' \
        'A first look takes two (--quick), the tests for your changes three (--changed).' ;;
    --quick) echo 'Runs a test or two of every file in two processes, as many as there is time for in two minutes.' ;;
    *) exec "${run[@]}" "$@" ;;
esac

summary=$(mktemp)
trap 'rm -f "$summary"' EXIT
code=0
"${run[@]}" -q "--progress=$summary" "$@" || code=$?
if [ $# -eq 0 ] && [ "$code" -lt 2 ]; then # beyond 1 it was stopped
    "$python" scripts/conformance.py -n 2 --sample && theirs=passed || { theirs=failed code=1; }
    echo "the tests of transformers: $theirs, as said above" >>"$summary"
fi
printf '\n'
cat "$summary"
exit "$code"

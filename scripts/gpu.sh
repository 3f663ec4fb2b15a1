#!/usr/bin/env bash
# Checks and measures the package on one GPU, within the minutes given; each part stores its rows as it goes.
#
#   scripts/gpu.sh [--minutes 8] [--output_dir DIR]   with the python of PATH, or of HF_XFORMERS_VENV
#   scripts/gpu.sh --wheels DIR ...                   a machine without a network that has torch and triton: the packages
#                                                     in DIR go into a temporary folder first, and nothing is built
#   scripts/gpu.sh --download DIR [PYTHON]            fills DIR beforehand, for that version of Python (3.12)
#   scripts/gpu.sh --parts families,layers ...        some of the parts (all: families,ready,layers,models)
#   scripts/gpu.sh --smollm2 DIR ...                  linearizes this checkpoint in what time is left
#
# In this order: every family against the processor (and the engines against their equations); kernels are compiled; one
# attention layer from 1,024 to 65,536 tokens; whole models. Without a GPU the same code runs on the processor at tiny sizes.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
minutes=8 output=$root/benchmarks/results wheels= smollm2= parts=families,ready,layers,models
pinned() { grep "^$1==" "$root/scripts/constraints.txt"; }

while [ $# -gt 0 ]; do
    case "$1" in
        --minutes) minutes=$2 ;;
        --output_dir) output=$2 ;;
        --parts) parts=$2 ;;
        --wheels) wheels=$2 ;;
        --smollm2) smollm2=$2 ;;
        --download)
            python=${3:-3.12} platforms=()
            for name in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
                platforms+=(--platform "${name}_x86_64")
            done
            # what a machine with torch, triton and some transformers is likely to have stays there
            python3 -m pip download --no-deps --only-binary=:all: --python-version "$python" --implementation cp \
                "${platforms[@]}" --dest "$2" "$(pinned transformers)" "$(pinned tokenizers)" "$(pinned datasets)" \
                "$(pinned evaluate)" "$(pinned peft)" 'dill<0.4.2' 'multiprocess<0.70.20' einops \
                flash-linear-attention==0.6.0 fla-core==0.6.0
            exit
            ;;
        *)
            echo "gpu.sh: $1 is no option; see the head of $0." >&2
            exit 2
            ;;
    esac
    shift 2
done

python=python3
[ -z "${HF_XFORMERS_VENV:-}" ] || python=$HF_XFORMERS_VENV/bin/python
export PYTHONPATH=$root:$root/benchmarks${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
if [ -n "$wheels" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
    export PYTHONPATH=$site:$PYTHONPATH
fi

part() { # NAME SECONDS
    printf '\n== %s, %s s\n' "$1" "$2"
    # a kernel that hangs must not take the parts after it along
    timeout $(($2 + 45)) "$python" "$root/benchmarks/gpu_$1.py" --output_dir "$output" \
        --minutes "$("$python" -c "print($2 / 60)")" || echo "gpu.sh: $1 ended with $?"
}

count=$(tr ',' '\n' <<<"$parts" | wc -l)
for name in ${parts//,/ }; do
    part "$name" "$("$python" -c "print(int(60 * $minutes / $count))")"
done
if [ -n "$smollm2" ]; then
    "$python" -m hf_xformers linearize --model "$smollm2" --attention lolcats --attention.window 64 \
        --output_dir "$output/smollm2_linearized"
fi

#!/usr/bin/env bash
# Trains a tiny model on text that comes with Python, uses it again from a new process, and shows what a training step
# costs next to dense attention. Under six minutes on two free cores, with no network after the set-up. Safe to run
# again: it trains anew into the same folder.
#
#   scripts/demo.sh [mlm|clm|t5]      fills masks (Longformer), continues text (linear attention), fills gaps as T5 does
#   VARIANT=bert LENGTH=128 BATCH=16 scripts/demo.sh
#   VARIANT=delta_net STEPS=500 scripts/demo.sh clm
#   SIZE=small STEPS=50 scripts/demo.sh t5
#
# VARIANT, SIZE, LENGTH (tokens of a row), BATCH (rows of a step), STEPS and LEARNING_RATE change the run. What is tuned
# to learn in minutes is the tiny model of each demo; a larger one takes its time, and another variant is trained as it
# is.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash scripts/setup.sh
python=${HF_XFORMERS_VENV:-$root/.venv}/bin/python
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

"$python" scripts/demo.py train "${1:-mlm}"
"$python" scripts/demo.py show "${1:-mlm}"

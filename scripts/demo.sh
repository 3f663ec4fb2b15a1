#!/usr/bin/env bash
# Pretrains a tiny model on text that comes with Python, evaluates it, and uses it again from a new process: a few minutes
# on two cores, with no network after the set-up. Safe to run again: it trains anew into the same folder.
#
#   scripts/demo.sh [mlm|clm|t5]      masked (BERT), causal (GPT), or span corruption (T5); default: mlm
#   VARIANT=performer STEPS=500 scripts/demo.sh clm
set -euo pipefail

variant=${VARIANT:-} # default: the variant that made the objective known
size=${SIZE:-tiny}
steps=${STEPS:-300}
batch=${BATCH:-16}
learning_rate=${LEARNING_RATE:-1e-3}

case "${1:-mlm}" in
    mlm) objective=mlm known=bert ;;
    clm) objective=clm known=gpt2 ;;
    t5) objective=span known=t5 ;;
    *)
        printf 'demo: there is no demo "%s"; choose mlm, clm or t5.\n' "$1" >&2
        exit 1
        ;;
esac
variant=${variant:-$known}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash scripts/setup.sh
bin=${HF_XFORMERS_VENV:-$root/.venv}/bin
output=runs/demo-${1:-mlm}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

printf '\n== pretrain %s (%s) with objective %s: %s steps of %s sequences\n' "$variant" "$size" "$objective" "$steps" "$batch"
"$bin/hf-xformers" pretrain --variant "$variant" --objective "$objective" --data stdlib --size "$size" \
    --output_dir "$output" \
    --max_steps "$steps" --per_device_train_batch_size "$batch" --learning_rate "$learning_rate" \
    --warmup_steps "$((steps / 10))" --logging_steps "$(((steps + 9) / 10))" \
    --eval_on_start true --eval_strategy steps --eval_steps "$steps" \
    --save_strategy no --report_to none --seed 0

printf '\n== evaluate %s\n' "$output"
"$bin/hf-xformers" evaluate --model "$output" --data stdlib

printf '\n== reload in a new process\n'
"$bin/python" scripts/demo.py "$output" --objective "$objective"

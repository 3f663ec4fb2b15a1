#!/usr/bin/env bash
# Pretrains a tiny model on text that comes with Python, evaluates it, uses it again from a new process, and shows what a
# training step costs beside dense attention: a few minutes on two cores, with no network after the set-up. Safe to run
# again: it trains anew into the same folder.
#
#   scripts/demo.sh [mlm|clm|t5]      masked (Longformer), causal (Performer), or span corruption (T5); default: mlm
#   VARIANT=bert LENGTH=128 BATCH=16 scripts/demo.sh
#   VARIANT=delta_net STEPS=500 scripts/demo.sh clm
set -euo pipefail

size=${SIZE:-tiny}
learning_rate=${LEARNING_RATE:-1e-3}

# Efficient variants at a length where they pay.
options=()
case "${1:-mlm}" in
    mlm) objective=mlm known=longformer length=4096 batch=1 steps=200 ;;
    clm) objective=clm known=performer length=4096 batch=1 steps=200 ;;
    t5) objective=span known=t5 length=128 batch=16 steps=300 ;;
    *)
        printf 'demo: there is no demo "%s"; choose mlm, clm or t5.\n' "$1" >&2
        exit 1
        ;;
esac
steps=${STEPS:-$steps} variant=${VARIANT:-$known} length=${LENGTH:-$length} batch=${BATCH:-$batch}
if [ "$variant" = longformer ]; then options=(--attention.attention_window 128); fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash scripts/setup.sh
bin=${HF_XFORMERS_VENV:-$root/.venv}/bin
output=runs/demo-${1:-mlm}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

printf '\n== pretrain %s (%s) with objective %s: %s steps of %s x %s tokens\n' \
    "$variant" "$size" "$objective" "$steps" "$batch" "$length"
"$bin/hf-xformers" pretrain --variant "$variant" --objective "$objective" --data stdlib --size "$size" \
    --output_dir "$output" --block_size "$length" ${options[@]+"${options[@]}"} \
    --max_steps "$steps" --per_device_train_batch_size "$batch" --per_device_eval_batch_size "$batch" --learning_rate "$learning_rate" \
    --warmup_steps "$((steps / 10))" --logging_steps "$(((steps + 9) / 10))" \
    --eval_on_start true --eval_strategy steps --eval_steps "$steps" \
    --save_strategy no --report_to none --seed 0

printf '\n== evaluate %s\n' "$output"
"$bin/hf-xformers" evaluate --model "$output" --data stdlib

printf '\n== reload in a new process\n'
"$bin/python" scripts/demo.py "$output" --objective "$objective" --length "$length"

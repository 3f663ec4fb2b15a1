#!/usr/bin/env bash
# Sets the environment up and builds the documentation, strictly: a dead link, a missing reference, or something that
# a page would load from another host fails.
#
#   scripts/docs.sh          the site in build/docs/site, whose pages open without a server, too; the search needs one
#   scripts/docs.sh serve    the same, then serves it at http://localhost:8000 (HF_XFORMERS_DOCS_PORT: another port)
#
# It needs the network for the set-up alone. The variables of scripts/setup.sh hold here, too.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
case "${1:-}" in
    '' | serve) ;;
    *)
        printf 'docs: there is no "%s"; say nothing to build, or serve.\n' "$1" >&2
        exit 1
        ;;
esac
bash scripts/setup.sh docs
bin=${HF_XFORMERS_VENV:-$root/.venv}/bin
folder=$root/build/docs

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$bin/python" -m scripts.docs.assemble "$folder"
(cd "$folder" && "$bin/zensical" build --strict --clean --config-file mkdocs.yml)
"$bin/python" -m scripts.docs.check_site "$folder/site"
if [ "${1:-}" = serve ]; then
    exec "$bin/python" -m http.server "${HF_XFORMERS_DOCS_PORT:-8000}" --bind localhost --directory "$folder/site"
fi

#!/usr/bin/env bash
# Makes the virtual environment of this checkout and installs the package into it, editable, with the extra "train".
#
#   scripts/setup.sh [EXTRA ...]      for example: scripts/setup.sh test dev
#
# Needs Python >= 3.11 and a package index that pip can reach. Safe to run again: nothing happens when the environment
# already has these extras and neither pyproject.toml nor scripts/constraints.txt has changed since.
#
# HF_XFORMERS_VENV    where the environment goes (default: .venv in the checkout)
# HF_XFORMERS_PYTHON  the Python to make it with (default: python3.11, else python3)
# HF_XFORMERS_TORCH   set to anything (say `own`) to leave torch unpinned: a torch that is already in the environment
#                     stays as it is, and without one pip chooses
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=${HF_XFORMERS_VENV:-$root/.venv}
constraints=scripts/constraints.txt
stamp=$venv/hf_xformers-setup.txt

fail() {
    printf 'setup: %s\n' "$1" >&2
    exit 1
}

known=$(sed -n '/^\[project.optional-dependencies\]/,/^\[project\.[^o]/s/^\([a-z]*\) = \[.*/\1/p' pyproject.toml | xargs)
for extra in "$@"; do
    case " $known " in
        *" $extra "*) ;;
        *) fail "there is no extra \"$extra\"; choose from: $known." ;;
    esac
done

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

if [ ! -x "$venv/bin/python" ]; then
    python=
    for candidate in ${HF_XFORMERS_PYTHON:-python3.11 python3}; do
        if new_enough "$candidate"; then
            python=$candidate
            break
        fi
    done
    [ -n "$python" ] || fail "hf_xformers needs Python 3.11 or newer, and ${HF_XFORMERS_PYTHON:-python3.11 and python3} \
gave $("${HF_XFORMERS_PYTHON:-python3}" --version 2>/dev/null || echo "no working Python"). Install a newer one, or name \
one with HF_XFORMERS_PYTHON=/path/to/python."
    echo "setup: making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
elif ! new_enough "$venv/bin/python"; then
    fail "$venv has $("$venv/bin/python" --version), and hf_xformers needs Python 3.11 or newer. Remove that folder and run \
this again."
fi

# The stamp has the fingerprint of what was installed on its first line, and the extras on its second.
fingerprint=$(
    {
        cat pyproject.toml "$constraints"
        echo "$root ${HF_XFORMERS_TORCH:-pinned}"
    } | "$venv/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
)
installed=
recorded=
if [ -f "$stamp" ]; then
    { read -r recorded; read -r installed; } <"$stamp" || true
fi
wanted=$(printf '%s\n' train $installed "$@" | sort -u | xargs)
if [ "$fingerprint" = "$recorded" ] && [ "$wanted" = "$installed" ]; then
    echo "setup: $venv is up to date (extras: $installed)"
    exit 0
fi

rm -f "$stamp"
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile)
if [ -n "${HF_XFORMERS_TORCH:-}" ]; then
    constraints=$(mktemp)
    trap 'rm -f "$constraints"' EXIT
    grep -v '^torch==' scripts/constraints.txt >"$constraints"
else
    # torch comes first and by its exact pin, so that nothing installed later can bring another build of it
    echo "setup: installing $(grep '^torch==' "$constraints")"
    "${pip[@]}" "$(grep '^torch==' "$constraints")"
fi
echo "setup: installing hf_xformers (extras: $wanted)"
# setuptools_scm: what some packages are built with, which without it have no version
"${pip[@]}" -c "$constraints" setuptools setuptools_scm
"${pip[@]}" -c "$constraints" --no-build-isolation --editable ".[${wanted// /,}]"
# pip would compile every module of every package, nine tenths of which are never imported. What commands load is
# compiled now, also for those whose environment forbids it later; the rest when it is first used.
PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 "$venv/bin/python" -c 'import peft, hf_xformers.cli.pretrain, \
hf_xformers.training.trainer' || fail "what was just installed cannot be imported; remove $venv and run this again."

printf '%s\n%s\n' "$fingerprint" "$wanted" >"$stamp"
echo "setup: done; activate with: source $venv/bin/activate"

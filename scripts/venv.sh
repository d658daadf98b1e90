#!/usr/bin/env bash
# scripts/venv.sh FOLDER REQUIREMENTS: makes FOLDER a virtual environment that holds what REQUIREMENTS locks.
#
# Does nothing when FOLDER has had exactly this file installed before: a copy of it in FOLDER is the stamp, so that
# fetching the sources anew, or changing branches there and back, reinstalls nothing.
# PYTHON chooses the interpreter; without it, the newest of those that Hearth is tested on.
set -euo pipefail

folder=$1
requirements=$2
stamp=$folder/installed-$(basename "$requirements")

fail() { echo "$*" >&2; exit 1; }

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

choose() {
  local name
  if [ -n "${PYTHON:-}" ]; then
    recent "$PYTHON" || fail "PYTHON=$PYTHON: Hearth needs Python 3.11 or newer."
    echo "$PYTHON"
    return
  fi
  for name in python3.13 python3.12 python3.11 python3; do
    if recent "$name"; then
      echo "$name"
      return
    fi
  done
  fail "Hearth needs Python 3.11 or newer; this machine has $(python3 --version 2>/dev/null || echo none). Install one, or name it: PYTHON=/path/to/python3 make ..."
}

create() {
  local python version
  python=$(choose)
  version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments here. Install its venv package (Debian, Ubuntu: apt-get install $version-venv) and try again."
  "$python" -m venv --clear "$folder"
}

"$folder/bin/python" -m pip --version >/dev/null 2>&1 || create
if ! cmp -s "$requirements" "$stamp"; then
  echo "Installing $requirements into $folder ..." >&2
  PIP_DISABLE_PIP_VERSION_CHECK=1 "$folder/bin/python" -m pip install --quiet --require-hashes -r "$requirements"
  cp "$requirements" "$stamp"
fi

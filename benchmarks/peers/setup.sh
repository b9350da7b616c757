#!/bin/sh
# Makes .venv-pfl and .venv-flower, in the repository or in the folder given, for benchmarks/peers.py.
# They are apart from .venv because pfl needs an older dp-accounting and Flower an older protobuf than we do.
# torch comes first and alone, as in the Makefile, so that nothing pulls in a different build. Our own model code
# comes by PYTHONPATH and needs nothing but torch and what stands in `own`.
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)
where=${1:-$here}
torch=$(grep '^torch==' "$here/constraints.txt")
numpy=$(grep '^numpy==' "$here/constraints.txt")
own=$(grep -E '^(pydantic|PyYAML|sentencepiece)==' "$here/constraints.txt")

make_venv() {  # folder, then packages
    venv=$where/$1
    shift
    test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet "$torch" "$numpy"
    "$venv/bin/python" -m pip install --quiet "$torch" "$numpy" $own "$@"
}

make_venv .venv-pfl 'pfl[pytorch]==0.6.0' 'dp-accounting<0.6'
make_venv .venv-flower 'flwr[simulation]==1.41.0'

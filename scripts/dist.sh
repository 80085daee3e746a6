#!/bin/sh
# The wheel and the sdist, then the wheel in a clean environment, from which the quickstart runs. Called by `make dist`.
set -eu
python=$1
rm -rf dist
"$python" -m hatchling build -d dist
clean=$(mktemp -d)
trap 'rm -rf "$clean"' EXIT
"$python" -m venv "$clean/venv"
"$clean/venv/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt dist/*.whl
wheel=$(cd dist && pwd)
cd "$clean"
"$clean/venv/bin/fedalloy" --version
recipe=$("$clean/venv/bin/python" -c 'import fedalloy, pathlib; print(pathlib.Path(fedalloy.__file__).parent / "recipes/quickstart.toml")')
"$clean/venv/bin/fedalloy" run "$recipe" --quick -o run
"$clean/venv/bin/fedalloy" report run -o report.html
ls "$wheel"

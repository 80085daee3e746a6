#!/bin/sh
# The sdist and the wheel; both in an empty environment, .venv-wheel, from which the quickstart and the demo run.
# Called by `make wheel` (and `make dist`). EXTRAS names the extras to install; default: flower.
set -eu
python=$1
rm -rf dist
"$python" -m hatchling build -d dist
here=$(pwd)
clean=$(mktemp -d)
trap 'rm -rf "$clean"' EXIT
"$python" -m venv --clear .venv-wheel
install() { "$here/.venv-wheel/bin/python" -m pip install -qq --disable-pip-version-check -c "$here/constraints.txt" "$@"; }
# The sdist must make the same package as the checkout: what it lacks would be missed by whoever builds from it.
"$python" -m pip wheel -qq --disable-pip-version-check --no-deps --no-build-isolation -w "$clean/from-sdist" dist/*.tar.gz
"$python" - dist/*.whl "$clean"/from-sdist/*.whl <<'CHECK'
import sys
from zipfile import ZipFile

one, other = (set(ZipFile(path).namelist()) for path in sys.argv[1:])
sys.exit(f"the wheel and the wheel of the sdist differ: {sorted(one ^ other)[:20]}" if one != other else 0)
CHECK
install "$(ls "$here"/dist/*.whl)[${EXTRAS-flower}]"
cd "$clean"
fedalloy="$here/.venv-wheel/bin/fedalloy"
"$fedalloy" --version
recipes=$("$here/.venv-wheel/bin/python" -P -c 'import fedalloy, pathlib; print(pathlib.Path(fedalloy.__file__).parent / "recipes")')
"$fedalloy" run "$recipes/quickstart.toml" --quick -o run
"$fedalloy" report run -o report.html
"$fedalloy" compare "$recipes/demo.toml" --quick -o demo
"$fedalloy" report demo -o demo.html
ls "$here/dist"

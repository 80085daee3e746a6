#!/bin/sh
# What the package is made of, and whether any of it has a known vulnerability. Called by `make sbom` and `make audit`,
# about the environment that `make wheel` has made. The tools have an environment of their own, .venv-tools.
set -eu
python=$1
task=$2
[ -x .venv-wheel/bin/python ] || { echo "there is no .venv-wheel: run 'make wheel' first" >&2; exit 1; }
if [ ! -x .venv-tools/bin/pip-audit ] || [ ! -x .venv-tools/bin/cyclonedx-py ]; then
  "$python" -m venv .venv-tools
  .venv-tools/bin/python -m pip install -qq --disable-pip-version-check "cyclonedx-bom==7.5.0" "pip-audit==2.10.1"
fi
mkdir -p dist
case $task in
  sbom)
    .venv-tools/bin/cyclonedx-py environment --of JSON -o dist/fedalloy.cdx.json .venv-wheel/bin/python
    .venv-tools/bin/python -c 'import json; found = json.load(open("dist/fedalloy.cdx.json")); print("dist/fedalloy.cdx.json:", found["bomFormat"], found["specVersion"], len(found["components"]), "components")'
    ;;
  audit)
    # Local labels (torch 2.13.0+cpu) are not on any index. --strict: what could not be looked up is a failure, not a pass.
    .venv-wheel/bin/python -m pip freeze --exclude fedalloy | sed 's/+[a-z0-9.]*$//' > dist/audited.txt
    .venv-tools/bin/pip-audit --strict --no-deps --disable-pip -r dist/audited.txt
    ;;
  *) echo "unknown task '$task': sbom or audit" >&2; exit 1 ;;
esac

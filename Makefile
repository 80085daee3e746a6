# Every target prepares .venv by itself; nothing but Python >= 3.11 with pip is needed. Pip's own settings apply
# (an index, a folder of wheels, a CPU-only torch).
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# Stamps: an install runs again only when what it installs has changed.
PACKAGE := $(VENV)/.installed-package
DEV := $(VENV)/.installed-dev
WORKERS ?= 2
TORCH ?=
LOWEST := tests/core tests/experiment/test_round.py tests/experiment/test_saved.py tests/experiment/records/test_toml.py tests/test_recipe.py tests/test_python_path.py tests/cli/test_help.py
PYTHON ?=
COVERED ?= tests src/fedalloy

.PHONY: help env demo test test-long test-lowest browser lint format docs readme coverage wheel dist sbom audit images bench screenshots clean

help:  ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-14s %s\n", $$1, $$2}'

env: $(DEV)  ## Create or update .venv with everything needed to work on fedalloy

demo: $(PACKAGE)  ## Compare algorithms on the embedded digits and leave demo/report.html
	@$(BIN)/fedalloy compare recipes/demo.toml -o runs/demo
	@$(BIN)/fedalloy report runs/demo -o demo/report.html

# A browser is fetched and unpacked while the types are checked. Then one thread per process: the workers share the
# cores, and small tensors gain nothing from threads.
test: $(DEV)  ## Lint, type check, then all tests and doctests in random order
	@$(MAKE) -j2 lint browser
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Each takes longer than the five minutes after which pytest shows where a test is.
test-long: $(DEV)  ## An operator's day on a federation of real processes, and what else takes minutes
	@FEDALLOY_LONG=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -o faulthandler_timeout=1800 tests/flower/test_day.py tests/engines/test_cluster_examples.py tests/engines/test_ray.py

# TORCH names the version of torch where the lowest one cannot be had.
test-lowest: | $(BIN)/python  ## Install the lowest versions that pyproject.toml declares into .venv-lowest and run the fast tests
	@$(BIN)/python -m venv --clear .venv-lowest
	@TORCH=$(TORCH) $(BIN)/python scripts/lowest.py > .venv-lowest/lowest.txt
	@.venv-lowest/bin/python -m pip install -qq --disable-pip-version-check -c .venv-lowest/lowest.txt ".[notebook]" pytest pytest-randomly hypothesis
	@OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -q -W default $(LOWEST)

browser:  ## Install Chromium for the browser tests, where that is possible
	@sh scripts/browser.sh

lint: $(DEV)  ## Check style, format and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: $(DEV)  ## Put the code into the house format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

docs: $(DEV)  ## Run every example of the documentation, check the generated pages, build site/ strictly
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) src/fedalloy tests/site
	@$(BIN)/python -m scripts.docs -j $(WORKERS)
	@$(BIN)/python -m fedalloy.cli.docs --check
	@$(BIN)/python scripts/readme.py --check
	@$(BIN)/python scripts/notebooks.py --check -j $(WORKERS)
	@$(BIN)/python -m benchmarks.evidence --check
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open site/index.html"

readme: $(DEV)  ## Run the README from top to bottom in a fresh clone of the last commit, with an empty home folder
	@$(BIN)/python -m scripts.docs --clone

# Test workers and the processes that tests start measure for themselves; their files are then put together.
coverage: $(DEV)  ## Measure which lines of the library the tests run, and write the figure into CONTRIBUTING.md
	@rm -f .coverage .coverage.*
	@OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -q -n $(WORKERS) --dist worksteal $(COVERED)
	@$(BIN)/python -m coverage combine -q
	@$(BIN)/python -m coverage report --skip-covered --sort=cover
	@$(BIN)/python scripts/covered.py $(COVERED)

wheel: $(DEV)  ## Build sdist and wheel, install them in an empty environment (.venv-wheel) and run the demo from it
	@sh scripts/dist.sh $(BIN)/python

dist: wheel

sbom: .venv-wheel  ## List what the package is made of, as CycloneDX: dist/fedalloy.cdx.json
	@sh scripts/supply_chain.sh $(BIN)/python sbom

audit: .venv-wheel  ## Look up known vulnerabilities of everything that is installed with the package; needs pypi.org
	@sh scripts/supply_chain.sh $(BIN)/python audit

.venv-wheel:
	@$(MAKE) wheel

images: wheel  ## Build the container images of server and node with buildah; BASE names another image of Debian's Python
	@sh containers/build.sh

bench: $(DEV)  ## Measure the engines
	@$(BIN)/python -m benchmarks.engines

screenshots: $(DEV) browser  ## Make the pictures of the README anew
	@$(BIN)/python scripts/screenshots.py

clean:  ## Remove caches, builds and the demo's output (.venv and other runs stay)
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build demo runs/demo
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(PACKAGE): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing fedalloy into $(VENV) (the first time takes a few minutes) ..."
	@$(PIP_INSTALL) -e .
	@touch $@

# The development install contains the package, so it serves the demo as well.
$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing fedalloy and its development tools into $(VENV) (the first time takes a few minutes) ..."
	@$(PIP_INSTALL) -e ".[dev,flower]"
	@touch $(PACKAGE) $@

# A candidate counts only if it runs and is new enough: a version manager may answer for a Python it does not have.
$(BIN)/python:
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3 python; do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  echo "Creating $(VENV) with $$("$$python" -V) ..."; \
	  exec "$$python" -m venv $(VENV); \
	done; echo "No Python >= 3.11 found: install one, or name it with 'make env PYTHON=/path/to/python'." >&2; exit 1

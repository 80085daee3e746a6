"""The rules of the house, read off the source: who imports whom, how long things are, what loads when."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
# Low to high: a place imports places of earlier rows only, and places of one row do not see each other. The longest
# name that fits a module is its place.
ORDER = (
    ("core",),
    (
        "methods.solvers",
        "methods.weightings",
        "methods.servers",
        "methods.wires",
        "tasks",
        "engines",
        "experiment.records",
    ),
    ("methods",),
    ("experiment",),
    ("results",),
    ("studies",),
    ("report", "flower", "testing"),
    ("cli",),
)
ROW = {place: row for row, places in enumerate(ORDER) for place in places}
# Rules, data and engines know nothing of each other, however they are divided.
APART = {"methods", "tasks", "engines"}
TOP = {"", "__main__", "_moved", "algorithms"}
HEAVY = ["clarabel", "flwr", "matplotlib", "pandas", "plotly", "pyarrow", "pydantic", "qpsolvers", "rich"]
HEAVY += ["ray", "scipy", "sklearn", "torch", "typer"]
MOST_LINES_PER_FILE = 399
MOST_LINES_PER_FUNCTION = 45


class Import(NamedTuple):
    """One imported name and where it is written."""

    name: str
    line: int


def imports(code: str, package: str) -> Iterator[Import]:
    """Everything a module imports anywhere: in functions and under TYPE_CHECKING, relatively or by literal name."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _from(node, package)
        elif isinstance(node, ast.Call) and _called(node) in {"import_module", "__import__"} and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield Import(name.value, node.lineno)


def _from(node: ast.ImportFrom, package: str) -> Iterator[Import]:
    """``from a import b`` may name the module a.b or something inside a: the longer name tells rooms apart."""
    base = package.split(".")
    origin = ".".join(base[: len(base) - node.level + 1]) if node.level else ""
    module = ".".join(part for part in (origin, node.module) if part)
    yield from (Import(f"{module}.{alias.name}", node.lineno) for alias in node.names)


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def place_of(module: str) -> str:
    """The place of a module of fedalloy: '' for the top package, which loads names from anywhere on first use.

    A name that is no module there (``fedalloy.fit``) belongs to the top package as well.
    """
    names = module.split(".")[1:]
    if not names or names[0] in TOP or not (SOURCE / "fedalloy" / names[0]).exists():
        return ""
    return next(place for end in range(len(names), 0, -1) if (place := ".".join(names[:end])) in ROW)


def fault(module: str, imported: str) -> str | None:
    """Why ``module`` may not import ``imported``; None when it may."""
    top, here = imported.split(".")[0], place_of(module)
    if top != "fedalloy":
        return _third_party_fault(module, here, top)
    there = place_of(imported)
    if there == here or here in ("", "cli"):
        return None
    if not there:  # those below the top package would import it while it imports them
        return None if ROW[here] >= ROW["report"] else "the top package is for users: import from where the name lives"
    if ROW[there] >= ROW[here]:
        return f"{here} stands below {there} or beside it"
    if {here.split(".")[0], there.split(".")[0]} <= APART and here.split(".")[0] != there.split(".")[0]:
        return f"{here} and {there} do not see each other"
    return None


def _third_party_fault(module: str, here: str, top: str) -> str | None:
    if here == "core" and top != "torch" and top not in sys.stdlib_module_names:
        return "core imports torch and the standard library only"
    if top == "flwr" and here != "flower":
        return "only flower/ imports flwr"
    if top == "ray" and not module.startswith(("fedalloy.engines.ray", "fedalloy.engines.cluster")):
        return "only engines/ray.py and engines/cluster/ import ray"
    return None


def faults(file: Path, code: str) -> list[str]:
    """All forbidden imports of one file of src."""
    parts = file.relative_to(SOURCE).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    package = module if is_package else module.rpartition(".")[0]
    found = ((imported, fault(module, imported.name)) for imported in imports(code, package))
    return [f"{file.name}:{imported.line} {imported.name}: {why}" for imported, why in found if why]


# Where a module's name is computed: our own modules by the registry and the lazy names of the top package alone.
COMPUTED_NAMES = {
    "core/registry.py": "the modules of a kind of rule, and what is not ours",
    "__init__.py": "public names, loaded on first use",
    "_moved.py": "old names of modules",
}


def computed_names(code: str) -> list[int]:
    """Lines that import a module whose name is not written there."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    asked = [node for node in calls if _called(node) in {"import_module", "__import__"} and node.args]
    return [node.lineno for node in asked if not isinstance(node.args[0], ast.Constant)]


def test_names_of_modules_are_computed_in_few_places():
    found = {str(file.relative_to(SOURCE / "fedalloy")) for file in sources() if computed_names(file.read_text())}
    assert found == set(COMPUTED_NAMES)


@pytest.mark.parametrize(("name", "lines"), [("f'fedalloy.{x}'", [2]), ("NAME", [2]), ("'fedalloy.core'", [])])
def test_a_computed_name_is_caught(name, lines):
    assert computed_names(f"from importlib import import_module\nimport_module({name})") == lines


def sources() -> list[Path]:
    return sorted((SOURCE / "fedalloy").rglob("*.py"))


def test_no_module_imports_what_it_may_not():
    assert sources()
    wrong = [message for file in sources() for message in faults(file, file.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("core/tree.py", "import numpy"),
        ("core/tree.py", "from fedalloy.tasks import models"),
        ("core/tree.py", "from fedalloy import fit"),
        ("core/tree.py", "def late():\n    import scipy.sparse"),
        ("methods/weightings/samples.py", "from fedalloy.methods.solvers.sgd import Sgd"),
        ("methods/weightings/samples.py", "from fedalloy.methods import published"),
        ("methods/weightings/samples.py", "import fedalloy"),
        ("methods/weightings/samples.py", "from fedalloy import algorithms"),
        ("methods/weightings/samples.py", "from ..servers import sgd"),
        ("methods/weightings/__init__.py", "from ..servers import sgd"),
        ("methods/published.py", "from fedalloy.tasks import models"),
        ("methods/published.py", "from fedalloy.studies.unfolding import algorithms"),
        ("engines/loop.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fedalloy.tasks import Task"),
        ("engines/loop.py", "import importlib\nimportlib.import_module('fedalloy.tasks.models')"),
        ("engines/loop.py", "import flwr"),
        ("engines/workers.py", "def late():\n    import ray"),
        ("experiment/fit.py", "from ray.exceptions import RayError"),
        ("experiment/fit.py", "from flwr.common import Context"),
        ("experiment/fit.py", "from fedalloy.cli import main"),
        ("experiment/fit.py", "from fedalloy.results.outcome import read_outcome"),
        ("experiment/records/store.py", "from fedalloy.experiment import fit"),
        ("experiment/records/store.py", "from fedalloy.tasks import models"),
        ("results/outcome.py", "from fedalloy.studies.compare import jobs"),
        ("results/outcome.py", "from fedalloy import read_run"),
        ("report/page.py", "from fedalloy.testing import check_rule"),
        ("flower/engine.py", "from fedalloy.report import page"),
    ],
)
def test_a_planted_import_is_caught(file, code):
    assert len(faults(SOURCE / "fedalloy" / file, code)) == 1


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("core/tree.py", "import math\nimport torch.nn\nfrom torch import Tensor\nfrom fedalloy.core.keys import Key"),
        ("core/types.py", "from . import tree"),
        (
            "methods/weightings/samples.py",
            "import numpy\nfrom fedalloy.core import tree\nfrom fedalloy.methods.weightings import nova",
        ),
        ("methods/published.py", "from fedalloy.methods.solvers.sgd import Sgd"),
        ("engines/cluster/pool.py", "import ray\nfrom ray.exceptions import RayError"),
        ("flower/app.py", "from flwr.server import ServerApp\nfrom fedalloy.engines import loop"),
        ("results/outcome.py", "from fedalloy.experiment.records.reading import read_run"),
        ("results/outcome.py", "from fedalloy.tasks.metrics import summary"),
        ("report/page.py", "from fedalloy.results.summaries import gather"),
        ("experiment/fit.py", "from fedalloy.engines import loop\nfrom fedalloy.experiment.recipe import Recipe"),
        ("cli/__init__.py", "from fedalloy import fit\nimport rich\nfrom fedalloy.report import page"),
    ],
)
def test_an_allowed_import_passes(file, code):
    assert faults(SOURCE / "fedalloy" / file, code) == []


def test_importing_fedalloy_is_light():
    program = f"import sys, json, fedalloy; print(json.dumps(sorted(set({HEAVY!r}) & set(sys.modules))))"
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [], "the top package must import these on first use, not when it is imported"


def test_files_are_short_and_named_after_what_they_hold():
    for file in sources():
        lines = len(file.read_text().splitlines())
        assert lines <= MOST_LINES_PER_FILE, f"{file.relative_to(ROOT)} has {lines} lines: split it by idea"
        assert file.stem not in {"utils", "util", "helpers", "misc"}, f"{file.name}: a helper lives with its noun"


def long_functions(code: str) -> list[str]:
    """Functions longer than allowed, with their lengths (decorators not counted)."""
    functions = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    lengths = ((node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions)
    return [f"{name} has {length} lines" for name, length in lengths if length > MOST_LINES_PER_FUNCTION]


def test_functions_are_short():
    wrong = [f"{file.name}: {message}" for file in sources() for message in long_functions(file.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("body", "caught"), [(MOST_LINES_PER_FUNCTION - 1, 0), (MOST_LINES_PER_FUNCTION, 1)])
def test_a_long_function_is_caught(body, caught):
    assert len(long_functions("def f():\n" + "    x = 1\n" * body)) == caught


def blocks(text: str) -> dict[str, str]:
    """The Python blocks of a page that begin by naming their file."""
    return {m[1]: m[0] for m in re.finditer(r"(?<=```python\n)# (\S+\.py)\n.*?(?=```)", text, re.DOTALL)}


def test_the_example_of_the_contributors_guide_runs(tmp_path):
    """A reader who copies the two files gets a registered rule and a passing test."""
    for name, code in blocks((ROOT / "CONTRIBUTING.md").read_text()).items():
        (tmp_path / Path(name).name).write_text(code)
    # The subprocess stands in for a checkout: the new file is found in the room without being put into src.
    widen = f"import fedalloy.methods.weightings as room\nroom.__path__.append({str(tmp_path)!r})\n"
    (tmp_path / "conftest.py").write_text(widen)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

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
ROOMS = {"solvers", "weightings", "servers", "wire", "tasks", "engines", "records"}
# What readers of finished runs build on; nobody below them may look at results.
RESULTS_READ = {"core", "records", "tasks"}
BELOW_RESULTS = {"algorithms", "recipe", "run", "synthetic", "unfolding"}
# Whatever is neither core, nor a room, nor one of these builds on the rooms (algorithms, run, report, flower, ...).
EDGE = {"cli", "docs", "__main__"}
HEAVY = ["clarabel", "flwr", "matplotlib", "pandas", "plotly", "pyarrow", "pydantic", "qpsolvers", "rich"]
HEAVY += ["scipy", "sklearn", "torch", "typer"]
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


def room_of(name: str) -> str:
    """The room an imported name comes from: the first name below fedalloy.

    A name that is no module there (``fedalloy.fit``) belongs to the top package, '', which loads it from anywhere.
    """
    first = name.split(".")[1] if "." in name else ""
    known = (SOURCE / "fedalloy" / first).is_dir() or (SOURCE / "fedalloy" / f"{first}.py").is_file()
    return first if known or first in ROOMS | EDGE | {"core"} else ""


def fault(module: str, imported: str) -> str | None:
    """Why ``module`` may not import ``imported``; None when it may."""
    top, here = imported.split(".")[0], ".".join(module.split(".")[1:2])
    if top != "fedalloy":
        return _third_party_fault(module, here, top)
    there = room_of(imported)
    if there == here or here in EDGE:
        return None
    if there in EDGE:
        return f"only the command line imports {there}"
    if here == "core":
        return "core imports nothing else of fedalloy"
    if here in ROOMS and there != "core":
        return f"{here} may import core and itself, not {there or 'the top package'}"
    if here == "results" and there not in RESULTS_READ:
        return f"results stand on records and metrics, not on {there or 'the top package'}"
    if there == "results" and here in BELOW_RESULTS:
        return f"{here} stands below results"
    return None


def _third_party_fault(module: str, here: str, top: str) -> str | None:
    if here == "core" and top != "torch" and top not in sys.stdlib_module_names:
        return "core imports torch and the standard library only"
    if top == "flwr" and here != "flower":
        return "only flower/ imports flwr"
    return None


def faults(file: Path, code: str) -> list[str]:
    """All forbidden imports of one file of src."""
    parts = file.relative_to(SOURCE).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    package = module if is_package else module.rpartition(".")[0]
    found = ((imported, fault(module, imported.name)) for imported in imports(code, package))
    return [f"{file.name}:{imported.line} {imported.name}: {why}" for imported, why in found if why]


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
        ("weightings/samples.py", "from fedalloy.methods.solvers.sgd import Sgd"),
        ("weightings/samples.py", "from fedalloy import solvers"),
        ("weightings/samples.py", "import fedalloy"),
        ("weightings/samples.py", "from ..servers import sgd"),
        ("weightings/__init__.py", "from ..servers import sgd"),
        ("engines/loop.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fedalloy.tasks import Task"),
        ("engines/loop.py", "import importlib\nimportlib.import_module('fedalloy.tasks.models')"),
        ("engines/loop.py", "import flwr"),
        ("engines/flower.py", "import flwr"),
        ("run.py", "from flwr.common import Context"),
        ("run.py", "from fedalloy.cli import main"),
        ("records/store.py", "from fedalloy.experiment import fit"),
        ("results/outcome.py", "from fedalloy.studies.compare import jobs"),
        ("results/outcome.py", "from fedalloy.experiment.recipe import Recipe"),
        ("run/fit.py", "from fedalloy.results.outcome import read_outcome"),
    ],
)
def test_a_planted_import_is_caught(file, code):
    assert len(faults(SOURCE / "fedalloy" / file, code)) == 1


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("core/tree.py", "import math\nimport torch.nn\nfrom torch import Tensor\nfrom fedalloy.core.keys import Key"),
        ("core/types.py", "from . import tree"),
        ("weightings/samples.py", "import numpy\nfrom fedalloy.core import tree\nfrom fedalloy.weightings import nova"),
        ("flower/app.py", "from flwr.server import ServerApp\nfrom fedalloy.engines import loop"),
        (
            "results/outcome.py",
            "from fedalloy.experiment.records.reading import read_run\nfrom fedalloy.tasks.metrics import summary",
        ),
        ("report/page.py", "from fedalloy.results.stories import gather"),
        ("run.py", "from fedalloy.engines import loop\nfrom fedalloy.recipe import Recipe"),
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

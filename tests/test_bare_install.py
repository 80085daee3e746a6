"""What a small install can do, and what the wheel carries."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BARE = {"torch", "numpy", "safetensors", "filelock"}
"""All that ``fedalloy.fit`` may need."""
HIDDEN = {"clarabel", "pydantic", "qpsolvers", "rich", "sklearn", "scipy", "typer"}
HIDDEN |= {"alembic", "pandas", "pyarrow", "flwr", "h11", "jinja2", "matplotlib", "mlflow"}
HIDDEN |= {"sqlalchemy", "tensorboard", "wandb", "datasets", "flwr_datasets", "PIL", "polars"}
IMPORT_NAMES = {"scikit-learn": "sklearn", "mlflow-skinny": "mlflow", "flwr-datasets": "flwr_datasets", "pillow": "PIL"}

# Hides packages as if they were not installed: an import fails, and asking whether there is such a module says no.
HIDE = f"""
import sys
HIDDEN = {sorted(HIDDEN)!r}
class Without:
    def __init__(self, finder): self.finder = finder
    def __getattr__(self, name): return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def bare(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program with torch, numpy and safetensors alone."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, "-c", HIDE + program], env=env, capture_output=True, text=True, check=False, timeout=120
    )


def import_names(requirements: list[str]) -> set[str]:
    names = (re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in requirements)
    return {IMPORT_NAMES.get(name, name) for name in names}


def test_every_declared_dependency_is_known_to_be_bare_or_hidden():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (project["optional-dependencies"][extra] for extra in ("flower", "data", "notebook", "report", "track"))
    declared = import_names(project["dependencies"]).union(*map(import_names, extras))
    assert declared <= BARE | HIDDEN, "a new dependency: hide it here, so that fit is known to run without it"


@pytest.mark.parametrize("name", ["scipy", "sklearn", "pydantic"])
def test_a_hidden_package_is_really_gone(name):
    done = bare(f"import importlib.util\nassert importlib.util.find_spec({name!r}) is None\nimport {name}")
    assert f"No module named '{name}'" in done.stderr


def test_core_needs_torch_alone():
    # numpy stays: torch itself loads it where it is installed.
    assert bare("import fedalloy.core.algorithm, fedalloy.core.registry").returncode == 0


# The task is made by hand, so that no dataset loader is involved.
FIT = """
import tempfile
import torch
from torch import nn
import fedalloy
from fedalloy.algorithms import fedavg
from fedalloy.core.protocols import Task
from fedalloy.core.types import Block
from fedalloy.tasks.objective import ModuleObjective

class Tiny(Task):
    population = 4
    objective = ModuleObjective(lambda: nn.Linear(3, 2))
    def data(self, part, ids):
        x = torch.linspace(-1, 1, 8 * 4 * 3).reshape(32, 3)
        return Block(x, (x.sum(1) > 0).long(), ids * 8, torch.full_like(ids, 8))

def fit(rounds, lr=0.5, **named):
    return fedalloy.fit(fedavg(lr=lr, batch_size=4), Tiny(), rounds=rounds, cohort=3, seed=1, **named)

plain = fit(4)
with tempfile.TemporaryDirectory() as place:
    fit(2, folder=place + "/run")
    further = fit(4, folder=place + "/run", resume=True)
    assert all(torch.equal(leaf, plain.model[name]) for name, leaf in further.model.items())
    assert len(list(further.rounds())) == 4
    try:
        fit(4, lr=0.25, folder=place + "/run", resume=True)
    except fedalloy.core.errors.FedalloyError as error:
        assert "lr" in str(error), error
    else:
        raise AssertionError("another experiment was continued")
print("fitted without", [name for name in HIDDEN if name in sys.modules])
"""


def test_fit_needs_torch_numpy_and_safetensors_alone():
    done = bare(FIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "fitted without []"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in the wheel that this checkout builds."""
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        ".",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        return archive.namelist()


def test_the_wheel_carries_the_package_with_its_data(wheel):
    package = ROOT / "src" / "fedalloy"
    files = (file for file in package.rglob("*") if file.is_file() and file.suffix != ".pyc")
    expected = {file.relative_to(package.parent).as_posix() for file in files}
    assert "fedalloy/py.typed" in expected
    assert expected <= set(wheel), "an ignore rule of git also keeps files out of the wheel"


def test_the_wheel_carries_the_recipes(wheel):
    recipes = {f"fedalloy/{file.relative_to(ROOT).as_posix()}" for file in (ROOT / "recipes").rglob("*.toml")}
    assert "fedalloy/recipes/claims/s3-synthetic.toml" in recipes
    assert recipes <= set(wheel)


def test_the_wheel_carries_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel}
    assert tops - {"fedalloy"} == {top for top in tops if re.fullmatch(r"fedalloy-[\w.]+\.dist-info", top)}
    assert not [name for name in wheel if re.search(r"(^|/)(tests?|conftest)(/|\.py$|_)", name)]
    assert [name for name in wheel if name.endswith("/licenses/LICENSE")]

"""The Flower app in ``examples/``: every line of its README, and Flower's own simulation by the real ``flwr``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from typer.testing import CliRunner

from fedalloy.cli.app import app as fedalloy
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.programs import TOKEN, Program, carrying, end_all, free_port, wait_until
from tests.flower.grids import Grid
from tests.flower.sites import EXAMPLE, LIMIT, switched

pytestmark = pytest.mark.flower
OLD = 'strategy = Strategy("aaggff_s", metrics={"train_loss": "loss_before"})'
LINES = [
    line.split("  #")[0].strip()
    for line in (EXAMPLE / "README.md").read_text().splitlines()
    if line.startswith("    strategy = ")
]
CLIENTS = 3


def rewritten(place: Path, line: str) -> Path:
    """The example with another strategy."""
    app = switched(place)
    file = app / "quickstart" / "server_app.py"
    text = file.read_text().replace("import numpy as np\n", "import fedalloy\nimport numpy as np\n")
    assert text.count(OLD) == 1
    file.write_text(text.replace(OLD, line))
    return app


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports the modules of an app, which are forgotten afterwards."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)

    def load(app: Path) -> tuple[ModuleType, ModuleType]:
        monkeypatch.syspath_prepend(str(app))
        return import_module("quickstart.server_app"), import_module("quickstart.client_app")

    yield load
    for name in [name for name in sys.modules if name.split(".")[0] == "quickstart"]:
        del sys.modules[name]


def play(halves: tuple[ModuleType, ModuleType], output: Path, rounds: int) -> dict[str, np.ndarray]:
    """Run an app in this process; the model at its end."""
    server, client = halves
    settings: dict[str, str | int | float | bool] = {
        "num-server-rounds": rounds,
        "local-epochs": 1,
        "learning-rate": 0.2,
        "output": str(output),
    }

    def node(partition: int) -> Any:
        context = Context(1, partition, {"partition-id": partition}, RecordDict(), settings)

        def answer(message: Message) -> RecordDict:
            return client.app(message, context).content

        return answer

    # Numbers that are not in the order of the names: clients are counted by name.
    grid = Grid({90 - number: node(number) for number in range(CLIENTS)}, {90 - n: f"site-{n}" for n in range(CLIENTS)})
    server.main(grid, Context(1, 1, {}, RecordDict(), settings))
    return dict(np.load(output))


@pytest.mark.parametrize("line", LINES)
def test_every_line_of_the_readme_runs(line, tmp_path, imported):
    used = line.replace("runs/fedadp", str(tmp_path / "run"))
    found = play(imported(rewritten(tmp_path / "app", used)), tmp_path / "model.npz", rounds=2)
    assert all(np.isfinite(leaf).all() and np.abs(leaf).max() > 0 for leaf in found.values())


def test_the_readme_has_all_kinds_of_rules():
    named = " ".join(LINES)
    assert len(LINES) > 10
    for name in ("fedavg", "fedadp", "fedlayerwise", "aaggff_d", "fedfa", "median", "trimmed_mean", "krum"):
        assert f'"{name}"' in named


def check_records(folder: Path, rounds: int, names: list[str] | None) -> list[dict[str, Any]]:
    """The records are those of any run: weights, the clients' metrics, scores with a direction, names, a report."""
    record = read_run(folder)
    rows = list(record.rounds())
    assert [row["round"] for row in rows] == list(range(1, rounds + 1))
    for row in rows:
        assert sum(row["weights"]) == pytest.approx(1.0)
        assert row["train_loss"] == pytest.approx(np.mean(row["metrics"]["train_loss"]))
        assert {"worst_served", "best_served"} <= row["evaluation"]["accuracy"].keys()
    assert [row["num-examples"] for row in [rows[0]["metrics"]]] == [[192, 96, 64]], "client k has partition k"
    assert (record.manifest or {}).get("names") == names
    assert len(list(record.timings())) == rounds
    assert "fedadp" in repr(record)
    page = folder.parent / "report.html"
    told = CliRunner().invoke(fedalloy, ["report", str(folder), "-o", str(page)])
    assert told.exit_code == 0, told.output
    assert all(name in page.read_text() for name in ("fedadp", *(names or ())))
    return rows


def line_with_folder(folder: Path) -> str:
    (line,) = [line for line in LINES if "folder=" in line]
    return line.replace("runs/fedadp", str(folder))


def test_what_clients_send_is_recorded_as_in_any_run(tmp_path, imported):
    app = rewritten(tmp_path / "app", line_with_folder(tmp_path / "run"))
    play(imported(app), tmp_path / "model.npz", rounds=2)
    check_records(tmp_path / "run", 2, ["site-0", "site-1", "site-2"])


@pytest.mark.skipif(find_spec("ray") is None, reason="needs pip install 'flwr[simulation]'")
def test_flwr_run_simulates_the_app_and_continues_it(programs_find_us, tmp_path, imported):
    """The real commands: a run of one round, and the same again for two. Simulated nodes are always new."""
    app = rewritten(tmp_path / "app", line_with_folder(tmp_path / "simulated" / "run"))
    port, mark = free_port(), f"simulation-{tmp_path.name}"
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    quiet["RAY_ADDRESS"] = "local"  # else Ray looks for the cluster that was noted last, for hours if that was killed
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **quiet, "FLWR_HOME": str(home), "PATH": programs, TOKEN: mark}
    command = [f"{Path(sys.executable).parent}/flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1"]
    command += ["--disable-runtime-dependency-installation", "--port", str(port)]
    link = Program.start("the SuperLink", command, environment, tmp_path / "log", tmp_path)
    try:
        wait_until(lambda: "Uvicorn running" in (tmp_path / "log").read_text(), "it listened", LIMIT, [link])
        for rounds in (1, 2):
            submit(app, {"num-server-rounds": rounds, "output": str(tmp_path / "model.npz")}, environment)
    finally:
        link.stop()
        end_all(mark)
    assert not list(carrying(mark)), "nothing is left"
    rows = check_records(tmp_path / "simulated" / "run", 2, None)
    other = rewritten(tmp_path / "here", line_with_folder(tmp_path / "here-run"))
    play(imported(other), tmp_path / "here.npz", rounds=2)
    for row, wanted in zip(rows, read_run(tmp_path / "here-run").rounds(), strict=True):
        assert row["weights"] == pytest.approx(wanted["weights"], rel=1e-6)
    for name, leaf in np.load(tmp_path / "here.npz").items():
        np.testing.assert_allclose(np.load(tmp_path / "model.npz")[name], leaf, rtol=1e-5, atol=1e-7)


def submit(app: Path, config: dict[str, Any], environment: dict[str, str]) -> None:
    """``flwr run`` until the run has ended."""
    told = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
    command = [f"{Path(sys.executable).parent}/flwr", "run", str(app), "here", "--stream", "--run-config", told]
    command += ["--federation-config", f"num-supernodes={CLIENTS}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr

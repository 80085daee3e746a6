"""What a server costs by the number of its nodes and the size of the model.

    PYTHONPATH=src python -m benchmarks.flower_nodes [--cells 10x1 25x1 50x1 10x50 25x50] [--rounds 3] [-o FILE]

A cell is nodes x megabytes. The server is the real one, encrypted and with its front; nodes have no torch and answer
with a fixed update (``benchmarks.echo_nodes``), all in one process, so that only the server is measured: the processor
time and the memory of its processes, per round, without the first round. Seconds per round depend on what else runs on
the machine, and include what the nodes need.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.accounting import Accountant
from fedalloy.experiment.recipe import Recipe, parse
from fedalloy.experiment.records.reading import is_run, read_run
from fedalloy.experiment.records.scalars import seconds_of
from fedalloy.flower.database import entries
from fedalloy.flower.local import LocalFederation
from fedalloy.flower.programs import TOKEN, wait_until
from fedalloy.flower.project_templates import FederationPlan, numbered, write_federation
from fedalloy.flower.submission import Study

LIMIT, FEATURES, CLASSES = 3600.0, 64, 10
CELLS = ("10x1", "25x1", "50x1", "10x50", "25x50")


@dataclass(frozen=True)
class Cell:
    """One row of the table: figures of a round, memory in megabytes."""

    nodes: int
    megabytes: float
    seconds: float
    app: float
    link: float
    front: float
    memory: float

    @property
    def row(self) -> str:
        """The row as Markdown; the last column should not grow with the number of nodes."""
        spent = self.app + self.link + self.front
        each = f"{1000 * spent / self.nodes:.0f} ms, {1000 * spent / self.nodes / self.megabytes:.0f} ms/MB"
        return (
            f"| {self.nodes} | {self.megabytes:g} MB | {self.seconds:.1f} s | {self.app:.2f} s | {self.link:.2f} s "
            f"| {self.front:.2f} s | {self.memory:.0f} MB | {each} |"
        )


HEAD = (
    "| nodes | model | round | app, CPU | SuperLink, CPU | front, CPU | memory | CPU by node and round |\n"
    "|---|---|---|---|---|---|---|---|"
)


def recipe(nodes: int, megabytes: float, rounds: int) -> Recipe:
    """A perceptron of that size, and nodes that declare their data."""
    hidden = round(megabytes * 1e6 / 4 / (FEATURES + CLASSES + 1))
    return parse(
        {
            "task": {
                "dataset": {"kind": "nodes", "shape": [FEATURES], "classes": CLASSES},
                "model": {"kind": "mlp", "hidden": [hidden]},
            },
            "partition": {"clients": nodes},
            "algorithm": {"name": "fedavg"},
            "run": {"rounds": rounds},
            "evaluate": {"every": 1000, "clients": 1},
            "engine": {"kind": "flower", "minimum": nodes, "deadline": LIMIT},
        }
    )


def measure(nodes: int, megabytes: float, rounds: int, place: Path) -> Cell:
    """A federation of its own, a run, and what it cost from the end of its first round on."""
    write_federation(place / "fed", FederationPlan(numbered(nodes)))
    federation = LocalFederation.of(place / "fed", startup=600.0)
    echoes = None
    try:
        federation.start_server()
        echoes = _echoes(federation)
        wait_until(lambda: _online(federation) == nodes, "all nodes were online", LIMIT, poll=1.0)
        run = Study(federation.cli, recipe(nodes, megabytes, rounds + 1), place / "run").start()
        wait_until(lambda: _round(place / "run") >= 1, "the first round ended", LIMIT, poll=0.5)
        tokens = {name: f"{federation._token}.{name}" for name in ("server", "front")}
        with Accountant(tokens) as spent:
            wait_until(lambda: _round(place / "run") > rounds, "the last round ended", LIMIT, poll=0.5)
        run.stop()
    finally:
        if echoes is not None:
            echoes.kill()
            echoes.wait()
        federation.stop()
    times = [seconds_of(row) for row in read_run(place / "run").timings()][1:]
    by_program = {program: one.seconds / rounds for (_, program), one in spent.programs.items()}
    link, front = by_program.pop("flower-superlink"), by_program.pop("front")
    memory = sum(one.memory for one in spent.usage.values()) / 1e6
    return Cell(nodes, megabytes, statistics.median(times), sum(by_program.values()), link, front, memory)


def _echoes(federation: LocalFederation) -> subprocess.Popen[bytes]:
    keys = [str(place.key) for place in federation.nodes.values()]
    authority = federation.server.files.ca_certificate
    command = [sys.executable, "-m", "benchmarks.echo_nodes", federation.server.door, str(authority), *keys]
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", TOKEN: "echo"}
    log = (federation.logs / "echoes.log").open("wb")
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=root)


def _online(federation: LocalFederation) -> int:
    return sum(one.status == "online" for one in entries(federation.server))


def _round(folder: Path) -> int:
    return read_run(folder).last_round if is_run(folder) else 0


def main() -> None:
    """Measure the cells, one after another."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cells", nargs="+", default=list(CELLS), help="nodes x megabytes")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # nothing is left behind
    lines = [HEAD]
    print(HEAD, flush=True)
    for cell in chosen.cells:
        nodes, megabytes = cell.split("x")
        with tempfile.TemporaryDirectory(prefix="nodes-", ignore_cleanup_errors=True) as place:
            lines.append(measure(int(nodes), float(megabytes), chosen.rounds, Path(place)).row)
        print(lines[-1], flush=True)
    if chosen.output:
        chosen.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""What a round costs on real nodes: seconds, processor time and memory, by program.

    PYTHONPATH=src python -m benchmarks.flower_large [--nodes 3] [--parameters 50e6] [--rounds 3]
        [--contributions-mb 4000] [--json]

A server with its front and real nodes on one machine, encrypted, each with torch and one gradient step a round (digits,
a perceptron of four layers, one batch). Figures are without the first round, which also sends the app and loads torch.
Memory is the largest sum of the processes of a node, or of the server, at any moment (looked at five times a second),
pages that processes share counted in parts; ``above idle`` is without what they held before the run. The aims are, for
the payload of one model: three times of it at a node, nodes + 2 times of it at the server.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.accounting import Accountant
from fedalloy.experiment.recipe import Recipe, parse
from fedalloy.experiment.records.reading import is_run, read_run
from fedalloy.experiment.records.scalars import seconds_of
from fedalloy.flower.local import LocalFederation
from fedalloy.flower.programs import wait_until
from fedalloy.flower.project_templates import FederationPlan, numbered, write_federation
from fedalloy.flower.submission import Study

LIMIT, LAYERS = 3600.0, 4


def recipe(nodes: int, parameters: float, rounds: int, contributions_mb: float = 4000.0) -> Recipe:
    """A perceptron of that size on digits, and one step a client and round. Its layers are square, so that activations
    are small beside it."""
    hidden = [max(1, round((parameters / (LAYERS - 1)) ** 0.5))] * LAYERS
    return parse(
        {
            "task": {"dataset": "digits", "model": {"kind": "mlp", "hidden": hidden}, "test_fraction": 0.9},
            "partition": {"kind": "iid", "clients": nodes},
            "algorithm": {"name": "fedavg", "lr": 0.01, "batch_size": 64, "epochs": 1},
            "run": {"rounds": rounds},
            "evaluate": {"every": 10_000, "clients": 1},
            "engine": {"kind": "flower", "minimum": nodes, "deadline": LIMIT, "contributions_mb": contributions_mb},
        }
    )


def measure(chosen: Recipe, megabytes: float, place: Path) -> dict[str, Any]:
    """A run on a federation of its own, from the end of its first round on."""
    nodes, rounds = chosen.partition.clients or 0, chosen.run.rounds - 1
    write_federation(place / "fed", FederationPlan(numbered(nodes)))
    with LocalFederation.of(place / "fed", startup=600.0) as federation:
        names = ("server", "front", *federation.nodes)
        tokens = {name: f"{federation._token}.{name}" for name in names}
        with Accountant(tokens, every=0.2) as before:
            pass
        run = Study(federation.cli, chosen, place / "run").start()
        wait_until(lambda: _round(place / "run") >= 1, "the first round ended", LIMIT, poll=0.5)
        with Accountant(tokens, every=0.2) as spent:
            wait_until(lambda: _round(place / "run") > rounds, "the last round ended", LIMIT, poll=0.5)
        run.stop()
    times = [seconds_of(row) for row in read_run(place / "run").timings()][1:]
    return {
        "nodes": nodes,
        "megabytes": megabytes,
        "seconds": times,
        "median": statistics.median(times),
        "server": _memory(spent, before, ("server", "front")),
        "node": [_memory(spent, before, (name,)) for name in federation.nodes],
        "programs": _programs(spent, rounds),
    }


def _memory(spent: Accountant, before: Accountant, names: tuple[str, ...]) -> dict[str, float]:
    """The largest memory of some programs, and how much that is above the memory before the run, in megabytes."""
    most, idle = (sum(one.usage[name].memory for name in names) / 1e6 for one in (spent, before))
    return {"megabytes": round(most), "above_idle": round(most - idle)}


def _programs(spent: Accountant, rounds: int) -> dict[str, dict[str, float]]:
    """Processor seconds of a round, and the largest memory, of every program; those of all nodes together."""
    found: dict[str, dict[str, float]] = {}
    for (name, program), one in spent.programs.items():
        side = "server" if name in ("server", "front") else "node"
        row = found.setdefault(f"{side} {program}", {"seconds": 0.0, "megabytes": 0.0})
        row["seconds"] = round(row["seconds"] + one.seconds / rounds, 2)
        row["megabytes"] = max(row["megabytes"], round(one.memory / 1e6))
    return found


def _round(folder: Path) -> int:
    return read_run(folder).last_round if is_run(folder) else 0


def lines(found: dict[str, Any]) -> list[str]:
    """The figures in words."""
    size, nodes = found["megabytes"], found["node"]
    shown = [f"{found['nodes']} nodes, {size:g} MB a model: {found['median']:.1f} s a round (median of "
             f"{', '.join(f'{one:.1f}' for one in found['seconds'])})"]  # fmt: skip
    for name, one in (("server", found["server"]), ("largest node", max(nodes, key=lambda one: one["megabytes"]))):
        shown.append(
            f"{name}: {one['megabytes']} MB = {one['megabytes'] / size:.1f} x the model; above idle "
            f"{one['above_idle']} MB = {one['above_idle'] / size:.1f} x"
        )
    for program, row in sorted(found["programs"].items()):
        shown.append(f"  {program:26} {row['seconds']:7.2f} s CPU a round, at most {row['megabytes']} MB in one")
    return shown


def main() -> None:
    """Measure one federation."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--nodes", type=int, default=3)
    options.add_argument("--parameters", type=float, default=50e6)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--contributions-mb", type=float, default=4000.0, help="as in [engine]: more of it is on disk")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    study = recipe(chosen.nodes, chosen.parameters, chosen.rounds + 1, chosen.contributions_mb)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # nothing is left behind
    with tempfile.TemporaryDirectory(prefix="large-", ignore_cleanup_errors=True) as place:
        found = measure(study, chosen.parameters * 4 / 1e6, Path(place))
    print(json.dumps(found) if chosen.json else "\n".join(lines(found)), flush=True)


if __name__ == "__main__":
    main()

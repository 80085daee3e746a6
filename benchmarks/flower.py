"""Seconds per round over loopback, a model of about 1 MB and three nodes, beside Flower's own FedAvg on the same nodes.

    PYTHONPATH=src python -m benchmarks.flower [--rounds 4] [--repeats 3] [--folder PATH] [--json]

Three ways to train the same perceptron (64-3495-10, 262 135 parameters) on the same digits, in turns, on one
federation with TLS and node authentication:

* ``flower``: Flower's ``FedAvg`` with its own ClientApp (``benchmarks/flower_app``);
* ``strategy``: ``fedalloy.flower.Strategy("fedavg")`` with that same ClientApp;
* ``engine``: a fedalloy recipe, that is fedalloy's own ServerApp and ClientApp.

A round is the time from the messages to the nodes until the new model; there is no evaluation. The first round of every
run, which also sends the app to the nodes, is left out. Each ClientApp is a process that Flower starts for one message:
loading torch is most of a round, so results on a busy machine are not meaningful. The requirement: no way is slower
than Flower's own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from fedalloy.experiment.recipe import parse
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.flwr_cli import SubmittedRun
from fedalloy.flower.local import LocalFederation
from fedalloy.flower.project_templates import FederationPlan, numbered, write_federation
from fedalloy.flower.submission import Study

NODES, HIDDEN, LIMIT = 3, 3495, 3600.0
APP = Path(__file__).with_name("flower_app")
WAYS = ("flower", "strategy", "engine")


def seconds_of_app(federation: LocalFederation, strategy: str, rounds: int, place: Path) -> list[float]:
    output = place / "seconds.json"
    config: dict[str, str | int] = {"strategy": strategy, "rounds": rounds, "hidden": HIDDEN, "output": str(output)}
    finish(federation.run(APP, config))
    found: list[float] = json.loads(output.read_text())
    return found


def seconds_of_engine(federation: LocalFederation, rounds: int, place: Path) -> list[float]:
    recipe = parse(
        {
            "task": {"dataset": "digits", "model": {"kind": "mlp", "hidden": [HIDDEN]}, "test_fraction": 0.05},
            "partition": {"kind": "iid", "clients": NODES},
            "algorithm": {"name": "fedavg", "lr": 0.1, "batch_size": 64, "epochs": 1},
            "run": {"rounds": rounds},
            "evaluate": {"every": rounds},
        }
    )
    finish(Study(federation.cli, recipe, place).start())
    phases = ("plan", "clients", "server", "store")
    return [sum(float(row.get(phase, 0.0)) for phase in phases) for row in read_run(place).timings()]


def finish(run: SubmittedRun) -> None:
    ended = run.wait(LIMIT)
    if ended != "finished:completed":
        raise SystemExit(f"{ended}\n{run.log()}")


def measure(place: Path, rounds: int, repeats: int) -> dict[str, list[float]]:
    write_federation(place / "fed", FederationPlan(numbered(NODES)))
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with LocalFederation.of(place / "fed", apps=(APP,)) as federation:
        for repeat in range(repeats):
            for way in WAYS:
                folder = place / f"{way}-{repeat}"
                folder.mkdir()
                if way == "engine":
                    seconds = seconds_of_engine(federation, rounds, folder)
                else:
                    seconds = seconds_of_app(federation, way, rounds, folder)
                found[way] += seconds[1:]
                print(f"{way:9} {' '.join(f'{one:.2f}' for one in seconds)}", flush=True)
    return found


def summarise(found: dict[str, list[float]]) -> dict[str, Any]:
    medians = {way: statistics.median(seconds) for way, seconds in found.items()}
    ratios = {way: medians["flower"] / medians[way] for way in WAYS}
    return {"seconds": found, "median": medians, "times_as_fast_as_flower": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = arguments.folder or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        found = summarise(measure(place.absolute(), arguments.rounds, arguments.repeats))
    if arguments.json:
        print(json.dumps(found))
        return
    for way in WAYS:
        median, ratio = found["median"][way], found["times_as_fast_as_flower"][way]
        print(f"{way:9} median {median:.2f} s a round, {ratio:.2f} times as fast as Flower's FedAvg")


if __name__ == "__main__":
    main()

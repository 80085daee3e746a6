"""A client-state store under a full population: memory of the process, seconds per round, size of a checkpoint.

    PYTHONPATH=src python -m benchmarks.client_store [--clients 730] [--parameters 1718416] [--cohort 5] [--rounds 150]
                                                     [--folder PATH] [--all] [--json]

No training: every round reads the states of its cohort, changes them and puts them back, as a run does; every tenth
round writes a checkpoint. ``--all`` first gives every client a state, so that all of them are on disk (5 GB for the
default). The requirement: the process stays below 4 GB and a checkpoint holds no client's state.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch

from fedalloy.core.keys import Key
from fedalloy.core.types import State
from fedalloy.experiment.records.disk_store import DiskStore
from fedalloy.experiment.records.folder import RunFolder

LEAVES = 8
EVERY = 10


def first_state(client: int, parameters: int) -> State:
    leaf = torch.full((parameters // LEAVES,), float(client))
    return {"solver": {"local": {str(number): leaf + number for number in range(LEAVES)}}, "wire": {}}


def worked(state: State) -> State:
    local = state["solver"]["local"]
    return {"solver": {"local": {name: leaf + 1.0 for name, leaf in local.items()}}, "wire": {}}


def run_round(store: DiskStore, round: int, arguments: argparse.Namespace) -> None:
    ids = Key.of(0).fold("round", round).choice(arguments.clients, arguments.cohort).tolist()
    known = store.get(ids)
    fresh = {client: first_state(client, arguments.parameters) for client in ids if client not in known}
    store.put(round, {client: worked(state) for client, state in {**fresh, **known}.items()})


def resident() -> float:
    """The peak memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure(place: Path, arguments: argparse.Namespace) -> dict[str, float]:
    folder, before = RunFolder.create(place / "run", {}, {}), resident()
    store, seconds, saving = DiskStore(folder.clients), [], []
    begin = time.perf_counter()
    for some in torch.arange(arguments.clients if arguments.all else 0).split(arguments.cohort):
        store.put(0, {client: first_state(client, arguments.parameters) for client in some.tolist()})
    filling = time.perf_counter() - begin
    with folder.lock():
        for round in range(1, arguments.rounds + 1):
            begin = time.perf_counter()
            run_round(store, round, arguments)
            seconds.append(time.perf_counter() - begin)
            if round % EVERY == 0:
                begin = time.perf_counter()
                path = folder.checkpoint(round, {}, store.commit(round))
                saving.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        again = DiskStore(folder.clients)
        last = folder.latest()
        assert last is not None
        again.restore(last.round, last.clients)
        restoring = time.perf_counter() - begin
    begin = time.perf_counter()
    for client in range(arguments.clients):
        again.get([client])
    return {
        "clients_known": len(store),
        "states_mb": sum(file.stat().st_size for file in folder.clients.iterdir()) / 1e6,
        "process_mb": resident(),
        "process_before_mb": before,
        "fill_s": filling,
        "round_s": statistics.median(seconds),
        "worst_round_s": max(seconds),
        "checkpoint_s": statistics.median(saving),
        "checkpoint_mb": path.stat().st_size / 1e6,
        "restore_s": restoring,
        "read_all_s": time.perf_counter() - begin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=730)
    parser.add_argument("--parameters", type=int, default=1_718_416)
    parser.add_argument("--cohort", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--folder", type=Path, help="Where the run is written; default: a temporary folder.")
    parser.add_argument("--all", action="store_true", help="Give every client a state first.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        found = measure(Path(place), arguments)
    if arguments.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:>20} {value:12.3f}" for name, value in found.items()))


if __name__ == "__main__":
    main()

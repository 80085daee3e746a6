"""Exporting the scores of very many clients: four evaluations of a million, as Parquet and as JSON.

    PYTHONPATH=src python -m benchmarks.exports [--clients 1000000] [--evaluations 4] [--folder PATH] [--output PATH]

Every client has a loss of its own and an accuracy of at most 20 examples. Printed is, for either form of the records
and of the table, the processor time (user and system) of ``fedalloy export RUN --table clients`` as a process of its
own, and the largest memory of that process. ``--output`` adds the figures to a file of results.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.scale_results import keep
from fedalloy.core.keys import Key
from fedalloy.experiment.records.folder import RunFolder

EXAMPLES = 20


def make(place: Path, clients: int, evaluations: int, parquet_from: int | None) -> Path:
    """A run with these evaluations."""
    environment = {} if parquet_from is None else {"parquet_from": parquet_from}
    run = RunFolder.create(place, {"name": "exported", "run": {"rounds": evaluations, "seeds": [0]}}, environment)
    ids = list(range(clients))
    with run.lock():
        for round in range(1, evaluations + 1):
            draws = Key.of(0).fold("scores", round).generator()
            loss = torch.rand(clients, generator=draws, dtype=torch.float64) / round
            right = torch.randint(EXAMPLES + 1, (clients,), generator=draws).double() / EXAMPLES
            told = {"round": round, "split": "test", "model": "global"}
            run.append("clients", {**told, "ids": ids, "loss": loss.tolist(), "accuracy": right.tolist()})
        run.set_status("finished", evaluations)
    return place


def export(run: Path, table: Path) -> dict[str, float]:
    """The cost of one export."""
    # The ending of the file says the format.
    line = [sys.executable, "-m", "fedalloy", "export", str(run), "--table", "clients", "-o", str(table)]
    begin = time.perf_counter()
    with subprocess.Popen(line, stdout=subprocess.DEVNULL) as child:
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{line} ended with {child.returncode}")
    seconds = time.perf_counter() - begin
    return {
        "cpu_s": used.ru_utime + used.ru_stime, "seconds": seconds, "memory_gb": used.ru_maxrss * 1024 / 1e9,
        "table_mb": table.stat().st_size / 1e6,
    }  # fmt: skip


def main() -> None:
    """A line for every pair of forms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--evaluations", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    found: dict[str, Any] = {"clients": chosen.clients, "evaluations": chosen.evaluations}
    with tempfile.TemporaryDirectory(dir=chosen.folder) as place:
        for kept, least in (("parquet", 1), ("json", None)):
            run = make(Path(place) / kept, chosen.clients, chosen.evaluations, least)
            for form in ("csv", "parquet"):
                told = found[f"{kept} to {form}"] = export(run, Path(place) / f"table.{form}")
                print(f"{kept} to {form}: " + ", ".join(f"{n} {v:.2f}" for n, v in told.items()), flush=True)
    if chosen.output:
        keep(chosen.output, "exports", found)


if __name__ == "__main__":
    main()

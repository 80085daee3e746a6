"""Time and memory of one weighting step of AAggFF-D over a million clients.

    PYTHONPATH=src python -m benchmarks.aaggff_million [--clients 1000000] [--cohort 100] [--rounds 20] [--json]

The requirement is under 50 ms per step and under 100 MB of state. The growth of the process is its peak memory over all
steps, state included, minus the memory before the first state was made.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from typing import get_args

import torch
from torch import Tensor

from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context, State
from fedalloy.methods.weightings.aaggff_d import AaggffD
from fedalloy.methods.weightings.cdf import CdfName


def cohort(clients: int, size: int, round: int) -> Cohort:
    """Some clients with different losses."""
    key = Key.of(0).fold("round", round)
    ids = (key.fold("ids").uniform(4 * size, dtype=torch.float64) * clients).long().unique()
    ids = ids[key.fold("choice").permutation(len(ids))[:size]].sort().values
    return Cohort(ids, {}, {"loss_before": 0.1 + key.fold("losses").uniform(len(ids), dtype=torch.float64)})


def megabytes(state: State) -> float:
    return sum(leaf.numel() * leaf.element_size() for leaf in state.values() if isinstance(leaf, Tensor)) / 1e6


def resident() -> float:
    """The peak memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure(cdf: CdfName, clients: int, size: int, rounds: int) -> dict[str, float | str]:
    rule = AaggffD(cdf)
    state, seconds = rule.init(clients), []
    for round in range(1, rounds + 1):
        given, ctx = cohort(clients, size, round), Context(round, clients, Key.of(0))
        begin = time.perf_counter()
        _, state, _ = rule.weigh(given, state, ctx)
        seconds.append(time.perf_counter() - begin)
    median, worst = statistics.median(seconds) * 1e3, max(seconds) * 1e3
    return {"cdf": cdf, "median_ms": median, "worst_ms": worst, "state_mb": megabytes(state)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    given = parser.parse_args()
    measure("weibull", 1000, 10, 2)  # warm-up: one-time loading is not measured
    before = resident()
    rows = [measure(cdf, given.clients, given.cohort, given.rounds) for cdf in get_args(CdfName)]
    grown = resident() - before
    if given.json:
        facts = {"clients": given.clients, "threads": torch.get_num_threads(), "process_grew_mb": grown}
        print(json.dumps({**facts, "rows": rows}))
        return
    print(
        f"{given.clients} clients, {given.cohort} in a round, {torch.get_num_threads()} threads; grew by {grown:.0f} MB"
    )
    print(f"{'cdf':12} {'median ms':>10} {'worst ms':>10} {'state MB':>10}")
    for row in rows:
        numbers = " ".join(f"{row[name]:10.1f}" for name in ("median_ms", "worst_ms", "state_mb"))
        print(f"{row['cdf']:12} {numbers}")


if __name__ == "__main__":
    main()

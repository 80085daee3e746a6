"""Nothing grows with the number of clients that exist, and a run can say where its time went."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path

import pytest
from torch import nn

from fedalloy import algorithms
from fedalloy.core.keys import Key
from fedalloy.engines.profile import collecting, phase
from fedalloy.experiment.fit import fit
from fedalloy.tasks.datasets.lazy_synthetic import LogisticClients, lazy_synthetic
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.testing import small_task

FEDAVG = algorithms.fedavg(lr=0.1, batch_size=10)
MEGABYTE = 1e6


def lazy_run(population: int, folder: Path | None = None, **settings):
    objective = ModuleObjective(lambda: nn.Linear(60, 10))
    task = lazy_synthetic(population, objective, key=Key.of(0), clients=LogisticClients(20))
    settings = {"rounds": 3, "cohort": 100, "evaluate_clients": 50, "engine": "batched", **settings}
    return fit(FEDAVG, task, folder=folder, **settings)


def resident() -> float:
    """Megabytes of this process's own memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024 / MEGABYTE


def test_a_million_clients_cost_what_a_thousand_cost(tmp_path):
    lazy_run(1000)
    seconds, resting = {}, resident()
    for population in (1000, 1_000_000):
        begin = time.process_time()
        result = lazy_run(population, tmp_path / str(population))
        seconds[population] = time.process_time() - begin
        ids = [row["ids"] for row in result.rounds()]
        assert all(len(set(one)) == 100 for one in ids)
        assert max(map(max, ids)) > 0.9 * population
    assert resident() - resting < 30
    assert seconds[1_000_000] < 3 * seconds[1000] + 0.1


def test_python_holds_nothing_per_client():
    lazy_run(1_000_000)
    tracemalloc.start()
    try:
        lazy_run(1_000_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * MEGABYTE


# ---------------------------------------------------------------------------------------------- where the time went


PHASES = {"loop": {"data", "compute"}, "batched": {"plan", "data", "compute"}, "workers": {"data", "compute"}}


@pytest.mark.parametrize("engine", PHASES)
@pytest.mark.parametrize("model", ["mlp", "dropout"])
def test_a_profiled_run_tells_its_phases_in_every_round(tmp_path, engine, model):
    fit(FEDAVG, small_task(model), rounds=3, engine=engine, profile=True, folder=tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "timings.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["profile"].keys() == PHASES[engine]
        assert all(spent > 0 for spent in row["profile"].values())
        assert sum(row["profile"].values()) <= row["clients"]


def test_a_run_that_is_not_profiled_tells_none(tmp_path):
    fit(FEDAVG, small_task(), rounds=2, engine="batched", folder=tmp_path / "run")
    assert "profile" not in (tmp_path / "run" / "timings.jsonl").read_text()


def test_a_phase_inside_a_phase_counts_once():
    with collecting() as seconds:
        with phase("outer"):
            time.sleep(0.02)
            for _ in range(2):
                with phase("inner"):
                    time.sleep(0.03)
        with phase("outer"):
            time.sleep(0.01)
    assert seconds["inner"] == pytest.approx(0.06, abs=0.02)
    assert seconds["outer"] == pytest.approx(0.03, abs=0.02)
    with phase("unheard"):
        pass
    assert seconds.keys() == {"inner", "outer"}

"""The cost of runs: bytes, simulated and real seconds, memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedalloy.report.data.plain import Chart, digits
from fedalloy.results.runs import by_name
from fedalloy.results.statistics import mean
from fedalloy.results.summaries import RunSummary

MEGA = 1e6


def cost_rows(summaries: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """One row per algorithm, means over its seeds."""
    return [{"name": name, **_row(runs)} for name, runs in by_name(summaries).items()]


def cost_bars(summaries: Sequence[RunSummary]) -> list[Chart]:
    """Bytes and seconds as bars."""
    rows = cost_rows(summaries)
    wanted = {
        "megabytes": ("Bytes", "megabytes sent and received"),
        "simulated_seconds": ("Simulated time", "seconds on the simulated devices"),
        "wall_seconds": ("Real time", "seconds on this machine"),
    }
    charts: list[Chart] = []
    for key, (title, label) in wanted.items():
        known = [{"name": row["name"], "value": row[key]} for row in rows if row[key]]
        if known:
            charts.append({"id": f"cost-{key}", "kind": "bars", "title": title, "x": label, "bars": known,
                           "note": "Whole run, mean over seeds."})  # fmt: skip
    return charts


def _row(runs: Sequence[RunSummary]) -> dict[str, Any]:
    up = mean([run.running_sums.bytes_up / MEGA for run in runs])
    down = mean([run.running_sums.bytes_down / MEGA for run in runs])
    rounds = [run.outcome.round for run in runs if run.outcome.round]
    wall = mean([_seconds(run) for run in runs])
    return {
        "megabytes_up": digits(up, 4),
        "megabytes_down": digits(down, 4),
        "megabytes": digits(up + down, 4),
        "simulated_seconds": digits(mean([run.running_sums.seconds for run in runs]), 4),
        "wall_seconds": digits(wall, 4),
        "seconds_per_round": digits(wall / mean(rounds) if rounds else None, 3),
        "phases": _phases(runs),
        "memory": digits(max(run.clock.memory for run in runs) / MEGA, 4) or None,
        "device_memory": digits(max(run.clock.device_memory for run in runs) / MEGA, 4) or None,
        "engine": ", ".join(sorted({_engine(run) for run in runs} - {""})),
    }


def _phases(runs: Sequence[RunSummary]) -> dict[str, float | None]:
    names = dict.fromkeys(name for run in runs for name in run.clock.seconds)
    return {name: digits(mean([float(run.clock.seconds[name]) for run in runs]), 3) for name in names}


def _seconds(run: RunSummary) -> float:
    return float(sum(run.clock.seconds.values()))


def _engine(run: RunSummary) -> str:
    return run.clock.engine or str(run.recipe.get("engine", {}).get("kind", ""))

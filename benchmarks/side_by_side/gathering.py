"""From the folder of a comparison to one small file: what was tuned, and what every reported run ended with."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedalloy.experiment.records.reading import read_run
from fedalloy.results.gains import read_scores
from fedalloy.results.outcome import RunOutcome, watched, watched_by
from fedalloy.results.redrawn import redrawn
from fedalloy.results.runs import by_name, read_outcomes

DIGITS = 5
"""A client has at most some hundred test examples: more digits would be noise."""


def gather(place: Path, to: Path) -> str:
    """Pack the comparison in a folder, if it is complete; returns what to print."""
    outcomes = read_outcomes([place]) if any(place.glob("*/seed-*/recipe.toml")) else []
    if missing := _missing(place, outcomes):
        return f"{place}: not complete ({missing}), left out"
    tuned = {one["name"]: one for one in json.loads((place / "tuning.json").read_text(encoding="utf-8"))}
    entries = [_entry(name, runs, tuned.get(name, {})) for name, runs in by_name(outcomes).items()]
    packed = {**_federation(place.name, outcomes), "entries": entries}
    to.mkdir(parents=True, exist_ok=True)
    file = to / f"{place.name}.json"
    file.write_text(_lines(packed), encoding="utf-8")
    return f"{file}: {len(outcomes)} runs of {len(entries)} methods, {file.stat().st_size / 2**10:.0f} KiB"


def _missing(place: Path, outcomes: Sequence[RunOutcome]) -> str:
    """What a comparison still has to run: a table of the methods that came first would be no comparison."""
    order = json.loads((place / "comparison.json").read_text(encoding="utf-8"))["order"]
    groups = by_name(outcomes)
    seeds = {run.seed for run in outcomes}
    short = [name for name in order if {run.seed for run in groups.get(name, []) if run.ended} != seeds or not seeds]
    return f"{len(short)} of {len(order)} methods" if short else ""


def _federation(name: str, outcomes: Sequence[RunOutcome]) -> dict[str, Any]:
    """What all runs of the comparison have in common."""
    first = outcomes[0]
    assert first.folder is not None
    record = read_run(first.folder)
    shared = redrawn(run.drawn for run in outcomes if run.name == first.name)
    return {
        "federation": name,
        "recipe": f"recipes/side-by-side/{name}.toml",
        "description": record.recipe.get("description", ""),
        "metric": first.metric,
        "higher_is_better": first.higher_is_better,
        "rounds": first.rounds,
        "clients": len(read_scores(first).clients),
        "reused": shared.reused if shared else 0.0,
        "torch": record.environment.get("torch", ""),
        "device": "cpu",
    }


def _entry(name: str, runs: Sequence[RunOutcome], tuned: Mapping[str, Any]) -> dict[str, Any]:
    tried = tuned.get("tried", [])
    return {
        "name": name,
        "settings": tuned.get("best", {}),
        "trials": len(tried),
        "tuning_rounds": sum(one.get("rounds") or 0 for one in tried),
        "runs": [_run(run) for run in runs],
    }


def _run(run: RunOutcome) -> dict[str, Any]:
    if run.folder is None or not run.finished:
        return {"seed": run.seed, "state": run.state, "reason": run.reason, "round": run.round}
    rows = list(read_run(run.folder).rounds())
    metric, on_global = watched_by(read_run(run.folder).recipe)
    found = {int(row["round"]): watched(row, metric, on_global) for row in rows}
    return {
        "seed": run.seed,
        "state": run.state,
        "scores": {name: _rounded(run.scores.get(name)) for name in ("mean", "worst_served", "gini")},
        "curve": {round: _rounded(summary.get("mean")) for round, summary in found.items() if summary},
        "bytes": _bytes_per_client(rows),
        "clients": [_rounded(client.score) for client in read_scores(run).clients],
    }


def _bytes_per_client(rows: Sequence[Mapping[str, Any]]) -> int:
    """Both directions, for one client that takes part in one round."""
    return round(statistics.fmean((row["bytes_up"] + row["bytes_down"]) / max(1, len(row["ids"])) for row in rows))


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, DIGITS)


def _lines(packed: Mapping[str, Any]) -> str:
    """JSON with one line for every run, so that a later change of one run is one changed line."""
    entries = [
        json.dumps({**entry, "runs": []}).removesuffix("]}")
        + "\n   "
        + ",\n   ".join(json.dumps(run) for run in entry["runs"])
        + "]}"
        for entry in packed["entries"]
    ]
    head = json.dumps({**packed, "entries": []}).removesuffix("]}")
    return head + "\n " + ",\n ".join(entries) + "]}\n"

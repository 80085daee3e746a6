"""A description of the runs in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedalloy.experiment.records import toml
from fedalloy.experiment.records.reading import GIVEN
from fedalloy.results.runs import by_name
from fedalloy.results.summaries import RunSummary


def title(summaries: Sequence[RunSummary]) -> str:
    """The headline."""
    names = list(by_name(summaries))
    data = _dataset(summaries[0].recipe.get("task", {}).get("dataset", ""))
    on = f" on {data}" if data else ""
    return f"{names[0]}{on}" if len(names) == 1 else f"{len(names)} algorithms{on}"


def summary(summaries: Sequence[RunSummary]) -> list[str]:
    """A few sentences: the algorithms, the data, the clients, the schedule."""
    recipe = summaries[0].recipe
    said = [str(recipe["description"])] if recipe.get("description") else []
    return [*said, _who(summaries), _data(summaries[0]), _round(summaries[0]), _how_long(summaries)]


def common_recipe(summaries: Sequence[RunSummary]) -> str:
    """The settings that all runs share, as a recipe."""
    flats = [dict(_flatten(run_summary.recipe)) for run_summary in summaries]
    shared = {path: value for path, value in flats[0].items() if all(flat.get(path) == value for flat in flats)}
    return toml.dumps(_nest(shared))


def differences(summaries: Sequence[RunSummary]) -> tuple[list[tuple[str, ...]], list[tuple[str, list[str]]]]:
    """The settings in which algorithms differ, and every algorithm's values; seeds are ignored."""
    firsts = {name: dict(_flatten(runs[0].recipe)) for name, runs in by_name(summaries).items()}
    paths = dict.fromkeys(path for flat in firsts.values() for path in flat)
    skipped = {("name",), ("description",), ("run", "seeds"), ("run", "seed")}
    if all(flat.get(("algorithm", "name"), name) == name for name, flat in firsts.items()):
        skipped.add(("algorithm", "name"))
    said = {path: {repr(flat.get(path)) for flat in firsts.values()} for path in paths if path not in skipped}
    wanted = [path for path, values in said.items() if len(values) > 1]
    return wanted, [
        (name, ["" if path not in flat else _said(flat[path]) for path in wanted]) for name, flat in firsts.items()
    ]


def _who(summaries: Sequence[RunSummary]) -> str:
    names, seeds = list(by_name(summaries)), sorted({run_summary.seed for run_summary in summaries})
    runs = f"{len(summaries)} runs" if len(summaries) > 1 else "one run"
    over = f"seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    return f"{_list(names)}: {runs}, {over}."


def _data(run_summary: RunSummary) -> str:
    task, dealt = run_summary.recipe.get("task", {}), run_summary.recipe.get("partition", {})
    sizes = run_summary.manifest.get("sizes") or []
    model = f" with the model {_rule(task['model'])}" if "model" in task else ""
    dataset = _dataset(task.get("dataset", "unknown")).removeprefix("data ")
    said = f"Data: {dataset}{model}, spread over {run_summary.population} clients"
    said += f" by {_rule(dealt)}" if "kind" in dealt else ""
    return said + (f"; they hold {min(sizes):,} to {max(sizes):,} examples each." if sizes else ".")


def _round(run_summary: RunSummary) -> str:
    devices, sampling = run_summary.recipe.get("devices", {}), run_summary.recipe.get("sampling", {})
    cohort = sampling.get("cohort")
    said = f"Each round samples {cohort} clients" if cohort else "Each round uses all clients"
    said += f", which train for {_epochs(devices['epochs'])}" if "epochs" in devices else ""
    success = devices.get("success", 1.0)
    said += f"; a link works with probability {success}" if success != 1.0 else ""
    deadline = devices.get("deadline")
    return said + (f"; clients that need more than {deadline} simulated seconds are too late." if deadline else ".")


def _how_long(summaries: Sequence[RunSummary]) -> str:
    outcome, every = summaries[0].outcome, summaries[0].recipe.get("evaluate", {}).get("every", 1)
    scored = "every round" if every == 1 else f"every {every} rounds"
    own = ", by its own model where it has one" if any(run_summary.personal for run_summary in summaries) else ""
    return f"{outcome.rounds} rounds; every client is scored {scored} on its own test examples{own}."


def _epochs(epochs: object) -> str:
    if isinstance(epochs, Mapping):
        return f"{epochs.get('low')} to {epochs.get('high')} local epochs"
    if isinstance(epochs, list):
        return "as many local epochs as each is given"
    return f"{epochs} local epoch{'s' if epochs != 1 else ''}"


def _rule(rule: object) -> str:
    """A rule and its arguments, as text."""
    if not isinstance(rule, Mapping):
        return _said(rule)
    left_out = {"kind", "clients", "newcomers", "min_samples"}
    inside = [f"{key.replace('_', ' ')} {_rule(value)}" for key, value in rule.items() if key not in left_out]
    return f"{_kind(rule)} ({', '.join(inside)})" if inside else _kind(rule)


def _dataset(dataset: object) -> str:
    return "data given in Python" if dataset == GIVEN else _kind(dataset)


def _kind(rule: object) -> str:
    return str(rule.get("kind", "?")) if isinstance(rule, Mapping) else str(rule)


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _said(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _flatten(table: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, (*before, key))
        else:
            yield (*before, key), value


def _nest(flat: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        table = nested
        for key in path[:-1]:
            table = table.setdefault(key, {})
        table[path[-1]] = value
    return nested

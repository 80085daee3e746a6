"""The sections on what was tried before anything was reported: a search or a grid, and the answer of an advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedalloy.report.context import ReportContext
from fedalloy.report.markup import Cell, count, named, paragraph, section, table, text

_STATISTICS = {"mean": "mean", "worst_served": "mean of the worst-served 10 %"}
_THIRDS = ("low", "middle", "high")


def advice(context: ReportContext) -> str:
    """The answer with its further lines, the federation's measures, and every method with the reason for it."""
    if not context.advices:
        return ""
    said = "".join(_answer(one, context) for one in context.advices)
    return section("advice", "Advice", said)


def _answer(found: Mapping[str, Any], context: ReportContext) -> str:
    lines = "".join(paragraph(line) for line in [found["first"], *found["lines"]])
    measures = [[text(name.replace("_", " ")), count(value, 3)] for name, value in found["measures"]["values"].items()]
    methods = [
        [named(one["name"], context.styles), text(one["reason"]), text("; ".join(one["facts"])),
         count(one["work"], 1), count(one["upload"], 1), text(one["refused"])]
        for one in found["candidates"]
    ]  # fmt: skip
    head = ["method", "why", "our own results", "work", "upload", "why it was not tried"]
    note = paragraph("Work and upload are factors to those of FedAvg.", "soft")
    made = table("The federation", ["measure", "value"], measures, sortable=False, kind="narrow")
    return lines + made + table("The methods", head, methods, kind="low") + note


def tuning(context: ReportContext) -> str:
    """The settings that a grid or a search tried and chose, the budget of each, and how much each of them matters."""
    if not context.tunings:
        return ""
    told = [f"{one['name']}: {one['how']}." for one in context.tunings if one.get("how")]
    note = paragraph(" ".join(["On the tuning seeds, which are not among those reported above.", *told]), "soft")
    return section("tuning", "Tuning", note, _tries(context), _sensitivity(context))


def _tries(context: ReportContext) -> str:
    statistics = {one.get("statistic", "mean") for one in context.tunings}
    what = _STATISTICS.get(statistics.pop(), "score") if len(statistics) == 1 else "score"
    rounds = any("rounds" in one for entry in context.tunings for one in entry["tried"])
    body = [
        [named(entry["name"], context.styles), text(_settings(one["settings"])), _score(one),
         *([count(one.get("rounds"))] if rounds else []), text("chosen" if one is _chosen(entry) else "")]
        for entry in context.tunings for one in entry["tried"]
    ]  # fmt: skip
    head = ["algorithm", "setting", what, *["rounds"] * rounds, "verdict"]
    return table("Tuning", head, body, kind="low")


def _chosen(entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The trial whose setting was chosen; the same setting may have been drawn again and stopped."""
    same = [one for one in entry["tried"] if one["settings"] == entry["best"]]
    return next((one for one in same if one["score"] is not None), None)


def _score(one: Mapping[str, Any]) -> Cell:
    return count(one["score"], 3) if one["score"] is not None else Cell(one.get("state", "failed"), None)


def _sensitivity(context: ReportContext) -> str:
    """The best score in every third of each range, and what a setting explains; empty without a search."""
    body = [
        [named(entry["name"], context.styles), text(path), *_thirds(entry.get("thirds", {}).get(path, {})),
         count(entry.get("importance", {}).get(path), 2)]
        for entry in context.tunings for path in {**entry.get("thirds", {}), **entry.get("importance", {})}
    ]  # fmt: skip
    if not body:
        return ""
    said = "The best score (and the number of trials) in the low, the middle and the high third of each range; and the "
    said += "share of the variation of scores that a setting explains by itself, from 0, nothing, to 1, everything, "
    said += "where there are six scores. Scores are those at the first comparison where trials were stopped early."
    head = ["algorithm", "setting", *_THIRDS, "importance"]
    return paragraph(said, "soft") + table("Sensitivity", head, body, kind="low")


def _thirds(found: Mapping[str, Sequence[Any]]) -> list[Cell]:
    cells = []
    for name in _THIRDS:
        score, trials = found.get(name, (None, 0))
        cells.append(Cell(f"{score:.3f} ({trials})" if score is not None else f"- ({trials})" * bool(found), score))
    return cells


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{path} = {value}" for path, value in settings.items())

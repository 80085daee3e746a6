"""Several federations: differences to the first algorithm on each, and average ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedalloy.report.data.plain import Chart, digits
from fedalloy.results.evidence import Evidence
from fedalloy.results.federations import Federations, Ranks


def forest(federations: Federations, found: Mapping[tuple[str, str], Evidence]) -> Chart | None:
    """A block per federation, in it a dot and its simultaneous interval per algorithm."""
    rows = [
        {"name": one.name, "points": [_point(name, found[one.name, name]) for name in federations.names[1:]
                                      if _drawable(found.get((one.name, name)))]}
        for one in federations.all
    ]  # fmt: skip
    if not any(row["points"] for row in rows):
        return None
    good = {True: "right", False: "left"}.get(federations.higher_is_better)  # type: ignore[arg-type]
    note = "A dot is the mean difference over seeds, the line its simultaneous interval; filled where it is decided."
    note += f" Dots to the {good} of zero are better." if good else ""
    lost = sum(not _drawable(one) for one in found.values())
    note += f" {lost} differences that are not finite cannot be drawn." if lost else ""
    title = f"{federations.metric} against {federations.first}, by federation"
    return {"id": "federations", "kind": "forest", "title": title, "x": f"difference in {federations.metric}",
            "rows": rows, "note": note}  # fmt: skip


def rank_line(ranks: Ranks) -> Chart:
    """The critical-difference picture: average ranks on a line, bars join those that are not told apart."""
    order = sorted(zip(ranks.averages, ranks.names, strict=True))
    note = f"Average rank over {ranks.federations} federations, 1 is the best. A bar joins algorithms whose ranks "
    note += f"differ by less than the critical difference, {ranks.critical:.2f} (Nemenyi, 95 %)."
    return {"id": "ranks", "kind": "ranks", "title": "Average ranks", "critical": digits(ranks.critical),
            "points": [{"name": name, "rank": digits(rank)} for rank, name in order],
            "groups": [list(some) for some in ranks.groups], "note": note}  # fmt: skip


def _drawable(found: Evidence | None) -> bool:
    return found is not None and math.isfinite(found.estimate)


def _point(name: str, found: Evidence) -> dict[str, Any]:
    return {"name": name, "value": digits(found.estimate), "low": digits(found.low), "high": digits(found.high),
            "decided": found.decided, "outcome": found.outcome}  # fmt: skip

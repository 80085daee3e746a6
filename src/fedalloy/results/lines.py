"""Lines over rounds: what the seeds of an algorithm reached in each round.

A line continues as long as some seed does, so that its end agrees with the table of finished runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from fedalloy.results.served import scores
from fedalloy.results.statistics import number

Item = TypeVar("Item")
STATISTICS = {
    "mean": "mean over clients",
    "worst_served": "worst-served 10 % of clients",
    "best_served": "best-served 10 % of clients",
    "shared": "global model, mean over clients",
    "pooled": "global model on the global test set",
}
"""The statistics that a line can show, with their descriptions."""


def by_round(seeds: Iterable[Mapping[int, Item]]) -> dict[int, list[Item]]:
    """The values of the seeds in every round, from the seeds that have one; rounds ascend.

    >>> by_round([{1: "a", 3: "b"}, {1: "c"}])
    {1: ['a', 'c'], 3: ['b']}
    """
    found: dict[int, list[Item]] = {}
    for seed in seeds:
        for round, item in seed.items():
            found.setdefault(round, []).append(item)
    return dict(sorted(found.items()))


def statistic_of(row: Mapping[str, Any], metric: str, statistic: str, higher: bool | None) -> float:
    """A statistic of an evaluation (:data:`STATISTICS`): NaN where there is none, infinity where losses overflowed."""
    if statistic == "pooled":
        return number(row.get("global", {}).get(metric))
    column, name = ("evaluation_global", "mean") if statistic == "shared" else ("evaluation", statistic)
    return scores(row.get(column, {}).get(metric) or {}, higher).get(name, math.nan)


def responses_of(info: Mapping[str, Item]) -> Item | None:
    """The responses of the whole population; estimated by rules that only see a cohort.

    >>> responses_of({"responses": [0.1], "estimate": [0.1, 0.3]}), responses_of({"responses": [0.2, 0.4]})
    ([0.1, 0.3], [0.2, 0.4])
    """
    return info.get("estimate", info.get("responses"))

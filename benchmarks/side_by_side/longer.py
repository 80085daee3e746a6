"""FedAvg with a larger search: the method that all others are compared with, where luck in its search counts most.

    fedalloy compare recipes/side-by-side/NAME.toml --algorithms fedavg --tune 24 --set tune.pruner=none \\
        -o runs/fedavg-24/NAME
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.side_by_side.stored import Entry, Federation, read
from fedalloy.results.evidence import Evidence

COMMAND = (
    "fedalloy compare recipes/side-by-side/NAME.toml --algorithms fedavg --tune 24 --set tune.pruner=none "
    "-o runs/fedavg-24/NAME"
)
"""What was run for every federation of the section; its first eight trials are those of the tables."""


def against_longer(federations: Sequence[Federation], folder: Path) -> list[tuple[Federation, Federation]]:
    """Every federation with a larger search: as in the tables, and with the FedAvg of that search in its place."""
    found = {one.name: one.entries[0] for one in read(folder)} if folder.is_dir() else {}
    return [
        (each, replace(each, entries=(_checked(found[each.name], each), *each.entries[1:])))
        for each in federations
        if each.name in found
    ]


def rows(pairs: Sequence[tuple[Federation, Federation]]) -> list[list[str]]:
    """Federation, FedAvg in the tables and after the larger search, its settings, and who is decided against it."""
    return [
        [
            each.name,
            _mean(each),
            _mean(other),
            ", ".join(f"{path.removeprefix('algorithm.')} {value:.3g}" for path, value in _settings(other)),
            _named(other, "better"),
            _named(other, "worse"),
        ]
        for each, other in pairs
    ]


def _checked(entry: Entry, each: Federation) -> Entry:
    """The runs of another search are paired with those of the tables by seed."""
    mine, theirs = ({run["seed"] for run in one.runs} for one in (entry, each.entries[0]))
    if entry.name != each.entries[0].name or mine != theirs:
        raise ValueError(
            f"{each.name}: the larger search has {entry.name} with seeds {sorted(mine)}, not those of the page"
        )
    return entry


def _mean(each: Federation) -> str:
    found = each.entries[0].spread("mean")
    return found.text(3) if found else "-"


def _settings(each: Federation) -> list[tuple[str, float]]:
    return list(each.entries[0].settings.items())


def _named(each: Federation, outcome: str) -> str:
    """The methods whose mean is decided, with their difference in points."""
    return (
        ", ".join(f"{name} {100 * one.estimate:+.1f}" for name, one in _means(each) if one.outcome == outcome) or "none"
    )


def _means(each: Federation) -> list[tuple[str, Evidence]]:
    return [(name, found["mean"]) for name, found in each.against_fedavg.items() if "mean" in found]

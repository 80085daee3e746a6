"""Measure how often verdicts are false and intervals cover, where the truth is known.

    python -m benchmarks.evidence [--repetitions 2000] [--seed 0] [--only NAME] [--dry] [--page] [--check]

Figures are stored in benchmarks/results/evidence.json; the table of docs/report.md is made from them. ``--page`` and
``--check`` measure nothing: the first writes the table again, the second fails when the page is not what the stored
figures give, or when a bound is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict

from benchmarks.evidence import page
from benchmarks.evidence.measuring import measure, wrong
from benchmarks.evidence.worlds import World

SOURCES = ("normal", "recorded", "case")


def worlds() -> list[World]:
    """All worlds, in the order of the page."""
    found = [
        world
        for source in SOURCES
        for world in (
            *(World("two equal methods", source, seeds) for seeds in (3, 5, 10)),
            *(World("one better by half a deviation", source, seeds, (0.5,)) for seeds in (3, 5, 10)),
            *(World("four equal to the first", source, seeds, (0.0,) * 4) for seeds in (3, 5, 10)),
            *(World("four, two of them better", source, seeds, (0.0, 0.0, 0.5, 1.0)) for seeds in (5, 10)),
            *(World("target often missed, equal", source, seeds, (0.0,), 24) for seeds in (5, 10, 16)),
            *(World("target often missed, one better", source, seeds, (0.5,), 24) for seeds in (5, 10, 16)),
            World("looks twice, equal", source, 4, looks=2),
            World("looks twice, one better", source, 4, (0.5,), looks=2),
            World("looks twice, four equal", source, 4, (0.0,) * 4, looks=2),
            World("looks three times, equal", source, 4, looks=3),
            *(World("splits share examples, equal", source, seeds, shared=0.25) for seeds in (5, 10)),
        )
    ]
    controls = [World("two equal methods", source, seeds) for source in page.CONTROLS for seeds in (3, 5, 10)]
    return [*found, *controls]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="other draws than those of the page; stores nothing")
    parser.add_argument("--only", default="", metavar="NAME", help="worlds whose name contains this; stores nothing")
    parser.add_argument("--dry", action="store_true", help="print the figures and store nothing")
    parser.add_argument("--page", action="store_true", help="write the table of the page from the stored figures")
    parser.add_argument("--check", action="store_true", help="compare the page with the stored figures")
    given = parser.parse_args(arguments)
    if given.check:
        return page.check()
    if given.page:
        page.write()
        return 0
    return run(given)


def run(given: argparse.Namespace) -> int:
    """Measure, print and store; 1 where a bound is missed."""
    rows, missed, begin = [], 0, time.process_time()
    for world in worlds():
        if given.only not in world.name:
            continue
        found = measure(world, given.repetitions, given.seed)
        said = [] if world.source in page.CONTROLS else wrong(world, found)
        missed += bool(said)
        rows.append({**asdict(world), **asdict(found)})
        print(
            f"{world.source:12} {world.name:32} {world.seeds:2} seeds: {page.line(rows[-1])}  {'; '.join(said)}",
            flush=True,
        )
    print(f"{time.process_time() - begin:.0f} s")
    if not (given.dry or given.only or given.seed):
        page.store(rows, given.repetitions)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())

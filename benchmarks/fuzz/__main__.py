"""``python -m benchmarks.fuzz``: every input, one after another, and a table of the results."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.fuzz.driving import RunningSums, Way, isolated, keep
from benchmarks.fuzz.ways import WAYS, ready


def main(arguments: list[str]) -> int:
    """Exit code 0 when nothing harmful was found and every input got its number of cases."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("ways", nargs="*", help=f"of {', '.join(WAYS)}; default: all")
    parser.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="seconds for each input; up to three times as long to reach its least number of cases",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=None, help="at most this many cases for each input")
    parser.add_argument("--keep", type=Path, default=None, help="a folder for the findings")
    parser.add_argument("--json", action="store_true", help="one JSON object per input")
    given = parser.parse_args(arguments)
    for name in given.ways:
        if name not in WAYS:
            parser.error(f"there is no input '{name}'; known: {', '.join(WAYS)}")
    ready()
    good = [_drive(WAYS[name], given) for name in given.ways or WAYS]
    return 0 if all(good) else 1


def _drive(way: Way, given: argparse.Namespace) -> bool:
    tally = isolated(way, given.seconds, given.seed, given.cases, way.least)
    print(json.dumps(asdict(tally)) if given.json else _line(way, tally), flush=True)
    for finding in tally.findings:
        if given.keep:
            print(f"    kept as {keep(way.name, finding, given.keep)}")
        elif not given.json:
            print(f"    {finding.kind}: {finding.text}\n    {json.dumps(finding.case)[:600]}")
    return not tally.findings


def _line(way: Way, tally: RunningSums) -> str:
    said = ", ".join(f"{count:,} {what}" for what, count in tally.said.items())
    short = "" if tally.cases >= way.least else f"  (a long run has at least {way.least:,})"
    found = f"{len(tally.findings)} harmful{short}"
    return f"{way.name:<18} {tally.cases:>8,} cases in {tally.seconds:6.1f} s: {said}; {found}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measure the corrections and write the tables of docs/corrections.md.

    python -m benchmarks.corrections [--only NAME ...] [--seeds 0 1 2 3 4] [--page] [--check] [--list] [--dry]

Readings are stored in benchmarks/results/corrections.json; the tables of the page are made from those. ``--page`` and
``--check`` measure nothing: the first writes the tables again, the second fails when the page is not what the stored
readings give, or when a case was never measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from benchmarks.corrections import page
from benchmarks.corrections.cases import client_cases
from benchmarks.corrections.exact import exact_cases
from benchmarks.corrections.measuring import Case
from benchmarks.corrections.server_cases import server_cases


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="measure only these cases")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], metavar="N", help="other seeds than 0 to 4")
    parser.add_argument("--check", action="store_true", help="compare the page with the stored readings")
    parser.add_argument("--page", action="store_true", help="write the tables from the stored readings")
    parser.add_argument("--list", action="store_true", help="name the cases")
    parser.add_argument("--dry", action="store_true", help="print the tables and store nothing")
    given = parser.parse_args(arguments)
    cases = every_case()
    if given.list:
        print("\n".join(case.name for case in cases))
        return 0
    if unknown := set(given.only) - {case.name for case in cases}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; --list names the cases")
    if given.check:
        return check(cases)
    results = page.read() if given.page else measure(cases, given)
    if not given.dry:
        page.PAGE.write_text(page.filled(page.PAGE.read_text(), cases, results))
    return 0


def every_case() -> list[Case]:
    """All cases, in the order of the page."""
    return [*client_cases(), *server_cases(), *exact_cases()]


def measure(cases: list[Case], given: argparse.Namespace) -> dict[str, Any]:
    """The stored readings with those that were asked for measured again."""
    torch.set_num_threads(1)
    results = page.read()
    for case in cases:
        if given.only and case.name not in given.only:
            continue
        begin, seeds = time.process_time(), given.seeds or list(case.seeds)
        results[case.name] = {"seeds": seeds, "forms": page.gather(case, seeds)}
        print(f"{case.name}: {time.process_time() - begin:.1f} s\n{page.table(case, results[case.name]['forms'])}\n")
    ordered = {case.name: results[case.name] for case in cases if case.name in results}
    if not given.dry:
        page.write(ordered)
    return ordered


def check(cases: list[Case]) -> int:
    results, text = page.read(), page.PAGE.read_text()
    missing = [case.name for case in cases if case.name not in results]
    if missing or page.filled(text, cases, results) != text:
        what = f"never measured: {', '.join(missing)}" if missing else "docs/corrections.md differs from its readings"
        print(f"{what}; run 'python -m benchmarks.corrections'", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

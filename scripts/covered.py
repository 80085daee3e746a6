"""The share of the library that the tests run, written into CONTRIBUTING: ``python scripts/covered.py TESTS``.

``make coverage`` calls it with the tests that it ran, after their measurements were put together in ``.coverage``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- coverage: made by make coverage -->", "<!-- end of coverage -->"
WHOLE = "tests src/fedalloy"
Lines = tuple[int, int]


def main(tests: str) -> None:
    """Write what ``.coverage`` holds."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name} must have one place between '{BEGIN}' and '{END}'")
    made = told(by_package(measured()), tests, datetime.now(UTC).date().isoformat())
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", encoding="utf-8")


def measured() -> Mapping[str, Lines]:
    """Lines that were run and lines that there are, by file of the package."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "coverage.json"
        subprocess.run([sys.executable, "-m", "coverage", "json", "-q", "-o", str(file)], check=True, cwd=ROOT)
        files = json.loads(file.read_text(encoding="utf-8"))["files"]
    found = {name.replace("\\", "/"): one["summary"] for name, one in files.items()}
    return {
        name.partition("fedalloy/")[2]: (one["covered_lines"], one["num_statements"]) for name, one in found.items()
    }


def by_package(files: Mapping[str, Lines]) -> dict[str, Lines]:
    """Sums by package, in the order of their names; files beside the packages count for the whole alone.

    >>> by_package({"core/keys.py": (1, 2), "core/tree.py": (3, 4), "algorithms.py": (1, 1)})
    {'': (5, 7), 'core': (4, 6)}
    """
    sums: dict[str, list[Lines]] = defaultdict(list)
    for name, lines in files.items():
        parts = PurePosixPath(name).parts
        for package in {"", parts[0] if len(parts) > 1 else ""}:
            sums[package].append(lines)
    return {name: (sum(one for one, _ in sums[name]), sum(all_ for _, all_ in sums[name])) for name in sorted(sums)}


def told(packages: Mapping[str, Lines], tests: str, date: str) -> str:
    """The sentence with the figures; where only some tests were run, it says so.

    >>> print(told({"": (9, 12), "core": (9, 10)}, "tests/core", "2026-01-01"))
    Measured on 2026-01-01 with
    `make coverage COVERED="tests/core"`, a part of the tests:
    75.0 % of 12 lines were run (core 90 %).
    """
    whole = tests.split() == WHOLE.split()
    command = "`make coverage`" if whole else f'`make coverage COVERED="{tests}"`, a part of the tests'
    done, lines = packages[""]
    parts = ", ".join(f"{name} {share(one):.0f} %" for name, one in packages.items() if name)
    return f"Measured on {date} with\n{command}:\n{share((done, lines)):.1f} % of {lines:,} lines were run ({parts})."


def share(lines: Lines) -> float:
    """In percent; a package without lines to run is run as a whole."""
    return 100 * lines[0] / lines[1] if lines[1] else 100.0


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))

"""The tables of docs/corrections.md: written between the markers of each case, from the stored readings."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from benchmarks.corrections.measuring import ACCURACY, GAIN, Case, Column

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "corrections.md"
STORE = ROOT / "benchmarks" / "results" / "corrections.json"
# From this size on a mean is printed with a power of ten.
_MANY = 1e4

Stored = dict[str, dict[str, list[float | None]]]
"""Form -> column -> one value per seed; None where there is no number."""


def gather(case: Case, seeds: Sequence[int]) -> Stored:
    """Measure a case for some seeds."""
    found: dict[str, dict[str, list[float | None]]] = {}
    for seed in seeds:
        for name, readings in case.measure(seed).items():
            for key, value in readings.items():
                found.setdefault(name, {}).setdefault(key, []).append(_storable(value))
    return found


def _storable(value: float) -> float | None:
    """Six digits are enough; more would differ between machines by rounding."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def table(case: Case, stored: Stored, comparisons: int = 1) -> str:
    """A case as a table: mean and standard deviation over seeds, and the paired difference to the first form."""
    paired = ACCURACY in case.columns
    headings = ["form", *(column.heading for column in case.columns), *([GAIN.heading] if paired else [])]
    lines = [f"| {' | '.join(headings)} |", f"|---{'|---:' * (len(headings) - 1)}|"]
    first = next(iter(stored.values()))
    for number, (name, columns) in enumerate(stored.items()):
        cells = _cells(case.columns, columns)
        if paired:
            cells.append(_paired(columns["accuracy"], first["accuracy"], comparisons) if number else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(wanted: Sequence[Column], columns: Mapping[str, Sequence[float | None]]) -> list[str]:
    broke = [int(value) for value in columns.get("broke", []) if value is not None]
    if broke and len(broke) == len(columns["accuracy"]):
        return [f"not a number after round {min(broke)}", *[""] * (len(wanted) - 1)]
    return [_cell(column, columns.get(column.key, [])) for column in wanted]


def _cell(column: Column, values: Sequence[float | None]) -> str:
    numbers = [column.scale * value for value in values if value is not None]
    if not numbers:
        return ""
    mean = statistics.fmean(numbers)
    tiny = column.shape == "g" and 0 < abs(mean) < 0.5 / 10**column.digits
    if column.shape == "e" or abs(mean) >= _MANY or tiny:
        return f"{mean:.1e}"
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
    lost = f" ({len(values) - len(numbers)} broke off)" if len(numbers) < len(values) else ""
    shown = f"{mean:.{column.digits}f}"
    return (f"{shown} ± {deviation:.{column.digits}f}" if deviation > 0 else shown) + lost


def _paired(values: Sequence[float | None], first: Sequence[float | None], comparisons: int) -> str:
    """The mean difference with a 95 % interval by Student's t over the seeds; bold where zero stays excluded when
    the interval is widened for all ``comparisons`` of the page together (Bonferroni)."""
    gaps = _gaps(values, first)
    if len(gaps) < 2:
        return f"{gaps[0]:+.1f}" if gaps else ""
    mean, error = statistics.fmean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps))
    shown = f"{mean:+.1f} ± {_quantile(len(gaps), 1) * error:.1f}"
    return f"**{shown}**" if abs(mean) > _quantile(len(gaps), comparisons) * error else shown


def _gaps(values: Sequence[float | None], first: Sequence[float | None]) -> list[float]:
    return [GAIN.scale * (a - b) for a, b in zip(values, first, strict=True) if a is not None and b is not None]


def _quantile(seeds: int, comparisons: int) -> float:
    """Half the width of a 95 % interval in standard errors."""
    return float(student.ppf(1 - 0.025 / comparisons, seeds - 1))


def count_comparisons(cases: Sequence[Case], results: Mapping[str, Any]) -> int:
    """The number of differences of accuracies on the page."""
    forms = [list(results[case.name]["forms"].values()) for case in cases if _compared(case, results)]
    return sum(bool(_gaps(one["accuracy"], some[0]["accuracy"])) for some in forms for one in some[1:])


def _compared(case: Case, results: Mapping[str, Any]) -> bool:
    return ACCURACY in case.columns and case.name in results


def filled(text: str, cases: Sequence[Case], results: Mapping[str, Any]) -> str:
    """The page with all tables filled in; a case without markers, or markers without a case, is an error."""
    wanted = re.findall(r"<!-- measured: ([\w-]+) -->", text)
    known = {case.name: case for case in cases}
    if sorted(wanted) != sorted(known):
        raise SystemExit(f"places on the page and cases differ: {sorted(set(wanted) ^ set(known))}")
    comparisons = max(1, count_comparisons(cases, results))
    for name, case in known.items():
        begin, end = f"<!-- measured: {name} -->", f"<!-- end: {name} -->"
        if name in results:
            before, _, rest = text.partition(begin)
            after = rest.partition(end)[2]
            text = f"{before}{begin}\n\n{table(case, results[name]['forms'], comparisons)}\n\n{end}{after}"
    return text


def read() -> dict[str, Any]:
    """The stored readings."""
    return dict(json.loads(STORE.read_text())) if STORE.exists() else {}


def write(results: Mapping[str, Any]) -> None:
    """Store the readings, one line per form and column."""
    STORE.parent.mkdir(exist_ok=True)
    text = json.dumps(results, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    STORE.write_text(text + "\n")

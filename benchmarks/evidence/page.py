"""The table of docs/report.md, from the stored figures."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.measuring import Figures, wrong
from benchmarks.evidence.worlds import World

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "report.md"
STORE = ROOT / "benchmarks" / "results" / "evidence.json"
CONTROLS = ("ten normal", "ten recorded")
"""Ways of drawing that err by themselves; shown, not judged."""
_BLOCK = re.compile(r"(<!-- measured: evidence -->\n).*?(\n<!-- end: evidence -->)", re.DOTALL)

Row = Mapping[str, Any]


def store(rows: Sequence[Row], repetitions: int) -> None:
    """Write the figures, and the page."""
    kept = {"command": "python -m benchmarks.evidence", "repetitions": repetitions, "worlds": [*rows]}
    text = json.dumps(kept, indent=1)
    STORE.write_text(re.sub(r"\n {3,}|\n  (?=\})", " ", text) + "\n")
    write()


def write() -> None:
    """Write the table of the page from the stored figures."""
    PAGE.write_text(filled(PAGE.read_text(), json.loads(STORE.read_text())))


def check() -> int:
    """1 where the page differs from the figures, or these miss a bound."""
    stored, text = json.loads(STORE.read_text()), PAGE.read_text()
    said = [f"{row['source']}, {row['name']}: {one}" for row in stored["worlds"] for one in misses(row)]
    if filled(text, stored) != text:
        said.append("docs/report.md differs from benchmarks/results/evidence.json; run 'python -m benchmarks.evidence'")
    print("\n".join(said), file=sys.stderr)
    return int(bool(said))


def misses(row: Row) -> list[str]:
    """The bounds that a stored row misses; controls have none."""
    world: dict[str, Any] = {**row, "truths": tuple(row["truths"])}
    figures = Figures(*(world.pop(name) for name in ("false", "covered", "right")))
    return [] if row["source"] in CONTROLS else wrong(World(**world), figures)


def filled(text: str, stored: Mapping[str, Any]) -> str:
    """The page with its table written again."""
    if not _BLOCK.search(text):
        raise SystemExit("docs/report.md has no place for the figures, from '<!-- measured: evidence -->' on")
    return _BLOCK.sub(lambda found: f"{found[1]}\n{table(stored)}\n{found[2]}", text)


def table(stored: Mapping[str, Any]) -> str:
    """One line per world: the range over seeds and sources."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in stored["worlds"]:
        kind = row["source"] if row["source"] in CONTROLS else "recorded" if row["source"] != "normal" else "normal"
        groups.setdefault((row["name"], kind), []).append(row)
    names = ("comparison", "differences", "seeds", "false verdicts", "intervals cover", "right verdicts")
    head = f"| {' | '.join(names)} |\n|{'---|' * len(names)}"
    lines = [f"| {name} | {kind} | {_seeds(rows)} | {_cells(rows)} |" for (name, kind), rows in groups.items()]
    return "\n".join([head, *lines])


def line(row: Row) -> str:
    """The figures of a row."""
    return f"{row['false']:6.1%} false, {row['covered']:6.1%} covered, {row['right']:6.1%} right"


def _seeds(rows: Sequence[Row]) -> str:
    return ", ".join(dict.fromkeys(f"{row['seeds']}{' and more' * (row['looks'] > 1)}" for row in rows))


def _cells(rows: Sequence[Row]) -> str:
    named = [_range(rows, name) for name in ("false", "covered")]
    return " | ".join([*named, _range(rows, "right") if any(rows[0]["truths"]) else ""])


def _range(rows: Sequence[Row], name: str) -> str:
    low, high = (f"{100 * pick(row[name] for row in rows):.1f}" for pick in (min, max))
    return f"{low} %" if low == high else f"{low} to {high} %"

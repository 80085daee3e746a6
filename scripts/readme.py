"""The figures of the README and of the site's first page, made from the code and the demo's runs:
``python scripts/readme.py [RUNS] [--check]``.

With a folder of runs (``make demo`` leaves ``runs/demo``), their results are stored in benchmarks/results/demo.json, a
line per run. The table of the README, the sentence under it and what the intervals mean are made from that file by the
code of ``fedalloy compare``. What is counted (methods, rules, vectors, corrections, claims) comes from the registry and
from the pages that list it; the first page has these counts too. ``--check`` writes nothing and fails when a page says
something else.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedalloy.core import registry
from fedalloy.results.conclusion import conclusion, notes
from fedalloy.results.evidence import Evidence
from fedalloy.results.outcome import RunOutcome
from fedalloy.results.redrawn import Drawn
from fedalloy.results.runs import read_outcomes
from fedalloy.results.table import ResultRow, leaders, summarise

ROOT = Path(__file__).resolve().parents[1]
PAGE, FIRST = ROOT / "README.md", ROOT / "docs" / "index.md"
STORE = ROOT / "benchmarks" / "results" / "demo.json"
BEGIN, END = "<!-- made by scripts/readme.py from the runs of make demo -->", "<!-- end -->"
COUNTS = "<!-- counts: made by scripts/readme.py -->", "<!-- end of counts -->"
VECTORS, DOCS = ROOT / "tests" / "vectors", ROOT / "docs"
COUNTED = """\
- **Checked methods.** {algorithm} methods, made of {weighting} weightings, {solver} solvers and {server} servers
  that combine freely. {cases} golden vectors, computed independently in float64, are replayed by `fedalloy conform`;
  every engine is compared with a plain loop.
- **Papers and their code compared.** {corrected} places where equations and public code do not agree, with what
  fedalloy does and what difference it makes ([corrections](docs/corrections.md)). Of {claims} published claims:
  {verdicts} ([results](docs/results/index.md))."""
KEPT = ("name", "seed", "state", "round", "rounds", "metric", "target", "reached", "higher_is_better")
SCORES = ("mean", "worst_served", "gini")


def main(arguments: list[str] | None = None) -> int:
    """Write or check both pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=Path, help="the folder of the demo's comparison")
    parser.add_argument("--check", action="store_true", help="fail when a page differs; write nothing")
    given = parser.parse_args(arguments)
    if given.runs:
        store(read_outcomes([given.runs]))
    made = {
        PAGE: filled(PAGE.read_text(encoding="utf-8"), stored()),
        FIRST: _between(FIRST.read_text(encoding="utf-8"), COUNTS, counted().replace("](docs/", "](")),
    }
    if given.check:
        return check(made)
    for page, text in made.items():
        page.write_text(text, encoding="utf-8")
    return 0


def check(made: Mapping[Path, str]) -> int:
    """1 where a page is not what the code and the stored runs give."""
    wrong = [page.name for page, text in made.items() if page.read_text(encoding="utf-8") != text]
    for name in wrong:
        print(f"{name} differs from the code or {STORE.name}: run 'python scripts/readme.py'", file=sys.stderr)
    return int(bool(wrong))


def store(runs: Sequence[RunOutcome]) -> None:
    """Keep what the table needs, a line per run; more than six digits would differ between machines by rounding."""
    lines = [json.dumps(_plain(run)) for run in runs]
    text = '{"command": "make demo", "runs": [\n ' + ",\n ".join(lines) + "\n]}\n"
    STORE.write_text(text, encoding="utf-8")


def stored() -> list[RunOutcome]:
    """The runs of the last demo that was stored."""
    runs: list[dict[str, Any]] = json.loads(STORE.read_text(encoding="utf-8"))["runs"]
    return [RunOutcome(**{**run, "drawn": _drawn(run["drawn"])}) for run in runs]


def filled(text: str, runs: Sequence[RunOutcome]) -> str:
    """The README with everything between its markers made again."""
    return _between(_between(text, (BEGIN, END), f"\n{block(runs)}\n"), COUNTS, counted())


def _between(text: str, markers: tuple[str, str], made: str) -> str:
    begin, end = markers
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise SystemExit(f"a page must have one place between '{begin}' and '{end}'")
    return pattern.sub(lambda found: f"{begin}\n{made}\n{end}", text)


def counted() -> str:
    """What there is, and how it was checked."""
    rules = {kind: len(registry.names(kind)) for kind in ("algorithm", "weighting", "solver", "server")}
    vectors = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(VECTORS.glob("*.json"))]
    cases = sum(len(one["cases"]) for one in vectors)
    corrected = len(re.findall(r"^### |^## .*: ", (DOCS / "corrections.md").read_text(encoding="utf-8"), re.MULTILINE))
    claims = re.search(
        r"^(\d+) claims .*: (.*)\.$", (DOCS / "results" / "index.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert claims, "the page of results begins with its counts"
    return COUNTED.format(**rules, cases=cases, corrected=corrected, claims=claims[1], verdicts=claims[2])


def block(runs: Sequence[RunOutcome]) -> str:
    """The sentence, the table, and what the intervals mean."""
    rows, first = summarise(runs), runs[0]
    head = ["", f"mean {first.metric}", "worst 10 %", "Gini", f"rounds to {first.target:g}"]
    head += [f"{first.metric} against {rows[0].name}", f"rounds against {rows[0].name}"]
    leading = leaders(rows)
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(_cells(row, row.name in leading))} |" for row in rows]
    about = " ".join(["Mean ± standard deviation over seeds.", *notes(runs)])
    return "\n\n".join([f"**{conclusion(runs)}**", "\n".join(lines), about])


def _cells(row: ResultRow, leads: bool) -> list[str]:
    mean = row.mean.text() if row.mean else ""
    spreads = [one.text() if one else "" for one in (row.worst_served, row.gini)]
    apart = [_apart(row.difference, 3), _apart(row.rounds_difference, 1)]
    return [row.name, f"**{mean}**" if leads else mean, *spreads, row.target_text, *apart]


def _apart(found: Evidence | None, digits: int) -> str:
    if found is None:
        return ""
    return f"{found.text(digits)} {found.word}" if found.decided else found.text(digits)


def _plain(run: RunOutcome) -> dict[str, Any]:
    scores = {name: float(f"{run.scores[name]:.6g}") for name in SCORES if name in run.scores}
    drawn = asdict(run.drawn) if run.drawn else {}
    drawn |= {name: drawn[name][:12] for name in ("partition", "examples", "test_rows") if drawn}
    return {**{name: getattr(run, name) for name in KEPT}, "scores": scores, "drawn": drawn or None}


def _drawn(found: dict[str, Any] | None) -> Drawn | None:
    return Drawn(**{**found, "chances": tuple(found["chances"])}) if found else None


if __name__ == "__main__":
    sys.exit(main())

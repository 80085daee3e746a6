"""One self-contained page about some runs: no network, no other file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from fedalloy.experiment.records import atomic
from fedalloy.report import assets, data, gains, sections, words
from fedalloy.report.context import ReportContext
from fedalloy.report.markup import plain_json
from fedalloy.results.summaries import RunSummary, gather, tunings
from fedalloy.tasks.metrics.direction import best

PARTS: dict[str, Callable[[ReportContext], str]] = {
    "Run": sections.what,
    "Results": sections.results,
    "Curves": sections.curves,
    "Clients": sections.clients,
    "Gains": gains.section,
    "Fairness": sections.fairness,
    "Weights": sections.weights,
    "Rules": sections.info,
    "Personal": sections.personal,
    "Pictures": sections.pictures,
    "Participation": sections.participation,
    "Data": sections.heterogeneity,
    "Cost": sections.cost,
    "Tuning": sections.tuning,
    "Reproduce": sections.reproduce,
}
"""The name of a section in the navigation bar, and the section."""
# The policy enforces that the page never uses the network.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="generator" content="fedalloy">
<link rel="icon" href="data:,">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header class="top"><div class="inner">
<span class="brand">fedalloy</span><nav aria-label="Sections" tabindex="0">$links</nav>
<button type="button" data-action="print">Print</button><button type="button" data-action="theme">Theme</button>
</div></header>
<main>
<h1>$title</h1>
$facts
$body
<footer class="soft">Made by fedalloy. Every chart has a table behind it and can be saved as CSV, SVG or PNG.</footer>
</main>
<script type="application/json" id="fedalloy-data">$data</script>
<script>$script</script>
</body>
</html>
""")
_PLACE = re.compile(r'<section id="([\w-]+)"')


def write_page(places: Sequence[Path], output: Path) -> int:
    """Write the page about the runs in some folders; returns the number of runs."""
    summaries = gather(places)
    output.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(output, page(summaries, tunings(places)))
    return len(summaries)


def page(summaries: Sequence[RunSummary], tried: Sequence[dict[str, Any]] = ()) -> str:
    """The page as text."""
    context = ReportContext(summaries, tried)
    parts = {short: made for short, section in PARTS.items() if (made := section(context))}
    links = "".join(_link(short, made) for short, made in parts.items())
    return PAGE.substitute(
        policy=POLICY, title=escape(words.title(summaries)), style=assets.style(), links=links, facts=_facts(context),
        body="\n".join(parts.values()), data=plain_json(context.to_json()), script=assets.script(),
    )  # fmt: skip


def _link(short: str, section: str) -> str:
    found = _PLACE.match(section)
    return f'<a href="#{found[1]}">{short}</a>' if found else ""


def _facts(context: ReportContext) -> str:
    """The key numbers."""
    rows, outcome = data.result_rows(context.summaries), context.summaries[0].outcome
    higher = outcome.higher_is_better
    done = sum(summary.outcome.finished for summary in context.summaries)
    facts = [
        _leader(f"Best mean {outcome.metric}", rows, "mean", higher),
        _leader("Best for the worst 10\u00a0%", rows, "worst_served", higher),
        _leader(f"Fewest rounds to {outcome.target:g}", rows, "rounds_to_target", False, 1)
        if outcome.target is not None
        else "",
        _fact("Runs", f"{done} of {len(context.summaries)}", "finished"),
    ]
    return f'<dl class="facts">{"".join(facts)}</dl>'


def _leader(label: str, rows: Sequence[dict[str, Any]], key: str, higher: bool | None, digits: int = 3) -> str:
    """The best algorithm; none for a metric without a direction."""
    if higher is None:
        return ""
    known = [row for row in rows if row[key] and row[key]["mean"] is not None]
    if not known:
        return _fact(label, "none", "no finished run has a value")
    leader = best(known, lambda row: float(row[key]["mean"]), higher)
    assert leader is not None
    return _fact(label, f"{leader[key]['mean']:.{digits}f}", leader["name"])


def _fact(label: str, value: str, about: str) -> str:
    return f'<div class="fact"><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(about)}</small></dd></div>'

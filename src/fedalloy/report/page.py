"""One self-contained page about some runs: no network, no other file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from fedalloy.experiment.records import atomic
from fedalloy.report import assets, gains, sections, verdicts, words
from fedalloy.report.context import ReportContext
from fedalloy.report.markup import plain_json
from fedalloy.results.looks import Look, read_looks
from fedalloy.results.summaries import RunSummary, gather, tunings

PARTS: dict[str, Callable[[ReportContext], str]] = {
    "Results": verdicts.results,
    "Curves": sections.curves,
    "Run": sections.what,
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
$verdict
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
    looks = read_looks(places[0]) if len(places) == 1 else []
    output.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(output, page(summaries, tunings(places), looks))
    return len(summaries)


def page(summaries: Sequence[RunSummary], tried: Sequence[dict[str, Any]] = (), looks: Sequence[Look] = ()) -> str:
    """The page as text; ``tried`` is what tuning tried, ``looks`` the recorded looks at the comparison."""
    context = ReportContext(summaries, tried, looks)
    parts = {short: made for short, section in PARTS.items() if (made := section(context))}
    links = "".join(_link(short, made) for short, made in parts.items())
    return PAGE.substitute(
        policy=POLICY, title=escape(words.title(summaries)), style=assets.style(), links=links,
        verdict=verdicts.first_line(context), facts=_facts(context), body="\n".join(parts.values()),
        data=plain_json(context.to_json()), script=assets.script(),
    )  # fmt: skip


def _link(short: str, section: str) -> str:
    found = _PLACE.match(section)
    return f'<a href="#{found[1]}">{short}</a>' if found else ""


def _facts(context: ReportContext) -> str:
    """The size of the comparison."""
    summaries = context.summaries
    done = sum(summary.outcome.finished for summary in summaries)
    facts = {
        "Runs": (f"{done} of {len(summaries)}", "finished"),
        "Seeds": (f"{len({summary.seed for summary in summaries})}", ""),
        "Clients": (_range(summary.population for summary in summaries), ""),
        "Rounds": (_range(summary.outcome.rounds for summary in summaries), ""),
    }
    return f'<dl class="facts">{"".join(_fact(label, *about) for label, about in facts.items())}</dl>'


def _range(counts: Iterable[int]) -> str:
    known = sorted(set(counts))
    return f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,} to {known[-1]:,}"


def _fact(label: str, value: str, about: str) -> str:
    return f'<div class="fact"><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(about)}</small></dd></div>'

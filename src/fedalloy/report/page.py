"""One page about some runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.records import atomic
from fedalloy.report import federations, gains, searches, sections, verdicts, words
from fedalloy.report.context import ReportContext
from fedalloy.report.document import document
from fedalloy.results.federations import read_federations
from fedalloy.results.looks import Look, looks_in
from fedalloy.results.summaries import RunSummary, advices, gather, tunings

PARTS: dict[str, Callable[[ReportContext], str]] = {
    "Advice": searches.advice,
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
    "Tuning": searches.tuning,
    "Reproduce": sections.reproduce,
}
"""The name of a section in the navigation bar, and the section."""


def write_page(places: Sequence[Path], output: Path) -> int:
    """Write the page about the runs in some folders; returns the number of runs.

    Several comparisons with common algorithms are federations (:mod:`fedalloy.report.federations`).
    """
    if output.is_dir():
        raise CheckpointError(f"{output} is a folder: name the file of the page, such as {output / 'report.html'}")
    several = read_federations(places)
    if several is not None:
        text, count = federations.page(several), sum(len(one.outcomes) for one in several.all)
    else:
        summaries = gather(places)
        text, count = page(summaries, tunings(places), looks_in(places), advices(places)), len(summaries)
    output.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(output, text)
    return count


def page(
    summaries: Sequence[RunSummary],
    tried: Sequence[dict[str, Any]] = (),
    looks: Sequence[Look] = (),
    advised: Sequence[dict[str, Any]] = (),
) -> str:
    """The page as text; ``tried`` is what tuning tried, ``looks`` the recorded looks at the comparison, ``advised``
    the answers of an advice."""
    context = ReportContext(summaries, tried, looks, advised)
    parts = {short: made for short, section in PARTS.items() if (made := section(context))}
    verdict = verdicts.first_line(context)
    return document(words.title(summaries), verdict, _facts(summaries), parts, context.to_json())


def _facts(summaries: Sequence[RunSummary]) -> dict[str, tuple[str, str]]:
    """The size of the comparison."""
    done = sum(summary.outcome.finished for summary in summaries)
    return {
        "Runs": (f"{done} of {len(summaries)}", "finished"),
        "Seeds": (str(len({summary.seed for summary in summaries})), ""),
        "Clients": (_range(summary.population for summary in summaries), ""),
        "Rounds": (_range(summary.outcome.rounds for summary in summaries), ""),
    }


def _range(counts: Iterable[int]) -> str:
    known = sorted(set(counts))
    return f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,} to {known[-1]:,}"

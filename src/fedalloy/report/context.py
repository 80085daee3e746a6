"""The contents of a report: run summaries, charts and texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedalloy.experiment.records import toml
from fedalloy.report import data, words
from fedalloy.report.data.personal import reliabilities
from fedalloy.report.data.plain import Chart
from fedalloy.results.conclusion import conclusion
from fedalloy.results.gains import client_gains
from fedalloy.results.looks import Look
from fedalloy.results.runs import by_name
from fedalloy.results.summaries import RunSummary

MOST_SWITCHED = 12
"""Algorithms whose weights a report holds; each is a heat map of up to 40,000 cells."""


@dataclass
class ReportContext:
    """``charts`` by key: a section names 'weights-0', and the page's script finds the chart under that key."""

    summaries: Sequence[RunSummary]
    tunings: Sequence[dict[str, Any]] = ()
    looks: Sequence[Look] = ()
    advices: Sequence[dict[str, Any]] = ()
    charts: dict[str, Chart] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.styles = data.styles(self.summaries)
        self.gains = client_gains(self.summaries, self.summaries[0].metric)
        self.conclusion = conclusion([summary.outcome for summary in self.summaries], self.looks)
        self.words = words.summary(self.summaries)
        self.recipe = words.common_recipe(self.summaries)
        self._collect()

    def group(self, name: str) -> list[str]:
        """The keys of a numbered group of charts."""
        return [key for key in self.charts if key.rpartition("-")[0] == name]

    def recipe_of(self, run_summary: RunSummary) -> str:
        """The recipe of one run."""
        return toml.dumps(run_summary.recipe)

    def to_json(self) -> dict[str, Any]:
        """The data for the page's script."""
        return {"styles": self.styles, "charts": self.charts}

    def _collect(self) -> None:
        summaries = self.summaries
        single = {"curves": data.curves(summaries), "train-loss": data.losses(summaries),
                  "distribution": data.distribution(summaries), "heterogeneity": data.heterogeneity(summaries),
                  "gains": data.sorted_gains(self.gains), "lambda": data.mixture(summaries)}  # fmt: skip
        self.charts |= {key: chart for key, chart in single.items() if chart}
        firsts = [runs[0] for runs in by_name(summaries).values()]
        reliable, self.missing = reliabilities(summaries)
        self._number("weights", [data.weights(run_summary) for run_summary in firsts[:MOST_SWITCHED]])
        self._number("info", data.info_charts(summaries))
        self._number("participation", data.participation(summaries))
        self._number("cost", data.cost_bars(summaries))
        self._number("reliability", reliable)
        self._number("pictures", [data.pictures(run_summary) for run_summary in firsts[:MOST_SWITCHED]])

    def _number(self, group: str, charts: Sequence[Chart | None]) -> None:
        self.charts |= {f"{group}-{place}": chart for place, chart in enumerate(filter(None, charts))}

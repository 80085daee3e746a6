"""The progress of a comparison in a notebook: how many of its runs have ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedalloy.experiment.notebook import Bar
from fedalloy.studies.compare.jobs import JobNews


@dataclass
class JobsBar:
    """A bar of ended runs, with the newest news beside it; ``total`` is None if nobody knows how many there will be."""

    total: int | None
    _done: int = field(default=0, init=False)
    _bar: Bar = field(default_factory=Bar, init=False, repr=False)

    def __call__(self, news: JobNews) -> None:
        """Show what has happened."""
        self._done += news.kind != "round"
        said = f"round {news.round} of {news.rounds}" if news.kind == "round" else news.text or news.kind
        last = self.total is not None and self._done >= self.total
        self._bar.show(self._done, self.total or self._done, f"{news.job.name}, seed {news.job.seed}: {said}", last)

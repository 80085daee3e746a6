"""One comparison on several federations: differences to the first algorithm on each, and average ranks over all.

A federation is a folder of ``fedalloy compare``: the same algorithms on other data, clients or devices. Federations,
not seeds, are what ranks are averaged over (Demsar, 2006: Statistical comparisons of classifiers over multiple data
sets).
"""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedalloy.core.errors import SpecError
from fedalloy.experiment.records.reading import QUICK
from fedalloy.results.against_first import means_apart, values_by_seed
from fedalloy.results.evidence import FEWEST_PAIRS, Evidence, PairedDifferences, compare_together
from fedalloy.results.looks import alpha_of, looks_until, read_looks
from fedalloy.results.outcome import RunOutcome
from fedalloy.results.redrawn import redrawn
from fedalloy.results.runs import by_name, order_of, read_outcomes
from fedalloy.results.statistics import ALPHA

if TYPE_CHECKING:
    import numpy as np

FEWEST_FEDERATIONS = 10
"""Fewer federations have no ranks: Friedman's statistic has its distribution only from about ten data sets on."""


@dataclass(frozen=True)
class ComparedFederation:
    """The runs of the common algorithms in one folder; ``alpha`` is the share of errors of this look at the folder,
    smaller where somebody looked with fewer seeds before."""

    name: str
    folder: Path
    groups: dict[str, list[RunOutcome]]
    alpha: float = alpha_of(1)

    @property
    def outcomes(self) -> list[RunOutcome]:
        """All runs."""
        return [run for runs in self.groups.values() for run in runs]

    @property
    def seeds(self) -> list[int]:
        """The seeds with a value of every algorithm."""
        known = [{seed for seed, value in values_by_seed(runs).items() if not math.isnan(value)}
                 for runs in self.groups.values()]  # fmt: skip
        return sorted(set.intersection(*known))

    @property
    def scores(self) -> list[float]:
        """The mean of every algorithm over the seeds that all have; NaN without such a seed."""
        seeds = self.seeds
        values = [values_by_seed(runs) for runs in self.groups.values()]
        return [statistics.fmean(some[seed] for seed in seeds) if seeds else math.nan for some in values]


@dataclass(frozen=True)
class Ranks:
    """Average ranks over federations, 1 for the best; two that differ by more than ``critical`` differ (Nemenyi).

    ``p`` is that of Friedman's test of all ranks being equal, in the form of Iman and Davenport (the sign test for two
    algorithms); where it does not reject, no two algorithms are told apart. ``left_out`` are federations in which some
    algorithm has no score.
    """

    names: tuple[str, ...]
    averages: tuple[float, ...]
    critical: float
    p: float
    federations: int
    left_out: tuple[str, ...]

    @property
    def rejected(self) -> bool:
        """Whether the ranks are not all equal, at 95 %."""
        return self.p < ALPHA

    def against(self, first: str) -> str:
        """A sentence about the algorithms that are told apart from the first one."""
        own = dict(zip(self.names, self.averages, strict=True))
        gaps = {name: rank - own[first] for name, rank in own.items()}
        told = [name for name, gap in gaps.items() if self.rejected and abs(gap) > self.critical]
        over = f"Over {self.federations} federations together"
        if not told:
            return f"{over}, no algorithm ranks better or worse than {first} at 95 %."
        said = [f"{name} ranks {'worse' if gaps[name] > 0 else 'better'} ({own[name]:.2f})" for name in told]
        return f"{over}, {' and '.join(said)} than {first} ({own[first]:.2f}) at 95 %."

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The largest sets of algorithms that are not told apart, best first; each has at least two."""
        order = sorted(zip(self.averages, self.names, strict=True))
        if not self.rejected:
            return [tuple(name for _, name in order)]
        spans = [[name for rank, name in order[place:] if rank - order[place][0] <= self.critical]
                 for place in range(len(order))]  # fmt: skip
        last = 0
        found = []
        for place, some in enumerate(spans):
            if len(some) > 1 and place + len(some) > last:
                found.append(tuple(some))
            last = max(last, place + len(some))
        return found


@dataclass(frozen=True)
class Federations:
    """Several federations with the same algorithms, metric and first algorithm; ``left_out`` are algorithms that not
    all of them have."""

    names: tuple[str, ...]
    metric: str
    higher_is_better: bool | None
    all: tuple[ComparedFederation, ...]
    left_out: tuple[str, ...] = ()

    @property
    def first(self) -> str:
        """The algorithm that the others are compared with."""
        return self.names[0]

    @property
    def unfinished(self) -> int:
        """How many runs have not ended."""
        return sum(not run.ended for one in self.all for run in one.outcomes)

    @property
    def quick(self) -> bool:
        """Whether some runs were shortened."""
        return any(run.quick for one in self.all for run in one.outcomes)

    def differences(self) -> dict[tuple[str, str], Evidence]:
        """The evidence by federation and algorithm; all of them are one family."""
        asked = {(one.name, name): found for one in self.all for name, found in _asked(one).items() if found.values}
        found = compare_together(list(asked.values()), min(one.alpha for one in self.all))
        if self.unfinished:
            found = [replace(one, outcome="not finished") for one in found]
        return dict(zip(asked, found, strict=True))

    @property
    def ranked(self) -> list[ComparedFederation]:
        """The federations in which every algorithm has a score."""
        return [one for one in self.all if not any(map(math.isnan, one.scores))]

    def conclusion(self, found: Mapping[tuple[str, str], Evidence]) -> str:
        """The first line: on how many federations every algorithm is better and worse; or why nobody can say."""
        runs = [run for one in self.all for run in one.outcomes]
        if self.unfinished:
            return f"No verdict yet: {self.unfinished} of {len(runs)} runs did not finish."
        if self.quick:
            return "No verdict: the runs were shortened (--quick)."
        if not any(one.pairs >= FEWEST_PAIRS for one in found.values()):
            return f"No verdict: no federation has {FEWEST_PAIRS} seeds of {self.first} and of another algorithm."
        apart = [self._counted(name, found) for name in self.names[1:] if self._outcomes(name, found).total()]
        alike = f"No algorithm differs from {self.first} in {self.metric} on any of {len(self.all)} federations at 95 %"
        ranks = self.ranks()
        said = [f"{'; '.join(apart) or alike}.", ranks.against(self.first) if ranks else "", self.shared, self._failed]
        return " ".join(filter(None, said))

    @property
    def shared(self) -> str:
        """A sentence about federations that hold the same examples; empty where each has its own."""
        first = [next((run.drawn.examples for run in one.outcomes if run.drawn), "") for one in self.all]
        most = max(Counter(filter(None, first)).values(), default=0)
        if most < 2:
            return ""
        return f"But {most} of the federations hold the same examples, so their answers are not independent."

    @property
    def _failed(self) -> str:
        lost = Counter(run.name for one in self.all for run in one.outcomes if run.state == "failed")
        told = ", ".join(f"{count} {'run' if count == 1 else 'runs'} of {name}" for name, count in lost.items())
        return f"Failed, which is worse than any result: {told}." if lost else ""

    def _outcomes(self, name: str, found: Mapping[tuple[str, str], Evidence]) -> Counter[str]:
        """On how many federations an algorithm has which verdict."""
        known = (found[one.name, name] for one in self.all if (one.name, name) in found)
        return Counter(one.outcome for one in known if one.decided)

    def _counted(self, name: str, found: Mapping[tuple[str, str], Evidence]) -> str:
        count = self._outcomes(name, found)
        said = ", ".join(f"{way} on {times}" for way, times in sorted(count.items()))
        rest = len(self.all) - count.total()
        over = f"of {len(self.all)} federations" + (f", undecided on {rest}" if rest else "")
        return f"{name} against {self.first} in {self.metric} at 95 %: {said} {over}"

    def ranks(self) -> Ranks | None:
        """Average ranks; None with fewer than ten federations, of open or shortened runs, and without a direction."""
        known = self.ranked
        if len(known) < FEWEST_FEDERATIONS or self.unfinished or self.quick or self.higher_is_better is None:
            return None
        rest = tuple(one.name for one in self.all if one not in known)
        return _ranks(self.names, [one.scores for one in known], self.higher_is_better, rest)


def critical_difference(algorithms: int, federations: int, alpha: float = ALPHA) -> float:
    """Nemenyi's critical difference of average ranks (Demsar, 2006, section 3.2.2).

    >>> round(critical_difference(5, 30), 4)
    1.1136
    """
    from scipy import stats

    q = stats.studentized_range.isf(alpha, algorithms, math.inf) / math.sqrt(2)
    return float(q * math.sqrt(algorithms * (algorithms + 1) / (6 * federations)))


def read_federations(places: Sequence[Path]) -> Federations | None:
    """The comparisons in several folders as federations; None where the folders are no comparisons with common
    algorithms, but runs to be shown side by side."""
    check_places(places)
    orders = [order_of([place]) for place in places]
    if len(places) < 2 or not all(orders):
        return None
    common = [name for name in orders[0] if all(name in order for order in orders)]
    if not common:
        return None
    for place, order in zip(places, orders, strict=True):
        if order[0] != orders[0][0]:
            raise SpecError(
                f"{place} compares with '{order[0]}' and {places[0]} with '{orders[0][0]}': the first algorithm must "
                "be the same on every federation"
            )
    if len(common) < 2:
        raise SpecError(f"the folders have only '{common[0]}' in common: there is nothing to compare it with")
    found = [_read(place, label, common) for place, label in zip(places, _labels(places), strict=True)]
    _check_alike(found)
    some = found[0].outcomes[0]
    rest = dict.fromkeys(name for order in orders for name in order if name not in common)
    return Federations(tuple(common), some.metric, some.higher_is_better, tuple(found), tuple(rest))


def check_places(places: Sequence[Path]) -> None:
    """Refuse a folder that is named twice."""
    twice = [place for place, count in Counter(map(os.path.realpath, places)).items() if count > 1]
    if twice:
        raise SpecError(f"{twice[0]} is named twice: name every folder once")


def _read(place: Path, label: str, common: Sequence[str]) -> ComparedFederation:
    outcomes = read_outcomes([place])
    groups, looks = by_name(outcomes), looks_until(outcomes, read_looks(place))
    bare = {name.removesuffix(QUICK): runs for name, runs in groups.items()}
    missing = [name for name in common if name not in bare]
    if missing:
        raise SpecError(f"{place} has no run of '{missing[0]}' yet: fedalloy compare continues there")
    return ComparedFederation(label, place, {name: bare[name] for name in common}, alpha_of(len(looks)))


def _labels(places: Sequence[Path]) -> list[str]:
    """The names of the folders; with the folders above them where that is needed to tell them apart."""
    paths = [Path(os.path.realpath(place)) for place in places]
    if len({path.name for path in paths}) == len(paths):
        return [path.name for path in paths]
    common = os.path.commonpath(paths)
    return [path.relative_to(common).as_posix() for path in paths]


def _check_alike(found: Sequence[ComparedFederation]) -> None:
    """The same metric in the same direction everywhere, and no comparison under two names."""
    first = found[0].outcomes[0]
    for one in found:
        for run in one.outcomes:
            if (run.metric, run.higher_is_better) != (first.metric, first.higher_is_better):
                raise SpecError(
                    f"{one.name} is scored by '{run.metric}' ({_direction(run)}), {found[0].name} by '{first.metric}' "
                    f"({_direction(first)}): ranks and differences need one metric (run.target_metric)"
                )
            if run.ends_at_target:
                raise SpecError(
                    f"the runs of {one.name} end when they reach their target (run.stop_at_target): their scores are "
                    "those of that round and cannot be compared"
                )
    seen: dict[tuple[object, ...], str] = {}
    for one in found:
        runs = tuple((run.name, run.seed, tuple(run.scores.items())) for run in one.outcomes)
        if any(run.scores for run in one.outcomes) and (other := seen.setdefault(runs, one.name)) != one.name:
            raise SpecError(f"{one.name} and {other} hold the same runs: a federation must not count twice")


def _direction(run: RunOutcome) -> str:
    return {True: "higher is better", False: "lower is better", None: "no direction"}[run.higher_is_better]


def _asked(one: ComparedFederation) -> dict[str, PairedDifferences]:
    first, *others = one.groups.items()
    shared = redrawn(run.drawn for run in first[1])
    return {name: means_apart(runs, first[1], shared.reused if shared else 0.0) for name, runs in others}


def _ranks(names: Sequence[str], scores: Sequence[Sequence[float]], higher: bool, rest: tuple[str, ...]) -> Ranks:
    import numpy as np
    from scipy import stats

    sign = -1.0 if higher else 1.0
    ranks = stats.rankdata(sign * np.array(scores), axis=1)
    count, size = ranks.shape
    critical = critical_difference(size, count)
    return Ranks(tuple(names), tuple(ranks.mean(0).tolist()), critical, _iman_davenport(ranks), count, rest)


def _iman_davenport(ranks: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """The p of equal average ranks; the sign test for two algorithms."""
    from scipy import stats

    count, size = ranks.shape
    if size == 2:
        apart = ranks[:, 0] - ranks[:, 1]
        wins, decided = int((apart < 0).sum()), int((apart != 0).sum())
        return float(stats.binomtest(wins, decided).pvalue) if decided else 1.0
    if (ranks == ranks.mean()).all():  # all tied everywhere
        return 1.0
    chi2 = float(stats.friedmanchisquare(*ranks.T).statistic)
    rest = count * (size - 1) - chi2
    return float(stats.f.sf((count - 1) * chi2 / rest, size - 1, (size - 1) * (count - 1))) if rest > 0 else 0.0

"""How a time budget is divided: rounds, trials per stage, methods that go on, and seeds that are reported.

Seconds are those of all processes together. Nothing here uses the clock: the same numbers give the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FEWEST_SEEDS, MOST_SEEDS = 4, 12
_FIRST, _MOST_TRIALS, _FINALISTS, _FEWEST_METHODS = 3, 24, 2, 3
_RESERVED_SEEDS = 8
"""So many seeds must stay affordable when more trials are planned: with four an interval is half as wide again."""
_STOPPED = 0.6
"""The share of its rounds that a trial runs on average, where those that fall behind are stopped."""
_FEWEST_ROUNDS = 9
"""With fewer rounds there is nothing to be stopped early."""
_TO_PILOT = 0.6
"""The share of the time that is spent on choosing; the rest is for the runs that decide."""


@dataclass(frozen=True)
class Speed:
    """Measured on a short run of FedAvg: seconds before the first round, of a round, and of an evaluation."""

    start: float
    round: float
    evaluation: float

    def run(self, rounds: int, every: int, work: float = 1.0) -> float:
        """The seconds of a run, with ``work`` times the local work.

        >>> Speed(1.0, 0.5, 0.25).run(10, 5)
        6.5
        """
        return self.start + rounds * self.round * work + -(-rounds // every) * self.evaluation


def rounds_within(
    speed: Speed, rounds: int, every: int, works: Sequence[float], seconds: float, tuning: int = 2
) -> tuple[int, int]:
    """The rounds of a run and between evaluations that the least pilot affords: all of them, or as many as fit. A trial
    has a run for each of the ``tuning`` seeds.

    >>> rounds_within(Speed(0.0, 1.0, 0.0), 100, 10, [1.0, 2.0], 10_000.0)
    (100, 10)
    >>> rounds_within(Speed(0.0, 1.0, 0.0), 100, 10, [1.0, 2.0], 500.0)
    (21, 2)
    """
    runs = [work * tuning * _FIRST * _STOPPED for work in works]
    runs += [work * FEWEST_SEEDS for work in sorted(works)[: _FINALISTS + 1]]

    def fits(count: int) -> bool:
        often = _every(count, rounds, every, speed)
        each = speed.run(count, often) - count * speed.round
        return (
            sum(runs) * count * speed.round + (len(works) * tuning * _FIRST + _FINALISTS * FEWEST_SEEDS) * each
            <= seconds
        )

    least = min(rounds, _FEWEST_ROUNDS)
    found = next((count for count in range(rounds, least, -1) if fits(count)), least)
    return found, _every(found, rounds, every, speed)


def _every(count: int, rounds: int, every: int, speed: Speed) -> int:
    """Evaluations of shortened runs: nine of them, for comparisons after a ninth and a third; four, after a quarter and
    three quarters, where one takes longer than two rounds."""
    parts = 4 if speed.evaluation > 2 * speed.round else 9
    return every if count == rounds else max(1, min(every, count // parts))


def affordable(cost: Mapping[str, float], seconds: float) -> list[str]:
    """The methods, in their order, of which every one can have a trial in the time of the first stage: at least three.

    >>> affordable({"fedavg": 10.0, "fedavg_ft": 20.0, "ditto": 40.0, "apfl": 20.0}, 100.0)
    ['fedavg', 'fedavg_ft', 'ditto']
    """
    names: list[str] = []
    spent = 0.0
    for name, one in cost.items():
        spent += one
        if len(names) < _FEWEST_METHODS or spent <= (1 - kept_after(1)) * seconds:
            names.append(name)
    return names


def first_trials(cost: Mapping[str, float], seconds: float) -> int:
    """The trials of every method in the first stage, from the seconds of a trial of each.

    >>> first_trials({"fedavg": 2.0, "ditto": 6.0}, 80.0), first_trials({"fedavg": 100.0}, 10.0)
    (5, 3)
    """
    affordable = _TO_PILOT / 2 * seconds / (_STOPPED * sum(cost.values()))
    return max(_FIRST, min(_MOST_TRIALS // 2, int(affordable)))


def further_trials(
    before: int, cost: Mapping[str, float], finalists: Sequence[float], seconds: float, last: bool
) -> int | None:
    """The trials of every method after a further stage, from those before; None if there is no time for another one.

    ``cost`` are the seconds of a trial, ``finalists`` those of a run of the methods that could be reported.
    """
    spare = seconds - _RESERVED_SEEDS * sum(finalists)
    more = int((1.0 if last else 0.5) * spare * 0.9 / max(sum(cost.values()), 1e-9)) if cost else 0
    wanted = min(before + more, 2 * before, _MOST_TRIALS)
    return wanted if wanted > before else None


def kept_after(stage: int) -> float:
    """The share of the time that a stage must leave to the following ones and to the runs that decide.

    >>> kept_after(1), kept_after(3)
    (0.6, 0.4)
    """
    return 1 - _TO_PILOT * (2 / 3 if stage == 1 else 1.0)


def survivors(order: Sequence[str], stage: int) -> list[str]:
    """The better half of the methods after a stage, best first; two after the last one.

    >>> survivors(["a", "b", "c", "d", "e"], 1), survivors(["a", "b", "c"], 2)
    (['a', 'b', 'c'], ['a', 'b'])
    """
    return list(order[: max(_FINALISTS, -(-len(order) // 2))]) if stage == 1 else list(order[:_FINALISTS])


def reported_seeds(cost: float, seconds: float) -> int:
    """How many seeds are reported, from the seconds of one run of every finalist.

    >>> reported_seeds(1.0, 7.9), reported_seeds(10.0, 5.0), reported_seeds(0.1, 100.0)
    (7, 4, 12)
    """
    return max(FEWEST_SEEDS, min(MOST_SEEDS, int(seconds / max(cost, 1e-9))))

"""The first line about a comparison: what its evidence decides, in a sentence.

>>> from fedalloy.results.outcome import RunOutcome
>>> scores = {"fedavg": (0.90, 0.91, 0.92), "scaffold": (0.95, 0.97, 0.97), "fednova": (0.91, 0.91, 0.95)}
>>> runs = [RunOutcome(name, seed, "finished", scores={"mean": one}) for name in scores
...         for seed, one in enumerate(scores[name])]
>>> print(conclusion(runs))
scaffold beats fedavg in accuracy at 95 % over 3 seeds. About 13 more seeds would decide fednova.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from fedalloy.results.evidence import FEWEST_PAIRS, Evidence, seeds_to_decide
from fedalloy.results.looks import Look, alpha_of, looks_until
from fedalloy.results.outcome import RunOutcome
from fedalloy.results.redrawn import redrawn
from fedalloy.results.table import ResultRow, summarise

MOST_SAID = 100
"""More seeds than this are not proposed."""
_REASONS = {
    "Holm": "(Holm): decided although the interval covers zero, because Holm tests one by one and intervals all.",
    "ranks": "(ranks): decided although the interval of the median covers zero, because ranks also weigh sizes.",
}


def conclusion(outcomes: Sequence[RunOutcome], recorded: Sequence[Look] = ()) -> str:
    """Which algorithms beat the first, which are worse, which need how many more seeds; or why nobody can say."""
    rows = summarise(outcomes, recorded)
    metric = outcomes[0].metric if outcomes else ""
    number = len(looks_until(outcomes, recorded)) if outcomes else 1
    return _nothing(rows, outcomes) or " ".join(_sentences(rows, metric, number))


def notes(outcomes: Sequence[RunOutcome], recorded: Sequence[Look] = ()) -> list[str]:
    """What stands under the table: what the intervals are and what decides, the looks, and what a seed redraws."""
    found = _differences(outcomes, recorded)
    shared = redrawn(run.drawn for run in outcomes if run.name == outcomes[0].name)
    said = [about] if (about := intervals(outcomes, recorded)) else []
    if any(run.ends_at_target for run in outcomes):
        said.append("The runs end when they reach the target: their scores are those of that round and not compared.")
    said += [text for reason, text in _REASONS.items() if any(one.reason == reason for one in found)]
    if any(one.ranked for one in found):
        said.append(
            "Where a run failed or never reached the target, or all differences are equal, ranks decide and the median "
            "is shown; a run that failed is worse than any that finished."
        )
    return [*said, *_lengths(outcomes), *([shared.text] if shared else [])]


def intervals(outcomes: Sequence[RunOutcome], recorded: Sequence[Look] = ()) -> str:
    """What the intervals of a table are, what decides, and which looks there were; empty where there are none."""
    found = _differences(outcomes, recorded)
    return _about(found[0], looks_until(outcomes, recorded)) if any(one.pairs > 1 for one in found) else ""


def _differences(outcomes: Sequence[RunOutcome], recorded: Sequence[Look]) -> list[Evidence]:
    rows = summarise(outcomes, recorded)
    return [one for row in rows for one in (row.difference, row.rounds_difference) if one]


def _lengths(outcomes: Sequence[RunOutcome]) -> list[str]:
    """The planned rounds by name, where they differ."""
    rounds = {run.name: run.rounds for run in outcomes if run.finished}
    if len(set(rounds.values())) < 2:
        return []
    return [f"Not all are equally long: {', '.join(f'{name} {count} rounds' for name, count in rounds.items())}."]


def _about(one: Evidence, looks: Sequence[Look]) -> str:
    """The intervals, and the looks before this one."""
    intervals = f"{one.family} simultaneous intervals" if one.family > 1 else "one interval"
    said = f"Differences: paired by seed, {intervals} at {_percent(1 - one.alpha)}; verdicts follow Holm."
    if len(looks) == 1:
        return f"{said} The rest of the 5 % is kept for later looks at more seeds."
    before = "; ".join(f"seeds {', '.join(map(str, look.seeds))}" for look in looks[:-1])
    return f"{said} This is look {len(looks)}, after {before}: it has {_percent(one.alpha)} of the 5 % of all looks."


def _nothing(rows: Sequence[ResultRow], outcomes: Sequence[RunOutcome]) -> str:
    """Why there is no verdict; empty where there can be one."""
    if len(rows) < 2:
        return "No verdict: there is one algorithm; name another one to compare it with." if rows else "No runs."
    first, others = rows[0], [one for row in rows[1:] for one in (row.difference, row.rounds_difference) if one]
    if open_ones := sum(not run.ended for run in outcomes):
        return f"No verdict yet: {_count(open_ones, 'run')} of {len(outcomes)} did not finish."
    if not first.mean:
        why = f" ({first.failed[0].reason})" if first.failed and first.failed[0].reason else ""
        return f"No verdict: no run of {first.name}, with which the others are compared, finished with a value{why}."
    if not others:
        return f"No verdict: no seed has a value of {first.name} and of another algorithm.{_failures(rows)}"
    if any(run.quick for run in outcomes):
        return "No verdict: the runs were shortened (--quick)."
    if (most := max(one.pairs for one in others)) < FEWEST_PAIRS:
        return f"No verdict over {_count(most, 'seed')}: one needs at least {FEWEST_PAIRS}.{_failures(rows)}"
    return ""


def _sentences(rows: Sequence[ResultRow], metric: str, look: int) -> Iterable[str]:
    first, others = rows[0].name, rows[1:]
    pairs = [one.pairs for row in others if (one := row.difference or row.rounds_difference)]
    seeds = [one for one in pairs if one >= FEWEST_PAIRS]
    level = f"at 95 % over {_range(seeds)} seeds" + (f" (look {look}, at {_percent(1 - alpha_of(look))})" * (look > 1))
    compared = [row for row in others if row.difference]
    about = [clause for row in others if (clause := _rounds(row, rows[0]))]
    if compared:
        yield "; ".join([_main(compared, first, metric, level), *about]) + "."
    else:  # the runs end at the target: there are only rounds to compare
        yield f"{'; '.join(about) or f'No method reaches the target sooner than {first}'} {level}."
    if more := more_seeds(rows, look, metric):
        yield more
    if failed := _failures(rows):
        yield failed.strip()


def _main(rows: Sequence[ResultRow], first: str, metric: str, level: str) -> str:
    """The clause about the mean."""
    by = {outcome: [_named(row) for row in rows if row.difference and row.difference.outcome == outcome]
          for outcome in ("better", "worse", "higher", "lower")}  # fmt: skip
    if rows[0].higher_is_better is None:
        said = [f"{_listed(by[way])} {_verb(by[way], 'has', 'have')} {a} {way} {metric} than {first}"
                for way, a in (("higher", "a"), ("lower", "a")) if by[way]]  # fmt: skip
        return f"{'; '.join(said)} {level}" if said else f"No method differs from {first} in {metric} {level}"
    better, worse = by["better"], by["worse"]
    head = f"{_listed(better)} {_verb(better, 'beats', 'beat')}" if better else "No method beats"
    tail = f"; {_listed(worse)} {_verb(worse, 'is', 'are')} worse" if worse else ""
    return f"{head} {first} in {metric} {level}{tail}"


def _named(row: ResultRow) -> str:
    """The name, and which look decided if it was not this one."""
    earlier = row.difference.earlier if row.difference else ""
    return f"{row.name} ({earlier})" if earlier else row.name


def _rounds(row: ResultRow, first: ResultRow) -> str:
    """The clause about an algorithm's rounds to the target, if they are decided."""
    found = row.rounds_difference
    if found is None or not found.decided:
        return ""
    sooner = found.outcome == "better"
    if found.decided_on is not None:  # the numbers are those of this look, which does not decide
        return f"{row.name} reaches {row.target:g} {'sooner' if sooner else 'later'} ({found.earlier})"
    if not found.estimate or not math.isfinite(found.estimate):
        never = first if sooner else row
        missing = len(never.seeds) - never.reached
        why = f" ({never.name} did not reach it with {missing} of {len(never.seeds)} seeds)" if missing else ""
        return f"{row.name} reaches {row.target:g} {'sooner' if sooner else 'later'}{why}"
    return f"{row.name} needs {_apart(found.estimate)} to reach {row.target:g}{_interval(found)}"


def _interval(found: Evidence) -> str:
    """The interval of a number of rounds, without a sign where it is on one side."""
    low, high = sorted((found.low, found.high), key=abs)
    if not math.isfinite(high):
        return f" (at least {abs(low):.3g})" if math.isfinite(low) and not found.reason else ""
    if found.low <= 0 <= found.high:
        return f" (from {_apart(found.low)} to {_apart(found.high)})"
    return f" ({abs(low):.3g} to {abs(high):.3g})"


def _apart(rounds: float) -> str:
    return f"{_count(abs(rounds), 'round')} {'fewer' if rounds < 0 else 'more'}"


def more_seeds(rows: Sequence[ResultRow], look: int, metric: str) -> str:
    """How many more seeds would decide the means that are not decided at this look, or the rounds where runs end at the
    target; empty where all are. The metric is named where rounds are decided, which would seem to say otherwise."""
    asked = {row.name: one for row in rows[1:] if (one := row.difference or row.rounds_difference) and not one.decided}
    alike = [name for name, one in asked.items() if one.estimate == one.deviation == 0]
    needed = {name: seeds_to_decide(one, alpha_of(look + 1)) for name, one in asked.items() if name not in alike}
    also = {row.name for row in rows[1:] if row.difference and row.rounds_difference and row.rounds_difference.decided}
    of = f" in {metric}" if also & {*asked} else ""
    same = f"{_listed(alike)} {_verb(alike, 'equals', 'equal')} {rows[0].name}{of} in every run." if alike else ""
    proposed = _proposed(rows, needed)
    return " ".join(filter(None, [proposed.removesuffix(".") + of + "." if proposed else "", same]))


def _proposed(rows: Sequence[ResultRow], needed: Mapping[str, int | None]) -> str:
    known = sorted((count, name) for name, count in needed.items() if count is not None and count <= MOST_SAID)
    if not needed:
        return ""
    if not known:
        return f"More seeds{_why(rows)} would not decide {_listed(list(needed))}."
    (count, name), *rest = known
    also = "".join(f", about {count} {name}" for count, name in rest)
    return f"About {_count(max(1, count), 'more seed')} would decide {name}{also}."


def _why(rows: Sequence[ResultRow]) -> str:
    shared = any(row.difference.reused for row in rows if row.difference)
    return ", which split the same examples again," if shared else f" (up to {MOST_SAID})"


def _failures(rows: Sequence[ResultRow]) -> str:
    lost = [f"{len(row.failed)} of {row.asked} runs of {row.name}" for row in rows if row.failed]
    return f" Failed, which is worse than any result: {', '.join(lost)}." if lost else ""


def _count(number: float, what: str) -> str:
    return f"{number:.3g} {what}{'' if number == 1 else 's'}"


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def _verb(names: Sequence[str], one: str, several: str) -> str:
    return one if len(names) == 1 else several


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

"""The page of an experiment: published numbers beside measured ones, paired comparisons, verdicts, the command."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fedalloy.results.statistics import Interval, Spread
from fedalloy.studies.reproduce.declaring import PaperExperiment
from fedalloy.studies.reproduce.departures import planned_rounds
from fedalloy.studies.reproduce.judging import Judgement, judge, reused_by, values_of
from fedalloy.studies.reproduce.pairing import by_table, differences, observed
from fedalloy.studies.reproduce.results import Measured, Results, is_rounds, seeds_of, summary_of_settings

GENERATED = (
    "<!-- Generated from {name}.json by `fedalloy reproduce --pages`; edit recipes/claims/{name}.toml instead. -->"
)
RULE = (
    "A claim *holds* or *does not hold* only in runs with the published rounds, clients and cohort, from three seeds "
    "on, with differences paired by seed: it holds if every 95 % interval is on the claimed side of zero, and does not "
    "if one is on the other side after Holm's correction. Everything else is *undecided*; shorter or changed runs are "
    "*preliminary*. [The rules](../reproduce.md#how-a-verdict-is-made)."
)
_MOST_LISTED = 12
"""More seeds than this are not listed one by one."""
NUMBERS = {
    "mean": "mean",
    "variance": "variance",
    "gini": "Gini",
    "global": "global test",
    "rounds": "rounds to target",
}


def write_page(experiment: PaperExperiment, results: Results) -> str:
    """The page in Markdown; it depends only on the declaration and the measurements."""
    parts = [
        GENERATED.format(name=experiment.name),
        f"# {experiment.title}",
        _introduction(experiment, results),
        "## Verdicts" if experiment.claims else "",
        verdict_table(judge(experiment, results)) if experiment.claims else "",
        RULE if experiment.claims else "",
        f"## Reading\n\n{experiment.reading.strip()}" if experiment.reading else "",
        "## Numbers",
        *[part for case in _cases(experiment, results) for part in _case(experiment, results, case)],
        _failures(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown.

    >>> print(table(["a", "b"], [["1", "x"]]))
    | a | b |
    |---|---|
    | 1 | x |
    """
    return "\n".join([_line(columns), "|" + "---|" * len(columns), *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def verdict_table(judgements: Sequence[Judgement]) -> str:
    """One row per claim and case, and one for all cases of a claim that were not run."""
    rows = [_verdict_row(one, [one.case]) for one in judgements if one.verdict != "not run"]
    waiting: dict[tuple[str, str], list[Judgement]] = {}
    for one in judgements:
        if one.verdict == "not run":
            waiting.setdefault((one.claim.text, one.control), []).append(one)
    rows += [_verdict_row(same[0], [one.case for one in same]) for same in waiting.values()]
    return table(["verdict", "claim", "case", "measured: difference to, 95 % interval", "rests on"], rows)


def _verdict_row(one: Judgement, cases: Sequence[str]) -> list[str]:
    details = [text for text in (one.claim.source, one.claim.note) if text]
    claimed = one.claim.text + (f" ({'; '.join(details)})" if details else "")
    against = f"{claimed}, against `{one.control}`" if one.control else claimed
    where = cases[0] if len(cases) == 1 else f"{len(cases)} cases"
    return [f"**{one.words}**", against, where, one.measured, "; ".join([*_seeds_text(one.seeds), *one.remarks])]


def _seeds_text(seeds: int) -> list[str]:
    return [f"{seeds} seed{'s' if seeds > 1 else ''}"] if seeds else []


def _introduction(experiment: PaperExperiment, results: Results) -> str:
    seeds = seeds_of(results.runs)
    named = f"{experiment.paper}, {experiment.source}" if experiment.paper else experiment.source
    lines = [f"Source: {named}. Command:", f"```\n{results.command}\n```"]
    if results.quick:
        lines.append("**A quick run: at most 3 rounds and 2 seeds. These numbers are not results.**")
    if results.settings:
        lines.append(f"Measured with {summary_of_settings(results.settings)}; the recipes have other settings.")
    if experiment.setting:
        lines.append(experiment.setting.strip())
    ended = sum(run.finished for run in results.runs)
    spent = sum(run.seconds or 0.0 for run in results.runs)
    what = "core" if results.machine.startswith("cpu") else "GPU"
    lines.append(
        f"{ended} finished runs, seeds {_listed(seeds)}; {spent / 60:.0f} minutes of one {what} ({results.machine})."
    )
    return "\n\n".join(lines)


def _listed(seeds: Sequence[int]) -> str:
    """All seeds, or where there are many the first, the last and their number.

    >>> _listed([2, 4, 6]), _listed([*range(0, 160, 2)])
    ('2, 4, 6', '0, 2, 4, ..., 158 (80 seeds)')
    """
    if len(seeds) <= _MOST_LISTED:
        return ", ".join(map(str, seeds)) or "none"
    return f"{', '.join(map(str, seeds[:3]))}, ..., {seeds[-1]} ({len(seeds)} seeds)"


def _cases(experiment: PaperExperiment, results: Results) -> list[str]:
    known = results.cases()
    order = [case.name for case in experiment.cases if case.name in known]
    return order + [case for case in known if case not in order]


def _case(experiment: PaperExperiment, results: Results, case: str) -> list[str]:
    """A heading and one table: every score as published and as measured."""
    runs = [run for run in results.runs if run.case == case]
    rounds = planned_rounds(runs)
    result = f"{rounds[0]} rounds" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]} rounds" if rounds else ""
    scores = [score for score in experiment.scores if any(score in run.scores for run in runs)]
    published = experiment.published.cases.get(case, {})
    methods = [*results.methods(case), *(name for name in published if name not in results.methods(case))]
    reference = experiment.reference or methods[0]
    said = [score for score in scores if published and score in experiment.published.scores]
    columns = ["method"]
    for score in scores:
        columns += [f"{label(score)}, published", "ours"] if score in said else [label(score)]
    main = scores[0] if scores else ""
    columns += [f"{label(main)} against {reference}, paired", "seeds"]
    rows = []
    for method in methods:
        mine = results.of(case, method)
        cells = [method]
        for score in scores:
            cells += [_published(experiment, case, method, score)] if score in said else []
            cells.append(_measured(mine, score))
        rows.append([*cells, _paired(mine, results.of(case, reference), main, method == reference), _seeds(mine)])
    return [f"### {case}" + (f" ({result})" if result else ""), table(columns, rows)]


def label(score: str) -> str:
    """The name of a score in a heading.

    >>> label("worst20"), label("ece:mean"), label("mix_oracle")
    ('worst 20 %', 'ece mean', 'mix oracle')
    """
    metric, _, statistic = score.rpartition(":")
    for tail in ("worst", "best", "gap"):
        if statistic.removeprefix(tail).isdecimal():
            statistic = f"{tail} {statistic.removeprefix(tail)} %"
    named = NUMBERS.get(statistic, statistic.replace("_", " "))
    return f"{metric} {named}" if metric else named


def _published(experiment: PaperExperiment, case: str, method: str, score: str) -> str:
    numbers = experiment.published.cases.get(case, {}).get(method)
    if numbers is None:
        return ""
    value = numbers[experiment.published.scores.index(score)]
    return value if isinstance(value, str) else f"{value:g}"


def _measured(runs: Sequence[Measured], score: str) -> str:
    if not runs:
        return ""
    spread = Spread.of(values_of(runs, score))
    never = sum(run.finished and run.scores.get(score) == math.inf for run in runs)
    said = f"never in {never} of {len(runs)}" if never and is_rounds(score) else ""
    if spread is None:
        return said or ("failed" if all(run.state == "failed" for run in runs) else "")
    return spread.text(_digits(spread.mean)) + (f" ({said})" if said else "")


def _digits(value: float) -> int:
    return 1 if abs(value) >= 1000 else 2 if abs(value) >= 1 or value == 0 else 4


def _paired(mine: Sequence[Measured], reference: Sequence[Measured], score: str, same: bool) -> str:
    """Empty where a run has no value: a mean over the others would look too good, and two such runs are no tie."""
    ours, theirs = observed(mine, score, True), observed(reference, score, True)
    values = [value for side in (ours, theirs) for seed, (_, value) in side.items() if seed in ours and seed in theirs]
    if same or not all(map(math.isfinite, values)):
        return ""
    found = Interval.of(by_table(differences(ours, theirs)), reused_by(score, mine))
    return found.text() if found else ""


def _seeds(runs: Sequence[Measured]) -> str:
    done, failed = sum(run.finished for run in runs), sum(run.state == "failed" for run in runs)
    return f"{done}" + (f" ({failed} failed)" if failed else "")


def _failures(results: Results) -> str:
    """A table of the failed runs, which are results too."""
    failed = [run for run in results.runs if run.state == "failed"]
    rows = [[run.case, run.method, str(run.seed), str(run.round), run.reason] for run in failed]
    return "## Failed runs\n\n" + table(["case", "method", "seed", "round", "why"], rows) if failed else ""

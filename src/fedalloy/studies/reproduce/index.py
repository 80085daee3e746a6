"""The pages of all experiments whose results are in a folder, and one short page with a line per table of a paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedalloy.experiment.records import atomic
from fedalloy.studies.reproduce.declaring import PaperExperiment, experiment_names, load_experiment
from fedalloy.studies.reproduce.departures import planned_rounds, wanted_rounds
from fedalloy.studies.reproduce.judging import VERDICTS, Judgement, judge
from fedalloy.studies.reproduce.page import RULE, table, write_page
from fedalloy.studies.reproduce.results import Results, read_results, seeds_of

RESULTS = Path("docs") / "results"
INDEX = "index.md"
_SIDES = {"holds": "ahead", "does not hold": "behind"}
_OPENING = """<!-- Generated from the .json files in this folder by `fedalloy reproduce --pages`. -->

# Published claims, tested

One line per table or figure of a paper: how many of its claims hold in our own runs, in which runs, and a link to the
numbers, the protocol and the command. {rule}
"""


@dataclass(frozen=True)
class Judged:
    """An experiment with its results, None before it was run, and the verdicts on its claims."""

    experiment: PaperExperiment
    results: Results | None
    judgements: tuple[Judgement, ...]

    @staticmethod
    def of(experiment: PaperExperiment, results: Results | None) -> Judged:
        """Without results every claim is not run."""
        return Judged(experiment, results, tuple(judge(experiment, results or Results(experiment.name, "", ()))))

    def place(self, one: Judgement) -> tuple[str, str]:
        """The paper, and its table or figure."""
        return self.experiment.paper, one.claim.source or self.experiment.source


Found = tuple[Judged, Sequence[Judgement]]
"""An experiment and some of its verdicts."""


def pages(folder: Path) -> dict[Path, str]:
    """The pages of all result files in a folder, by file, and the index."""
    made: dict[Path, str] = {}
    judged: list[Judged] = []
    for file in sorted(folder.glob("*.json")):
        results = read_results(file)
        experiment = load_experiment(results.experiment)
        made[file.with_suffix(".md")] = write_page(experiment, results)
        judged.append(Judged.of(experiment, results))
    measured = {one.experiment.name for one in judged}
    judged += [Judged.of(load_experiment(name), None) for name in experiment_names() if name not in measured]
    made[folder / INDEX] = write_index(judged)
    return made


def write_pages(folder: Path) -> list[Path]:
    """Write the pages that are missing or out of date; returns these."""
    changed = [(file, text) for file, text in pages(folder).items() if not _says(file, text)]
    for file, text in changed:
        atomic.write_text(file, text)
    return [file for file, _ in changed]


def write_index(judged: Sequence[Judged]) -> str:
    """How many claims hold in all, and one table per paper with a line for every table and figure."""
    ordered = sorted(judged, key=lambda one: one.experiment.name)
    places = list(dict.fromkeys(one.place(judgement) for one in ordered for judgement in one.judgements))
    lines = {place: [(one, mine) for one in ordered if (mine := _at(one, place))] for place in places}
    total: Counter[str] = Counter()
    controls: Counter[str] = Counter()
    for found in lines.values():
        total += count(found)
        controls += Counter(_SIDES.get(one.verdict, one.verdict) for _, mine in found for one in mine if one.ours)
    parts = [_OPENING.format(rule=RULE), f"{total.total()} claims in their settings: {as_text(total)}.\n"]
    if controls:
        parts.append(f"Not counted: {controls.total()} comparisons of ours beside them ({_listed(controls)}).\n")
    for paper in dict.fromkeys(paper for paper, _ in places):
        rows = [_row(source, lines[paper, source]) for named, source in places if named == paper]
        parts.append(f"## {paper or 'Without a paper'}\n\n{table(['verdicts', 'claims', 'runs'], rows)}\n")
    return "\n".join(parts)


def count(found: Sequence[Found]) -> Counter[str]:
    """How often each verdict was reached. A claim that several experiments test counts once, where most is known."""
    best: dict[tuple[str, ...], str] = {}
    for one, judgements in found:
        for judgement in judgements:
            key = judgement.claim.text, *_setting(one.experiment, judgement.case)
            if not judgement.ours and (key not in best or _rank(judgement.verdict) < _rank(best[key])):
                best[key] = judgement.verdict
    return Counter(best.values())


def _setting(experiment: PaperExperiment, case: str) -> tuple[str, ...]:
    """What is equal for cases of two experiments that run the same."""
    known = [(one.recipe, str(one.set)) for one in experiment.cases if one.name == case]
    return known[0] if known else (experiment.name, case)


def as_text(counted: Counter[str]) -> str:
    """The counts in the order of the verdicts.

    >>> as_text(Counter({"not run": 2, "holds": 3}))
    'holds 3, not run 2'
    """
    return ", ".join(f"{verdict} {counted[verdict]}" for verdict in VERDICTS if counted[verdict])


def _rank(verdict: str) -> int:
    return [str(one) for one in VERDICTS].index(verdict)


def _listed(counted: Counter[str]) -> str:
    return ", ".join(f"{words} {number}" for words, number in sorted(counted.items()))


def _at(one: Judged, place: tuple[str, str]) -> list[Judgement]:
    return [judgement for judgement in one.judgements if one.place(judgement) == place]


def _row(source: str, found: Sequence[Found]) -> list[str]:
    counted = count(found)
    links = ", ".join(dict.fromkeys(_link(one) for one, _ in found))
    runs = "; ".join(dict.fromkeys(text for one, mine in found if (text := _runs(one, mine))))
    return [as_text(counted) or "comparisons of ours", f"{source}: {links}", runs]


def _link(one: Judged) -> str:
    name = one.experiment.name
    if one.results is not None:
        return f"[{one.experiment.title}]({name}.md)"
    return f"{one.experiment.title} (`fedalloy reproduce {name}`)"


def _runs(one: Judged, judgements: Sequence[Judgement]) -> str:
    """Rounds, seeds and data of the runs behind some verdicts."""
    cases = dict.fromkeys(judgement.case for judgement in judgements if judgement.verdict != "not run")
    return "; ".join(dict.fromkeys(_runs_of(one.experiment, one.results, case) for case in cases if one.results))


def _runs_of(experiment: PaperExperiment, results: Results, case: str) -> str:
    runs = [run for run in results.runs if run.case == case]
    rounds, seeds, wanted = planned_rounds(runs), len(seeds_of(runs)), wanted_rounds(experiment, case)
    length = " to ".join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))
    short = f" of {wanted}" if wanted and rounds != [wanted] else ""
    protocol = experiment.protocol.of(case)
    adapted = f", adapted data ({protocol.data})" if protocol.data != "as published" else ""
    adapted += ", adapted settings" if protocol.adapted else ""
    return f"{length}{short} rounds, {seeds} seed{'s' if seeds > 1 else ''}{adapted}"


def _says(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text(encoding="utf-8") == text

"""The pages of all experiments whose results are in a folder, and one table of all claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fedalloy.experiment.records import atomic
from fedalloy.studies.reproduce.declaring import PaperExperiment, experiment_names, load_experiment
from fedalloy.studies.reproduce.judging import Judgement, judge
from fedalloy.studies.reproduce.page import RULE, label, table, write_page
from fedalloy.studies.reproduce.results import Results, read_results

RESULTS = Path("docs") / "results"
INDEX = "index.md"
_OPENING = """<!-- Generated from the .json files in this folder by `fedalloy reproduce --pages`. -->

# Published claims, tested

Every row is one claim of a paper in one setting, with its verdict and a link to the page with the numbers, the protocol
and the command. {rule} Published and measured numbers differ for many reasons (data that are not available, steps and
rounds that a paper does not state); the pages list them. A claim compares methods, so it is judged only on our own
runs.
"""


def pages(folder: Path) -> dict[Path, str]:
    """The pages of all result files in a folder, by file, and the index."""
    made: dict[Path, str] = {}
    found: list[tuple[PaperExperiment, Results]] = []
    for file in sorted(folder.glob("*.json")):
        results = read_results(file)
        experiment = load_experiment(results.experiment)
        made[file.with_suffix(".md")] = write_page(experiment, results)
        found.append((experiment, results))
    measured = {experiment.name for experiment, _ in found}
    waiting = [load_experiment(name) for name in experiment_names() if name not in measured]
    made[folder / INDEX] = write_index(found, waiting)
    return made


def write_pages(folder: Path) -> list[Path]:
    """Write the pages that are missing or out of date; returns these."""
    changed = [(file, text) for file, text in pages(folder).items() if not _says(file, text)]
    for file, text in changed:
        atomic.write_text(file, text)
    return [file for file, _ in changed]


def write_index(found: Sequence[tuple[PaperExperiment, Results]], waiting: Sequence[PaperExperiment] = ()) -> str:
    """One table of all claims, how many of them hold, and the experiments that are not measured yet."""
    judged = [(experiment, results, judge(experiment, results)) for experiment, results in found]
    counted = Counter(one.verdict for _, _, judgements in judged for one in judgements)
    said = ", ".join(f"{counted[verdict]} {verdict}" for verdict in sorted(counted))
    rows = [row for experiment, results, judgements in judged for row in _rows(experiment, results, judgements)]
    columns = ["claim", "source", "case", "score", "published", "measured", "verdict", "page"]
    opening = _OPENING.format(rule=RULE)
    return "\n".join([opening, f"{counted.total()} verdicts: {said}.\n", table(columns, rows), "", _waiting(waiting)])


def _waiting(experiments: Sequence[PaperExperiment]) -> str:
    rows = [[one.title, one.source, str(len(one.claims)), f"`{_command(one)}`"] for one in experiments]
    heading = "## Declared, not measured yet\n\n"
    return heading + table(["experiment", "source", "claims", "command"], rows) + "\n" if rows else ""


def _command(experiment: PaperExperiment) -> str:
    return experiment.command or f"fedalloy reproduce {experiment.name}"


def _rows(experiment: PaperExperiment, results: Results, judgements: Sequence[Judgement]) -> list[list[str]]:
    page = f"[{experiment.name}]({experiment.name}.md)"
    return [
        [
            one.claim.text,
            one.claim.source or experiment.source,
            one.case,
            label(one.claim.score),
            published_sides(experiment, one),
            one.measured,
            f"**{one.verdict}**" + (" (quick)" if results.quick else ""),
            page,
        ]
        for one in judgements
    ]


def published_sides(experiment: PaperExperiment, one: Judgement) -> str:
    """The published numbers of a claim's two sides, where there are some."""
    scores, rows = experiment.published.scores, experiment.published.cases.get(one.case, {})
    if one.claim.score not in scores:
        return ""
    place = scores.index(one.claim.score)
    known = [(name, rows[name][place]) for name in (one.claim.method, *one.claim.others) if name in rows]
    return ", ".join(f"{name} {value if isinstance(value, str) else format(value, 'g')}" for name, value in known)


def _says(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text(encoding="utf-8") == text

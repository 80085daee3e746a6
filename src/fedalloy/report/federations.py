"""A page about one comparison on several federations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedalloy.experiment.records.reading import read_run
from fedalloy.report.data.federations import forest, rank_line
from fedalloy.report.data.results import verdict_text
from fedalloy.report.document import document
from fedalloy.report.markup import Cell, count, empty, figure, named, paragraph, section, table, text
from fedalloy.report.palette import assign
from fedalloy.report.verdicts import COLOURS
from fedalloy.results.evidence import Evidence
from fedalloy.results.federations import FEWEST_FEDERATIONS, ComparedFederation, Federations, Ranks

Found = Mapping[tuple[str, str], Evidence]


def page(federations: Federations) -> str:
    """The page as text."""
    found, ranks = federations.differences(), federations.ranks()
    styles = {name: style.to_json() for name, style in assign(federations.names).items()}
    charts = {"federations": forest(federations, found), "ranks": rank_line(ranks) if ranks else None}
    parts = {
        "Results": _results(federations, found, charts["federations"] is not None),
        "Ranks": _ranks(federations, ranks, styles),
        "Federations": _what(federations),
    }
    runs = [run for one in federations.all for run in one.outcomes]
    facts = {
        "Federations": (str(len(federations.all)), ""),
        "Algorithms": (str(len(federations.names)), f"compared with {federations.first}"),
        "Runs": (f"{sum(run.finished for run in runs)} of {len(runs)}", "finished"),
    }
    title = f"{len(federations.names)} algorithms on {len(federations.all)} federations"
    verdict = paragraph(federations.conclusion(found), "lead verdict")
    data = {"styles": styles, "charts": {key: chart for key, chart in charts.items() if chart}}
    return document(title, verdict, facts, parts, data)


def _results(federations: Federations, found: Found, drawn: bool) -> str:
    head = ["federation", *federations.names[1:], "seeds"]
    body = [
        [text(one.name), *(_cell(found.get((one.name, name))) for name in federations.names[1:]), count(len(one.seeds))]
        for one in federations.all
    ]
    some = next(iter(found.values()), None)
    note = f"{federations.metric} of an algorithm minus that of {federations.first}, paired by seed."
    if some is not None:
        note += f" Intervals are simultaneous: all {some.family} of this table together cover with "
        note += (
            f"{100 * (1 - some.alpha):.4g} % (Bonferroni). Verdicts and colours follow Holm over the same differences."
        )
    picture = figure("federations") if drawn else empty("No federation has a difference to draw yet.")
    return section("results", "Results", picture, table("Differences", head, body), paragraph(note, "soft"))


def _cell(found: Evidence | None) -> Cell:
    if found is None:
        return Cell("no common seed", None)
    return Cell(f"{found.text()}: {verdict_text(found)}", found.estimate, COLOURS.get(found.outcome, ""))


def _ranks(federations: Federations, ranks: Ranks | None, styles: Mapping[str, Any]) -> str:
    if ranks is None:
        return section("ranks", "Ranks", empty(_why_no_ranks(federations)))
    test = "Friedman's test" if len(ranks.names) > 2 else "the sign test"
    says = "rejects that all ranks are equal" if ranks.rejected else "does not reject that all ranks are equal"
    said = (
        f"Algorithms are ranked on every federation by their mean {federations.metric} over the seeds that all have; "
    )
    said += f"{test} {says} (p {'< 0.0001' if ranks.p < 1e-4 else f'= {ranks.p:.2g}'})"
    said += "." if ranks.rejected else ", so the picture tells no two of them apart."
    rest = f" Without a score of every algorithm, and left out: {', '.join(ranks.left_out)}." if ranks.left_out else ""
    order = sorted(zip(ranks.averages, ranks.names, strict=True))
    body = [[named(name, styles), count(rank, 2)] for rank, name in order]
    made = table("Average ranks", ["algorithm", "average rank"], body, kind="narrow")
    return section("ranks", "Ranks", paragraph(said + rest, "soft"), figure("ranks"), made)


def _why_no_ranks(federations: Federations) -> str:
    if federations.higher_is_better is None:
        return f"'{federations.metric}' has no direction, so there is nothing to rank by."
    if federations.unfinished:
        return f"No ranks yet: {federations.unfinished} runs did not finish."
    if federations.quick:
        return "No ranks: the runs were shortened (--quick)."
    usable = federations.ranked
    missing = FEWEST_FEDERATIONS - len(usable)
    return (
        f"Average ranks need {FEWEST_FEDERATIONS} federations with a score of every algorithm; here are {len(usable)}, "
        f"so {missing} more {'is' if missing == 1 else 'are'} missing. Ranks of fewer say little that the table above "
        "does not."
    )


def _what(federations: Federations) -> str:
    head = ["federation", "folder", "data", "clients", "rounds", "seeds", "runs"]
    made = table("Federations", head, [_described(one) for one in federations.all])
    said = f"A page about one of them: fedalloy report {federations.all[0].folder}."
    if federations.left_out:
        said += f" Not on every federation, and left out: {', '.join(federations.left_out)}."
    return section("federations", "Federations", made, paragraph(said, "soft"))


def _described(one: ComparedFederation) -> list[Cell]:
    runs = one.outcomes
    folder = next(run.folder for run in runs if run.folder)
    record = read_run(folder)
    data = record.recipe.get("task", {}).get("dataset", "")
    kind = data.get("kind", "") if isinstance(data, Mapping) else data
    done = f"{sum(run.finished for run in runs)} of {len(runs)} finished"
    seeds = len({run.seed for run in runs})
    clients = (record.manifest or {}).get("clients")
    return [
        text(one.name),
        text(one.folder),
        text(kind),
        count(clients),
        count(runs[0].rounds),
        count(seeds),
        text(done),
    ]

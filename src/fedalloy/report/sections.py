"""The sections of a report: pure functions from a report context (run summaries and charts) to HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from fedalloy.experiment.records.reading import GIVEN
from fedalloy.report import data, words
from fedalloy.report.context import ReportContext
from fedalloy.report.markup import (
    Cell,
    code,
    count,
    details,
    empty,
    figure,
    named,
    pair,
    paragraph,
    section,
    spread,
    table,
    text,
)  # fmt: skip
from fedalloy.results.runs import by_name
from fedalloy.tasks.metrics.direction import variance_as

PARTICIPATION = {
    "contributions": "contributions", "per_client": "per client", "fewest": "fewest", "most": "most",
    "never": "never took part", "absent": "absent", "late": "late", "refused": "refused",
    "empty_rounds": "empty rounds",
}  # fmt: skip
COST = {"megabytes_up": "MB up", "megabytes_down": "MB down", "simulated_seconds": "simulated s",
        "wall_seconds": "real s", "seconds_per_round": "s per round", "memory": "peak MB",
        "device_memory": "peak GPU MB"}  # fmt: skip
VERSIONS = ("fedalloy", "python", "torch", "numpy", "safetensors", "system", "machine", "cpu_capability", "cpus",
            "threads", "device", "device_name")  # fmt: skip


def what(context: ReportContext) -> str:
    """A description, then the recipe."""
    said = "".join(paragraph(sentence, "lead" if place == 0 else "") for place, sentence in enumerate(context.words))
    paths, rows = words.differences(context.summaries)
    if paths and len(rows) > 1:
        head = ["algorithm", *(".".join(path).removeprefix("algorithm.") for path in paths)]
        body = [[named(name, context.styles), *(text(value) for value in values)] for name, values in rows]
        said += paragraph("What differs between them:", "soft") + table("Settings that differ", head, body)
    return section("what", "What was run", said, details("The recipe they share", code(context.recipe)))


def curves(context: ReportContext) -> str:
    """Metrics against rounds, bytes or simulated time."""
    title = "Over time"
    if "curves" not in context.charts:
        nothing = "Nothing was evaluated yet. Runs evaluate every evaluate.every rounds and at the end."
        return section("curves", title, empty(nothing))
    metrics = context.charts["curves"]["metrics"]
    starts = [{"metric": metrics[0], "statistic": "mean"}]
    if context.summaries[0].direction(metrics[0]) is not None:
        starts += [{"metric": metrics[0], "statistic": "worst_served"}]
    starts += [{"metric": metrics[1], "statistic": "mean"}] if len(metrics) > 1 else []
    figures = [figure("curves", start) for start in starts]
    figures += [figure("train-loss")] if "train-loss" in context.charts else []
    note = (
        "Lines are means over seeds, bands span the seeds. Choose the metric, the clients and the axis above a chart."
    )
    if "seconds" not in context.charts["curves"]["axes"]:
        note += " Simulated time needs devices.seconds_per_step or devices.seconds_per_megabyte in the recipe."
    return section("curves", title, paragraph(note, "soft"), pair(figures))


def clients(context: ReportContext) -> str:
    """Every client as a dot, the worst by name."""
    title = "Scores by client"
    if "distribution" not in context.charts:
        return section("clients", title, empty("No client has been scored yet; they appear here after an evaluation."))
    rows, metric = data.worst_clients(context.summaries, 3), context.summaries[0].metric
    head = ["algorithm", "worst served", "seed", metric, "examples", "most common class", "rounds"]
    body = [
        [named(row["name"], context.styles), text(row["client"]), count(row["seed"]), _score(row),
         count(row["examples"]), _common(row), count(row["rounds"])]
        for row in rows
    ]  # fmt: skip
    if not rows:
        return section("clients", title, figure("distribution"))
    named_ones = table("The worst served clients", head, body, kind="low")
    return section("clients", title, figure("distribution"), "<h3>Worst served, over all seeds</h3>", named_ones)


def fairness(context: ReportContext) -> str:
    """Inequality between clients."""
    metric = context.summaries[0].metric
    variance, unit = variance_as(metric)
    head = ["algorithm", f"mean {metric}", "worst 10 %", "best 10 %", "parity gap", variance, "Gini"]
    body = [
        [named(row["name"], context.styles), spread(row["mean"]), spread(row["worst_served"]),
         spread(row["best_served"]), spread(row["parity_gap"]), _variance(row["variance"], unit), spread(row["gini"])]
        for row in data.fairness_rows(context.summaries)
    ]  # fmt: skip
    note = "Over clients at the end, then mean ± standard deviation over seeds. Parity gap: the difference between the "
    note += "best and the worst 10 %. Gini: 0 when all clients have the same score."
    return section("fairness", "Fairness", table("Fairness", head, body), paragraph(note, "soft"))


def _variance(found: dict[str, Any] | None, unit: float) -> Cell:
    """A variance in the unit in which it is shown."""
    if found is None or found["mean"] is None:
        return spread(found)
    apart = None if found["deviation"] is None else unit * found["deviation"]
    return spread({**found, "mean": unit * found["mean"], "deviation": apart}, 1 if unit == 1 else 3)


def weights(context: ReportContext) -> str:
    """Heat maps of weights, rounds x clients."""
    keys = context.group("weights")
    if not keys:
        return section("weights", "Weights", empty("There are no weights to show: no contribution has been used yet."))
    said = "The weight of each contribution. A strong column is a round that depends on few clients, a strong row a "
    said += "client with much influence. First seed of each algorithm."
    return section("weights", "Weights", paragraph(said, "soft"), *switched(context, "weights", keys))


def info(context: ReportContext) -> str:
    """Intermediate values of the rules."""
    title, keys = "What the rules computed", context.group("info")
    if not keys:
        nothing = "These rules recorded no intermediate values. Rules that do: fedadp (angles), aaggff_s and aaggff_d "
        return section("info", title, empty(nothing + "(responses, regret), fednova (effective steps), and others."))
    lines = [figure(key) for key in keys if context.charts[key]["kind"] == "line"]
    panels = {key: len(context.charts[key]["panels"]) for key in keys if context.charts[key]["kind"] == "heat"}
    narrow = [figure(key) for key, count in panels.items() if count == 1]
    broad = [figure(key) for key, count in panels.items() if count > 1]
    more = sorted({name for summary in context.summaries for name in summary.history.info_left_out})
    rest = paragraph(f"Recorded but not drawn: {', '.join(more)}.", "soft") if more else ""
    return section("info", title, pair(lines + narrow), *broad, rest)


def personal(context: ReportContext) -> str:
    """The lambda curve and reliability."""
    if not any(summary.personal for summary in context.summaries):
        return ""
    no_mix = "These methods keep a model per client but do not mix it with the federated one: there is no λ to vary."
    curve = figure("lambda") if "lambda" in context.charts else empty(no_mix)
    diagrams = [figure(key) for key in context.group("reliability")]
    missing = "".join(empty(f"No reliability diagram for {why}") for why in context.missing)
    heading = "<h3>Calibration</h3>" if diagrams else ""
    return section("personal", "Personal models", curve, heading, pair(diagrams), missing)


def pictures(context: ReportContext) -> str:
    """Synthetic examples."""
    keys = context.group("pictures")
    return section("pictures", "Synthetic examples", *switched(context, "pictures", keys)) if keys else ""


def participation(context: ReportContext) -> str:
    """Participation and failures."""
    rows = data.participation_rows(context.summaries)
    body = [
        [named(row["name"], context.styles), count(row["seed"]), *(count(row[key]) for key in PARTICIPATION)]
        for row in rows
    ]
    made = table("Participation", ["algorithm", "seed", *PARTICIPATION.values()], body, kind="low")
    figures = pair([figure(key) for key in context.group("participation")])
    listed = details(f"Every run ({len(rows)})", made)
    return section("participation", "Participation and failures", _failures(rows), figures, listed, _refusals(rows))


def heterogeneity(context: ReportContext) -> str:
    """Client x class."""
    if "heterogeneity" not in context.charts:
        nothing = "These runs have no class counts: there is no manifest, or the labels are not classes."
        return section("data", "Data", empty(nothing))
    said = "Examples by client and class. Skewed labels show as rows with few strong cells, skewed amounts as rows "
    return section("data", "Data", paragraph(said + "that are strong altogether.", "soft"), figure("heterogeneity"))


def cost(context: ReportContext) -> str:
    """Bytes, seconds, memory."""
    rows = data.cost_rows(context.summaries)
    columns = [key for key in COST if any(row[key] for row in rows)]
    phases = list(dict.fromkeys(name for row in rows for name in row["phases"]))
    head = ["algorithm", *(COST[key] for key in columns), "engine", *(f"{name} s" for name in phases)]
    body = [
        [named(row["name"], context.styles), *(count(row[key]) for key in columns), text(row["engine"]),
         *(count(row["phases"].get(name)) for name in phases)]
        for row in rows
    ]  # fmt: skip
    note = (
        "Whole run, mean over seeds; peak memory is that of the process, the largest over seeds. Real seconds depend "
    )
    note += "on the machine and its load; the last columns show the time of each phase."
    figures = pair([figure(key) for key in context.group("cost")])
    return section("cost", "Cost", figures, table("Cost", head, body), paragraph(note, "soft"))


_SAME = "the numbers are the same, bit for bit on the same versions and the same kind of processor"
_AGAIN = (
    "Every run folder holds its resolved recipe.toml; below is that of each algorithm's first seed. Run it again, with "
    f"any of the seeds, and {_SAME}:"
)
_AGAIN_GIVEN = (
    "The data were given in Python and are in no recipe. Make the same task again, call fedalloy.fit or "
    f"fedalloy.compare with the settings below and any of the seeds, and {_SAME}."
)


def reproduce(context: ReportContext) -> str:
    """Commands, versions, seeds."""
    groups, seeds = by_name(context.summaries), sorted({summary.seed for summary in context.summaries})
    given = any(one.recipe.get("task", {}).get("dataset") == GIVEN for one in context.summaries)
    command = "" if given else code(f"fedalloy run recipe.toml --set run.seeds=[{seeds[0]}] -o again")
    on = context.summaries[0].environment
    facts = [[text(name.replace("_", " ")), text(on[name])] for name in VERSIONS if name in on]
    facts.append([text("seeds"), text(", ".join(map(str, seeds)))])
    versions = table("Versions", ["what", "value"], facts, sortable=False, kind="narrow")
    recipes = [details(f"Recipe: {name}", code(context.recipe_of(runs[0]))) for name, runs in groups.items()]
    return section(
        "reproduce", "How to reproduce", paragraph(_AGAIN_GIVEN if given else _AGAIN), command, *recipes, versions
    )


def switched(context: ReportContext, group: str, keys: Sequence[str]) -> list[str]:
    """One chart at a time, chosen by name, when there are several."""
    if len(keys) == 1:
        return [figure(keys[0])]
    titles = [escape(context.charts[key]["title"]) for key in keys]
    options = "".join(f'<option value="{place}">{title}</option>' for place, title in enumerate(titles))
    chooser = f'<label class="choose">Show <select data-shows="{group}">{options}</select></label>'
    return [chooser, *(figure(key, group=group, member=str(place)) for place, key in enumerate(keys))]


def _score(row: dict[str, Any]) -> Cell:
    return count(row["score"], 3) if row["finite"] else Cell("not finite", None)


def _common(row: dict[str, Any]) -> Cell:
    if row["common_class"] is None:
        return Cell("", None)
    return Cell(f"{row['common_class']} ({row['common_share']:.0%})", row["common_share"])


def _failures(rows: Sequence[dict[str, Any]]) -> str:
    keys = ("contributions", "absent", "late", "refused")
    total, absent, late, refused = (sum(row[key] for row in rows) for key in keys)
    said = f"{total:,} contributions were used over all runs. {absent:,} were expected and missing, {late:,} were "
    return paragraph(said + f"too late, {refused:,} were refused by the checks on contributions.", "soft")


def _refusals(rows: Sequence[dict[str, Any]]) -> str:
    said = [(row, reason) for row in rows for reason in row["reasons"]][:20]
    return "".join(
        paragraph(f"{row['name']}, seed {row['seed']}: {reason['count']} refused, {reason['why']}", "bad")
        for row, reason in said
    )

"""The sections of a report on how it came about: participation, data, cost, tuning, how to do it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedalloy.report import data
from fedalloy.report.folio import Folio
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
    table,
    text,
)
from fedalloy.results.runs import by_name

PARTICIPATION = {
    "contributions": "contributions", "per_client": "per client", "fewest": "fewest", "most": "most",
    "never": "never heard", "absent": "absent", "late": "late", "refused": "refused", "empty_rounds": "empty rounds",
}  # fmt: skip
COST = {"megabytes_up": "MB up", "megabytes_down": "MB down", "simulated_seconds": "simulated s",
        "wall_seconds": "real s", "seconds_per_round": "s per round", "memory": "peak MB",
        "device_memory": "peak GPU MB"}  # fmt: skip
VERSIONS = ("fedalloy", "python", "torch", "numpy", "safetensors", "system", "machine", "cpu_capability", "cpus",
            "threads", "device", "device_name")  # fmt: skip


def participation(folio: Folio) -> str:
    """Who took part, who failed."""
    rows = data.participation_rows(folio.stories)
    body = [
        [named(row["name"], folio.styles), count(row["seed"]), *(count(row[key]) for key in PARTICIPATION)]
        for row in rows
    ]
    made = table("Participation", ["algorithm", "seed", *PARTICIPATION.values()], body, kind="low")
    figures = pair([figure(key) for key in folio.group("participation")])
    listed = details(f"Every run ({len(rows)})", made)
    return section("participation", "Participation and failures", _failures(rows), figures, listed, _refusals(rows))


def heterogeneity(folio: Folio) -> str:
    """Client x class."""
    if "heterogeneity" not in folio.charts:
        nothing = "These runs left no counts of classes: there is no manifest, or the labels are not classes."
        return section("data", "Data", empty(nothing))
    said = "Who holds what. Skewed labels show as rows with few strong cells, skewed amounts as rows that are strong "
    return section("data", "Data", paragraph(said + "altogether.", "soft"), figure("heterogeneity"))


def cost(folio: Folio) -> str:
    """Bytes, seconds, memory."""
    rows = data.cost_rows(folio.stories)
    columns = [key for key in COST if any(row[key] for row in rows)]
    phases = list(dict.fromkeys(name for row in rows for name in row["phases"]))
    head = ["algorithm", *(COST[key] for key in columns), "engine", *(f"{name} s" for name in phases)]
    body = [
        [named(row["name"], folio.styles), *(count(row[key]) for key in columns), text(row["engine"]),
         *(count(row["phases"].get(name)) for name in phases)]
        for row in rows
    ]  # fmt: skip
    note = (
        "Whole run, mean over seeds; peak memory is that of the process, the largest over seeds. Real seconds depend "
    )
    note += "on the machine and on what else it did; the last columns say where they went."
    figures = pair([figure(key) for key in folio.group("cost")])
    return section("cost", "Cost", figures, table("Cost", head, body), paragraph(note, "soft"))


def tuning(folio: Folio) -> str:
    """What a grid tried and chose."""
    if not folio.tunings:
        return ""
    body = [
        [named(entry["name"], folio.styles), text(_settings(one["settings"])),
         count(one["score"], 3) if one["score"] is not None else Cell("failed", None),
         text("chosen" if one["settings"] == entry["best"] else "")]
        for entry in folio.tunings for one in entry["tried"]
    ]  # fmt: skip
    note = paragraph("On tuning seeds, which are none of those reported above.", "soft")
    made = table("Tuning", ["algorithm", "setting", "mean", "verdict"], body, kind="low")
    return section("tuning", "Tuning", note, made)


def reproduce(folio: Folio) -> str:
    """Commands, versions, seeds."""
    groups, seeds = by_name(folio.stories), sorted({story.seed for story in folio.stories})
    say = "Every run folder holds its resolved recipe.toml; below is that of each algorithm's first seed. Run "
    say += (
        "it again, with any of the seeds, and the numbers are the same, bit for bit on the same versions and the same "
    )
    say += "kind of processor:"
    command = f"fedalloy run recipe.toml --set run.seeds=[{seeds[0]}] -o again"
    on = folio.stories[0].environment
    facts = [[text(name.replace("_", " ")), text(on[name])] for name in VERSIONS if name in on]
    facts.append([text("seeds"), text(", ".join(map(str, seeds)))])
    versions = table("Versions", ["what", "value"], facts, sortable=False, kind="narrow")
    recipes = [details(f"Recipe: {name}", code(folio.recipe_of(runs[0]))) for name, runs in groups.items()]
    return section("reproduce", "How to reproduce", paragraph(say), code(command), *recipes, versions)


def _failures(rows: Sequence[dict[str, Any]]) -> str:
    keys = ("contributions", "absent", "late", "refused")
    total, absent, late, refused = (sum(row[key] for row in rows) for key in keys)
    said = f"{total:,} contributions counted over all runs. {absent:,} were expected and did not come, {late:,} came "
    return paragraph(said + f"too late, {refused:,} were refused by the checks on what arrives.", "soft")


def _refusals(rows: Sequence[dict[str, Any]]) -> str:
    said = [(row, reason) for row in rows for reason in row["reasons"]][:20]
    return "".join(
        paragraph(f"{row['name']}, seed {row['seed']}: {reason['count']} refused, {reason['why']}", "bad")
        for row, reason in said
    )


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{path} = {value}" for path, value in settings.items())

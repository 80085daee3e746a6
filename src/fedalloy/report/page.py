"""One self-contained page about some runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from fedalloy.records import atomic
from fedalloy.report import sections
from fedalloy.report.gathering import Story, gather, tunings

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>$style</style>
</head>
<body>
<h1>$title</h1>
<p>$subtitle</p>
$body
</body>
</html>
""")


def write_page(places: Sequence[Path], output: Path) -> int:
    """Write the page about the runs in some folders; returns how many there were."""
    stories = gather(places)
    output.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(output, page(stories, sections.tuning(tunings(places))))
    return len(stories)


def page(stories: Sequence[Story], tuning: str = "") -> str:
    """The page as text."""
    parts = [
        sections.results(stories),
        sections.curves(stories),
        sections.fairness(stories),
        tuning,
        sections.data(stories),
        sections.participation(stories),
        sections.reproduce(stories),
    ]
    style = files("fedalloy.report").joinpath("style.css").read_text(encoding="utf-8")
    words = {"title": escape(_title(stories)), "subtitle": escape(_subtitle(stories))}
    return PAGE.substitute(words, style=style, body="\n".join(parts))


def _title(stories: Sequence[Story]) -> str:
    names = list(dict.fromkeys(story.name for story in stories))
    return names[0] if len(names) == 1 else f"{len(names)} algorithms compared"


def _subtitle(stories: Sequence[Story]) -> str:
    """What was run, in a sentence."""
    recipe = stories[0].recipe
    task, dealt, devices = (recipe.get(table, {}) for table in ("task", "partition", "devices"))
    clients = stories[0].manifest.get("clients") or len(stories[0].clients)
    seeds = sorted({story.outcome.seed for story in stories})
    facts = [f"{len(stories)} runs", f"seeds {', '.join(map(str, seeds))}", f"{stories[0].outcome.rounds} rounds"]
    facts += [f"data {_kind(task['dataset'])}"] if "dataset" in task else []
    facts += [f"model {_kind(task['model'])}"] if "model" in task else []
    facts += [f"{clients} clients" + (f" dealt by {dealt['kind']}" if "kind" in dealt else "")]
    facts += [f"local epochs {_epochs(devices['epochs'])}"] if "epochs" in devices else []
    facts += [f"links work with probability {devices['success']}"] if devices.get("success", 1.0) != 1.0 else []
    said = f"{recipe['description']} " if recipe.get("description") else ""
    return f"{said}{', '.join(facts)}."


def _kind(rule: object) -> str:
    return str(rule.get("kind", "?")) if isinstance(rule, dict) else str(rule)


def _epochs(epochs: object) -> str:
    if isinstance(epochs, dict):
        return f"{epochs.get('low')} to {epochs.get('high')}"
    return "given per client" if isinstance(epochs, list) else str(epochs)

"""The sections of a page, each a pure function from stories to HTML."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from fedalloy.compare.table import Row, Spread, summarise
from fedalloy.records import toml
from fedalloy.report.chart import Line, line_chart
from fedalloy.report.gathering import Client, Story

SHOWN_CLIENTS, SHOWN_CLASSES, SHOWN_WORST = 60, 30, 3


def results(stories: Sequence[Story]) -> str:
    """Mean and spread over seeds, and the paired difference to the first algorithm."""
    rows, metric = summarise([story.outcome for story in stories]), stories[0].outcome.metric
    target = stories[0].outcome.target
    head = ["algorithm", f"mean {metric}", "worst 10 %", "Gini", _target_head(target), f"vs {rows[0].name}", "seeds"]
    best = max((row.mean.mean for row in rows if row.mean), default=None)
    body = [
        (_result_cells(row), "best" if row.mean and row.mean.mean == best and len(rows) > 1 else "") for row in rows
    ]
    failed = [
        f'<p class="bad">{escape(f"{row.name}, seed {run.seed}: {run.state} in round {run.round}. {run.reason}")}</p>'
        for row in rows
        for run in (*row.failed, *row.unfinished)
    ]
    note = '<p class="soft">Mean ± standard deviation over seeds; the last differences are paired by seed.</p>'
    return f"<h2>Results</h2>{table(head, body)}{note}{''.join(failed)}"


def curves(stories: Sequence[Story]) -> str:
    """Accuracy over rounds, all clients and the worst served."""
    metric, target = stories[0].outcome.metric, stories[0].outcome.target
    names = list(dict.fromkeys(story.name for story in stories))
    mean: dict[str, Line] = {name: _average(stories, name, 1) for name in names}
    worst: dict[str, Line] = {name: _average(stories, name, 2) for name in names}
    charts = line_chart(mean, f"{metric}, mean over clients and seeds", target)
    return f"<h2>Over rounds</h2>{charts}{line_chart(worst, f'{metric}, worst 10 % of the clients, mean over seeds')}"


def fairness(stories: Sequence[Story]) -> str:
    """How unequally the clients are served, and who is served worst."""
    rows = summarise([story.outcome for story in stories])
    head = ["algorithm", "worst 10 %", "best 10 %", "variance (%²)", "Gini"]
    body = [
        ([row.name, _text(row.worst), _text(row.best), _text(row.variance, 1), _text(row.gini)], "") for row in rows
    ]
    worst = [([story.name, str(story.outcome.seed), *_worst(story)], "") for story in stories if story.clients]
    named = ["algorithm", "seed", *(f"{place} client" for place in ("worst", "2nd worst", "3rd worst"))]
    note = '<p class="soft">In brackets: the score, the number of examples, the commonest class.</p>'
    return f"<h2>Fairness</h2>{table(head, body)}<h2>Who is served worst</h2>{table(named, worst)}{note}"


def data(stories: Sequence[Story]) -> str:
    """Client by class counts of the first federation: label skew along a row, quantity skew down the last column."""
    manifest = next((story.manifest for story in stories if story.manifest.get("class_counts")), None)
    if manifest is None:
        return ""
    counts: list[list[int]] = manifest["class_counts"]
    most = max((count for row in counts for count in row), default=1) or 1
    classes = min(len(counts[0]), SHOWN_CLASSES)
    names = manifest.get("names") or [f"client {number}" for number in range(len(counts))]
    body = "".join(_heat_row(names[k], row, classes, most) for k, row in enumerate(counts[:SHOWN_CLIENTS]))
    head = "".join(f"<th>{label}</th>" for label in ["", *range(classes), "all"])
    rest = f"; the first {SHOWN_CLIENTS} of {len(counts)} clients" if len(counts) > SHOWN_CLIENTS else ""
    seed = next(story.outcome.seed for story in stories if story.manifest is manifest)
    unused = manifest.get("unused", 0)
    note = f'<p class="soft">Examples by client and class, seed {seed}{rest}; {unused} examples unused.</p>'
    return (
        f'<h2>Data</h2>{note}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def participation(stories: Sequence[Story]) -> str:
    """How many contributions counted, who was missing, what was refused, what travelled."""
    head = [
        "run",
        "contributions",
        "per client",
        "absent",
        "late",
        "refused",
        "empty rounds",
        "MB up",
        "MB down",
        "simulated s",
    ]
    body = [(_tally_cells(story), "") for story in stories]
    reasons = [
        f"<p>{escape(story.name)}, seed {story.outcome.seed}: {count} refused, {escape(why)}</p>"
        for story in stories
        for why, count in story.tally.dropped.most_common(3)
    ]
    return f"<h2>Participation</h2>{table(head, body)}{''.join(reasons)}"


def tuning(entries: Sequence[dict[str, Any]]) -> str:
    """What a grid tried and chose."""
    if not entries:
        return ""
    body = [
        ([entry["name"], _settings(one["settings"]), "failed" if one["score"] is None else f"{one['score']:.3f}",
          "chosen" if one["settings"] == entry["best"] else ""], "")
        for entry in entries for one in entry["tried"]
    ]  # fmt: skip
    note = '<p class="soft">On tuning seeds, which are none of those reported above.</p>'
    return f"<h2>Tuning</h2>{note}{table(['algorithm', 'setting', 'mean', ''], body)}"


def reproduce(stories: Sequence[Story]) -> str:
    """The recipes, and what they ran on."""
    blocks = [
        f"<details><summary>{escape(story.name)}, seed {story.outcome.seed}</summary>"
        f"<pre>{escape(toml.dumps(story.recipe))}</pre></details>"
        for story in stories
    ]
    on = stories[0].environment
    facts = ", ".join(
        f"{name} {on[name]}" for name in ("fedalloy", "python", "torch", "numpy", "threads", "device") if name in on
    )
    say = "Save one of these as recipe.toml (each run folder holds its own) and run it again; the numbers are the same:"
    command = "<pre>fedalloy run recipe.toml</pre>"
    return f"<h2>Reproduce</h2><p>{say}</p>{command}{''.join(blocks)}<p class='soft'>{escape(facts)}</p>"


def table(head: Sequence[str], body: Iterable[tuple[Sequence[str], str]]) -> str:
    """A table that scrolls sideways on a small screen; every row has cells and a class."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    rows = "".join(
        f'<tr class="{kind}">{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>' for cells, kind in body
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table></div>'


def _result_cells(row: Row) -> list[str]:
    paired = row.difference.text(signed=True) if row.difference else ""
    count = f"{len(row.seeds)}" + (f" ({len(row.failed)} failed)" if row.failed else "")
    return [row.name, _text(row.mean), _text(row.worst), _text(row.gini), row.target_text, paired, count]


def _target_head(target: float | None) -> str:
    return "rounds to target" if target is None else f"rounds to {target:g}"


def _average(stories: Sequence[Story], name: str, column: int) -> list[tuple[int, float]]:
    """The mean over seeds of a curve, at every round that some seed evaluated."""
    values: dict[int, list[float]] = {}
    for story in stories:
        for point in story.curve if story.name == name else ():
            values.setdefault(point[0], []).append(float(point[column]))
    return [(round, statistics.fmean(some)) for round, some in sorted(values.items())]


def _worst(story: Story) -> list[str]:
    known = sorted((client for client in story.clients if client.score == client.score), key=lambda one: one.score)
    said = [_client(client) for client in known[:SHOWN_WORST]]
    return said + [""] * (SHOWN_WORST - len(said))


def _client(client: Client) -> str:
    examples = f", {client.examples} ex." if client.examples is not None else ""
    common = f", class {client.classes.index(max(client.classes))}" if client.classes else ""
    return f"{client.name} ({client.score:.2f}{examples}{common})"


def _tally_cells(story: Story) -> list[str]:
    tally, population = story.tally, len(story.clients) or 1
    fewest = min((tally.counted[client.id] for client in story.clients), default=0)
    most = max(tally.counted.values(), default=0)
    return [
        f"{story.name}, seed {story.outcome.seed}",
        str(tally.counted.total()),
        f"{tally.counted.total() / population:.1f} ({fewest} to {most})",
        *(str(count) for count in (tally.absent, tally.late, tally.dropped.total(), tally.barren)),
        f"{tally.bytes_up / 1e6:.2f}",
        f"{tally.bytes_down / 1e6:.2f}",
        f"{tally.seconds:.1f}",
    ]


def _heat_row(name: str, row: Sequence[int], classes: int, most: int) -> str:
    cells = "".join(_heat(count, most) for count in row[:classes])
    return f"<tr><td>{escape(name)}</td>{cells}<td>{sum(row)}</td></tr>"


def _heat(count: int, most: int) -> str:
    """A cell whose shade grows with the root of its count, so that small counts remain visible."""
    shade = 0.75 * (count / most) ** 0.5
    style = f' style="background: rgba(var(--heat), {shade:.2f})"' if count else ""
    return f'<td class="heat"{style}>{count or ""}</td>'


def _text(spread: Spread | None, digits: int = 3) -> str:
    return spread.text(digits) if spread else ""


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{path} = {value}" for path, value in settings.items())

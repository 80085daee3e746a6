"""Who holds what: examples by client and class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedalloy.report.data.plain import Chart, spans
from fedalloy.results.clients import client_name
from fedalloy.results.stories import Story

MOST_CLIENTS, MOST_CLASSES = 200, 100


def heterogeneity(stories: Sequence[Story]) -> Chart | None:
    """Counts of the first federation: skewed labels show along a row, skewed amounts down the page."""
    story = next((story for story in stories if story.manifest.get("class_counts")), None)
    if story is None:
        return None
    counts = np.array(story.manifest["class_counts"], dtype=np.int64)
    tall, wide = (-(-size // most) for size, most in zip(counts.shape, (MOST_CLIENTS, MOST_CLASSES), strict=True))
    joined = np.add.reduceat(
        np.add.reduceat(counts, range(0, len(counts), tall), 0), range(0, counts.shape[1], wide), 1
    )
    clients = range(len(counts))
    names = [client_name(story.manifest, client) for client in clients] if tall == 1 else None
    unused = story.manifest.get("unused", 0)
    rest = f" {unused} examples unused." if unused else ""
    joining = "" if tall == wide == 1 else f" A cell adds up {tall} clients and {wide} classes."
    return {
        "id": "heterogeneity",
        "kind": "heat",
        "title": "Examples by client and class",
        "value": "examples",
        "root": True,
        "columns": {"title": "class", "labels": spans(counts.shape[1], wide)},
        "rows": {"title": "client", "labels": names or [f"clients {span}" for span in spans(len(counts), tall)]},
        "panels": [{"title": "", "values": joined.tolist()}],
        "note": f"Seed {story.seed}; {int(counts.sum())} examples.{rest} Shades grow with the root of the "
        f"count, so that small ones stay visible.{joining}",
    }

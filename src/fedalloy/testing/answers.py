"""All answers of a handle on contributions, to compare the handles of two engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fedalloy.core.contributions import Contributions
from fedalloy.core.types import Payload, Tree


def answered(cohort: Contributions, neutral: Payload) -> dict[str, Any]:
    """All answers of a handle to the same questions; ``neutral`` replaces a late client's contribution."""
    told: dict[str, Any] = {"payload": cohort.payload} if "rows" in cohort.answers else {}
    told |= {"ids": cohort.ids, "stats": cohort.stats, **_known(cohort)}
    if len(cohort) == 0 or not any(cohort.template(part) for part in cohort.parts):
        return told
    asked = {question: ask(cohort) for question, ask in _ASKED.items() if question in cohort.answers}
    some, late = cohort.select(cohort.ids[1:]), cohort.resend(cohort.ids[:1], neutral)
    return {**told, **asked, "select": _summed(some) | _known(some), "resend": _summed(late) | _known(late)}


def _known(cohort: Contributions) -> dict[str, Any]:
    """What is known of contributions without reading them."""
    notes = cohort.notes
    noted = {f"{part}.{leaf}": row for (part, leaf), row in zip(notes.leaves, notes.squares.sqrt(), strict=True)}
    shapes = {part: {name: str(leaf.shape) for name, leaf in cohort.template(part).items()} for part in cohort.parts}
    return {"noted": noted, "finite": notes.finite, "template": shapes}


def _summed(cohort: Contributions) -> dict[str, Any]:
    """Every part combined with weights that are all different."""
    weights = 1.0 / (2.0 + torch.arange(len(cohort), dtype=torch.float64))
    return {part: cohort.combine(part, weights) for part in cohort.parts}


def _chunked(cohort: Contributions) -> dict[str, Any]:
    return {part: _put_together(cohort, part) for part in cohort.parts}


def _put_together(cohort: Contributions, part: str) -> Tree:
    pieces: dict[str, list[torch.Tensor]] = {}
    for chunk, (columns,) in cohort.chunks((part,)):
        pieces.setdefault(chunk.leaf, []).append(columns)
    return {name: torch.cat(found, dim=1) for name, found in pieces.items()}


_ASKED: dict[str, Callable[[Contributions], dict[str, Any]]] = {
    "norms": lambda cohort: {part: cohort.norms(part) for part in cohort.parts},
    "combine": _summed,
    "chunks": _chunked,
    "rows": lambda cohort: {part: cohort.rows(part, cohort.ids.flip(0)) for part in cohort.parts},
    "stack": lambda cohort: {part: cohort.stack(part) for part in cohort.parts},
}

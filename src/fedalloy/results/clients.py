"""The clients of a run at an evaluation: their names, scores and order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedalloy.tasks.metrics.direction import rank


@dataclass(frozen=True)
class Client:
    """One client at an evaluation; without a score it has NaN, and infinity where its loss overflowed."""

    id: int
    name: str
    score: float
    examples: int | None
    classes: tuple[int, ...]


def client_name(manifest: Mapping[str, Any], client: int) -> str:
    """The name of a client."""
    names = manifest.get("names")
    return str(names[client]) if names and client < len(names) else f"client {client}"


def clients_at(row: Mapping[str, Any], scores: Sequence[float], manifest: Mapping[str, Any]) -> list[Client]:
    """The clients of a row of ``clients.jsonl`` with these scores."""
    sizes, counts = manifest.get("sizes"), manifest.get("class_counts")
    return [
        Client(
            client,
            client_name(manifest, client),
            score,
            sizes[client] if sizes and client < len(sizes) else None,
            tuple(counts[client]) if counts and client < len(counts) else (),
        )
        for client, score in zip(row.get("ids", ()), scores, strict=False)
    ]


def worst_first(clients: Iterable[Client], higher: bool | None) -> list[Client]:
    """The clients with a value, worst served first, beginning with those whose loss overflowed."""
    known = [client for client in clients if not math.isnan(client.score)]
    return sorted(known, key=lambda client: (rank(client.score, higher), client.id))


def drawable(clients: Iterable[Client]) -> list[Client]:
    """The clients whose value is finite."""
    return [client for client in clients if math.isfinite(client.score)]

"""Every client against the first algorithm: sorted differences, and the clients that lose most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedalloy.report.data.plain import Chart, digits, many, pick
from fedalloy.results.gains import ClientGain, ClientGains

MOST_BARS = 400


def sorted_gains(gains: Sequence[ClientGains]) -> Chart | None:
    """One row of bars per algorithm, a bar per client, the largest loss at the left."""
    drawn = [(one, [client for client in one.clients if math.isfinite(client.gain)]) for one in gains]
    shown = [(one, clients) for one, clients in drawn if clients]
    if not shown:
        return None
    lost = sum(len(one.clients) - len(clients) for one, clients in drawn)
    metric, against = shown[0][0].metric, shown[0][0].against
    note = f"A bar is a client{' of one seed' if shown[0][0].redrawn else ', its mean over seeds'}: above zero it is "
    note += f"served better than under {against}, below zero worse, whether {metric} should be high or low."
    note += f" {lost} gains that are not finite cannot be drawn." if lost else ""
    groups = [_bars(one, clients) for one, clients in shown]
    return {"id": "gains", "kind": "sorted", "title": f"Gain of every client against {against}, sorted",
            "y": f"better off by ({metric})", "against": against, "groups": groups, "note": note}  # fmt: skip


def largest_losses(gains: Sequence[ClientGains], count: int = 3) -> list[dict[str, Any]]:
    """The clients of every algorithm that lose most, with their scores under it and under the first one."""
    return [
        {
            "name": one.name,
            "client": client.label,
            "first": digits(client.first),
            "score": digits(client.score),
            "gain": digits(client.gain),
            "seeds": len(client.differences),
        }
        for one in gains
        for client in one.clients[:count]
        if client.gain < 0
    ]


def _bars(one: ClientGains, clients: Sequence[ClientGain]) -> dict[str, Any]:
    kept = [clients[place] for place in pick(len(clients), MOST_BARS)]
    return {
        "name": one.name,
        "about": one.counts,
        "labels": [client.label for client in kept],
        "values": many(client.gain for client in kept),
        "before": many(client.first for client in kept),
        "after": many(client.score for client in kept),
    }

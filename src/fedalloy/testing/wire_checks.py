"""Checks of wire transforms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.func import vmap

from fedalloy.core import tree
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Shared, Wire
from fedalloy.core.screening import misfit
from fedalloy.core.types import Cohort, Context, Part, Payload
from fedalloy.testing.comparing import broken, copied, differences
from fedalloy.testing.handles import Attendance
from fedalloy.testing.problems import small_objective

CLIENTS, TOLERANCE = 3, 1e-9


def same_again(wire: Wire) -> Iterator[str]:
    """Inputs are not changed, and the same inputs give the same message and memory."""
    payload, draws = _payload(0), _draws(wire, 0)
    _, mine = wire.encode(_payload(9), wire.init_client(_shared(), Key.of(2)), draws)
    before = copied({"payload": payload, "mine": mine})
    first, second = wire.encode(payload, mine, draws), wire.encode(payload, mine, draws)
    yield from differences({"payload": payload, "mine": mine}, before)
    yield from differences(_told(second), _told(first), 0.0, "a second call differs")


def kept_form(wire: Wire) -> Iterator[str]:
    """The output has the names, shapes and dtypes of the input, and is finite."""
    sent, _ = wire.encode(_payload(0), wire.init_client(_shared(), Key.of(2)), _draws(wire, 0))
    reason = misfit(sent, {"delta": Part()}, _shared())
    yield from [reason] if reason else broken(sent)


def nobody_moved(wire: Wire) -> Iterator[str]:
    """From the initial state, an update of zero is sent as zero, unless the transform adds noise."""
    draws = _draws(wire, 0)
    if draws:
        return
    mine, unmoved = wire.init_client(_shared(), Key.of(2)), {"delta": tree.zeros_like(_payload(0)["delta"])}
    sent, kept = wire.encode(unmoved, mine, draws)
    yield from differences({"sent": sent, "kept": kept}, {"sent": unmoved, "kept": mine})


def vectorised(wire: Wire) -> Iterator[str]:
    """``encode`` works under ``torch.func.vmap`` and gives the same results as one by one."""
    mine = [wire.init_client(_shared(), Key.of(2).fold(client)) for client in range(CLIENTS)]
    used = [wire.encode(_payload(9), mine[client], _draws(wire, client))[1] for client in range(CLIENTS)]
    apart = [wire.encode(_payload(client), used[client], _draws(wire, client)) for client in range(CLIENTS)]
    payloads = {"delta": tree.stack([_payload(client)["delta"] for client in range(CLIENTS)])}
    together = wire.draws(_shared(), Key.of(8).each(torch.arange(CLIENTS)))
    try:
        found = vmap(wire.encode)(payloads, _stacked(used), together)
    except Exception as error:
        yield f"fails under vmap: {type(error).__name__}: {error}"
        return
    yield from differences(_told(found), _stacked([_told(one) for one in apart]), TOLERANCE)


def afterwards(wire: Wire) -> Iterator[str]:
    """``after`` only uses ids, statistics and the number of clients: contributions are already combined."""
    delta = tree.stack([_payload(client)["delta"] for client in range(CLIENTS)])
    cohort, weights = Cohort(torch.arange(CLIENTS), {"delta": delta}), torch.full((CLIENTS,), 1.0 / CLIENTS)
    combined, ctx = {"delta": cohort.combine("delta", weights)}, Context(1, CLIENTS, Key.of(3))
    found, expected = (wire.after(combined, one, weights, ctx) for one in (Attendance(cohort), cohort))
    yield from differences(found, expected)


CHECKS = {
    "afterwards": afterwards,
    "same again": same_again,
    "kept form": kept_form,
    "nobody moved": nobody_moved,
    "vectorised": vectorised,
}


def _shared() -> Shared:
    params, _ = small_objective("mlp").init(Key.of(1))
    return {"params": params, "buffers": {}}


def _payload(seed: int) -> Payload:
    key = Key.of(seed).fold("payload")
    return {
        "delta": {
            name: key.fold(name).normal(*leaf.shape, dtype=torch.float64) for name, leaf in _shared()["params"].items()
        }
    }


def _draws(wire: Wire, client: int) -> dict[str, Any]:
    return tree.rows(wire.draws(_shared(), Key.of(8).each(torch.tensor([client]))), 0)


def _told(encoded: tuple[Payload, Any]) -> dict[str, Any]:
    return {"payload": encoded[0], "mine": encoded[1]}


def _stacked(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: _stacked([value[name] for value in values]) for name in values[0]}
    return torch.stack([torch.as_tensor(value) for value in values])

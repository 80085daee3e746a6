"""The shared parts that a node works with: what it was sent, what it has, and the form of what it never receives."""

from __future__ import annotations

import torch

from fedalloy.core import aspects
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import FedalloyError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Objective, Shared
from fedalloy.core.types import Tree
from fedalloy.flower.store import NodeStore


class Incomplete(FedalloyError):
    """This node does not have the leaves that stay with its client: the server must send them again."""


def whole(received: Shared, algorithm: Algorithm, objective: Objective, store: NodeStore, device: str) -> Shared:
    """All parts that a client's program looks at. Leaves that stay at the clients come once and are kept here."""
    shared = _with_own(received, algorithm, store, device) if aspects.stays(algorithm.solver) else received
    return _with_forms(shared, objective, device) if aspects.receives(algorithm.solver) is not None else shared


def _with_own(received: Shared, algorithm: Algorithm, store: NodeStore, device: str) -> Shared:
    """What arrived with the leaves of this node's own in between, in the order in which they first came."""
    own = {part: aspects.stays(algorithm.solver).split(leaves)[0] for part, leaves in received.items()}
    if any(own.values()):
        store.keep_own(own, {part: list(leaves) for part, leaves in received.items()})
        return received
    kept = store.own()
    if kept is None:
        raise Incomplete("this node has no longer the leaves that stay with its client; they must be sent again")
    leaves, order = kept
    merged = {part: {**leaves.get(part, {}), **sent} for part, sent in received.items()}
    return {part: _ordered(found, order.get(part, []), device) for part, found in merged.items()}


def _ordered(leaves: Tree, order: list[str], device: str) -> Tree:
    known = [name for name in order if name in leaves]
    return {name: leaves[name].to(device) for name in (*known, *(name for name in leaves if name not in known))}


def _with_forms(shared: Shared, objective: Objective, device: str) -> Shared:
    """A model that never travels still has names, shapes and dtypes; its numbers are not known here and are NaN, so
    that whoever uses them is found out."""
    if "params" in shared and "buffers" in shared:
        return shared
    params, buffers = objective.init(Key.of(0))
    forms = {"params": _unknown(params, device), "buffers": _unknown(buffers, device)}
    return {**forms, **shared}


def _unknown(leaves: Tree, device: str) -> Tree:
    return {
        name: torch.full_like(leaf, torch.nan if leaf.is_floating_point() else 0, device=device)
        for name, leaf in leaves.items()
    }

"""The shared parts that a node uses: what it received, what it has, and the shapes of what it never receives.

Tensors of an order that do not fit its model are refused before anything is computed with them.
"""

from __future__ import annotations

import torch

from fedalloy.core import aspects
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.fingerprint import digest
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Objective, Shared
from fedalloy.core.types import Payload, Tree
from fedalloy.flower.node.store import NodeStore
from fedalloy.flower.protocol.header import LeavesLost, Refused


def whole(received: Shared, algorithm: Algorithm, objective: Objective, store: NodeStore, device: str) -> Shared:
    """All parts that a client uses. Local leaves are received once and kept here."""
    shared = _with_own(received, algorithm, store, device) if aspects.local_leaves(algorithm.solver) else received
    return _with_forms(shared, objective, device) if aspects.receives(algorithm.solver) is not None else shared


def _with_own(received: Shared, algorithm: Algorithm, store: NodeStore, device: str) -> Shared:
    """The received leaves together with this node's local leaves, in their original order."""
    own = {part: aspects.local_leaves(algorithm.solver).split(leaves)[0] for part, leaves in received.items()}
    if any(own.values()):
        store.keep_own(own, {part: list(leaves) for part, leaves in received.items()})
        return received
    kept = store.own()
    if kept is None:
        raise LeavesLost("this node has lost its client's local leaves; they must be sent again")
    leaves, order = kept
    merged = {part: {**leaves.get(part, {}), **sent} for part, sent in received.items()}
    return {part: _ordered(found, order.get(part, []), device) for part, found in merged.items()}


def _ordered(leaves: Tree, order: list[str], device: str) -> Tree:
    known = [name for name in order if name in leaves]
    return {name: leaves[name].to(device) for name in (*known, *(name for name in leaves if name not in known))}


def _with_forms(shared: Shared, objective: Objective, device: str) -> Shared:
    """Add a model that is never sent, with names, shapes and dtypes; its values are unknown here and set to NaN, so
    that wrong uses are noticed."""
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


def frozen_digest(objective: Objective) -> str | None:
    """A hash of the leaves that are neither trained nor sent, with their names; None if there are none."""
    leaves = objective.frozen
    return digest(*(part for name in sorted(leaves) for part in (name, leaves[name]))) if leaves else None


def check_frozen(found: str | None, wanted: str | None, client: str) -> None:
    """Refuse to train on other frozen leaves than the server's: updates to different models must not be averaged."""
    if found != wanted:
        raise Refused(
            f"the model of '{client}' has other frozen leaves than the server's (another pretrained base, or another "
            "version of it): load the same base on all nodes"
        )


def check_shared(shared: Shared, objective: Objective) -> None:
    """Refuse a model whose names, shapes or types are not those of the task's model."""
    for part, expected in objective.forms.items():
        if part not in shared:
            raise Refused(f"the order has no part 'shared/{part}'")
        _check(part, shared[part], expected)


def check_cohort(payload: Payload, objective: Objective, update: str) -> int:
    """Refuse models of other clients that do not fit; returns their number."""
    if not payload.get(update):
        raise Refused(f"the order has no part 'cohort/{update}'")
    count = min((len(leaf) if leaf.dim() else 0) for leaf in payload[update].values())
    forms = objective.forms
    parts = {update: forms.get("params", {}), "buffers": forms.get("buffers", {})}
    for part, leaves in payload.items():
        stacked = {name: torch.empty(count, *form.shape, dtype=form.dtype, device="meta")
                   for name, form in parts.get(part, {}).items()}  # fmt: skip
        _check(part, leaves, stacked)
    if count < 1:
        raise Refused("the order has no models of other clients")
    return count


def _check(part: str, leaves: Tree, expected: Tree) -> None:
    if leaves.keys() != expected.keys():
        raise Refused(f"the tensors of '{part}' are not those of the model")
    for name, leaf in leaves.items():
        if leaf.shape != expected[name].shape or leaf.dtype != expected[name].dtype:
            raise Refused(
                f"'{name:.80}' of '{part}' is {leaf.dtype} of shape {tuple(leaf.shape)}, the model's is "
                f"{expected[name].dtype} of shape {tuple(expected[name].shape)}"
            )

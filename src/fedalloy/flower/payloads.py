"""The part of an algorithm that is sent to nodes, the tensors for nodes, and contributions from their answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedalloy.core import aspects
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.engine import ModelName
from fedalloy.core.packing import unpack
from fedalloy.core.protocols import Shared
from fedalloy.core.screening import misfit
from fedalloy.core.spec import to_spec
from fedalloy.core.traffic import sent_to, tried_models
from fedalloy.core.types import Contributions, Payload
from fedalloy.flower.protocol.header import Malformed

ALWAYS = {"num_examples": math.nan, "num_steps": math.nan, "train_loss": math.nan, "bytes_up": 0.0}
"""Statistics of every contribution, and the default for one that a node does not send."""


def counted_here(algorithm: Algorithm) -> frozenset[str]:
    """Statistics that the server computes from a client's size (``core.recount``): they need not be sent."""
    return frozenset({"num_steps"}) | aspects.provides(algorithm.solver)


def told_algorithm(algorithm: Algorithm) -> dict[str, Any]:
    """The description of an algorithm for nodes: what they carry out, and which statistics they must send. The server's
    rules are not sent."""
    wire = [to_spec("wire", one) for one in algorithm.wire]
    return {
        "solver": without_infinities(to_spec("solver", algorithm.solver)),
        "wire": [without_infinities(one) for one in wire],
        "weighting": type(algorithm.weighting).__name__,
        "requires": sorted(algorithm.weighting.requires - counted_here(algorithm)),
    }


def without_infinities(value: Any) -> Any:
    """Infinities as strings, since JSON has none."""
    if isinstance(value, dict):
        return {name: without_infinities(one) for name, one in value.items()}
    if isinstance(value, list):
        return [without_infinities(one) for one in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def trained_on(algorithm: Algorithm, shared: Shared, *, known: bool) -> Payload:
    """The parts of an order to train: what the solver receives, without the leaves that a known client has."""
    return _named("shared", sent_to(algorithm, shared, known=known))


def scored(algorithm: Algorithm, shared: Shared, models: Sequence[ModelName], *, known: bool) -> Payload:
    """The parts of an order to score: the model, and for a client's own models what the solver receives."""
    wanted = {part: shared[part] for part in ("params", "buffers")} if "global" in models else {}
    if any(name != "global" for name in models):
        wanted = {**algorithm.received(shared), **wanted}
    return _named("shared", algorithm.exchanged(wanted) if known and algorithm.stateful else wanted)


def tried(algorithm: Algorithm, shared: Shared, cohort: Contributions) -> Payload:
    """The parts of an order to score all clients' models."""
    common, sent = tried_models(algorithm, shared, cohort)
    return {**_named("shared", common), **_named("cohort", sent)}


def check_sketch(sketch: Payload, algorithm: Algorithm, shared: Shared) -> None:
    """Refuse what is not a contribution, only from names, shapes and dtypes. Packed parts are checked when they
    are unpacked."""
    parts, packed = algorithm.parts(shared), algorithm.packings.keys()
    if sketch.keys() == parts.keys():
        sketch = {name: leaves for name, leaves in sketch.items() if name not in packed}
        parts = {name: part for name, part in parts.items() if name not in packed}
    _refuse(misfit(sketch, parts, shared))


def unpacked(sent: Payload, algorithm: Algorithm, shared: Shared) -> Payload:
    """The contribution in the algorithm's form, on the server's device."""
    parts, device = algorithm.parts(shared), next(iter(shared["params"].values())).device
    like = {name: part.template(shared) for name, part in parts.items()}
    placed = {part: {name: leaf.to(device) for name, leaf in leaves.items()} for part, leaves in sent.items()}
    try:
        payload = unpack(placed, algorithm.packings, like)
    except ValueError as error:
        raise Malformed(str(error)) from error
    _refuse(misfit(payload, parts, shared))
    return payload


def _named(prefix: str, parts: Shared | Payload) -> Payload:
    return {f"{prefix}/{name}": leaves for name, leaves in parts.items()}


def _refuse(reason: str | None) -> None:
    if reason:
        raise Malformed(reason)

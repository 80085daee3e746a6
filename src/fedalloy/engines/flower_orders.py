"""What the nodes of a federation are told of an algorithm, as data."""

from __future__ import annotations

import math
from typing import Any

from fedalloy.core import aspects
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.spec import to_spec


def counted_here(algorithm: Algorithm) -> frozenset[str]:
    """Statistics that the server computes from a client's size (``core.recount``): nobody needs to send them."""
    return frozenset({"num_steps"}) | aspects.provides(algorithm.solver)


def told_algorithm(algorithm: Algorithm) -> dict[str, Any]:
    """What nodes are told of an algorithm: what they carry out themselves, and which statistics they are to send. Rules
    of the server stay on the server."""
    wire = [to_spec("wire", one) for one in algorithm.wire]
    return {
        "solver": without_infinities(to_spec("solver", algorithm.solver)),
        "wire": [without_infinities(one) for one in wire],
        "weighting": type(algorithm.weighting).__name__,
        "requires": sorted(algorithm.weighting.requires - counted_here(algorithm)),
    }


def without_infinities(value: Any) -> Any:
    """JSON has none: they are written as words."""
    if isinstance(value, dict):
        return {name: without_infinities(one) for name, one in value.items()}
    if isinstance(value, list):
        return [without_infinities(one) for one in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value

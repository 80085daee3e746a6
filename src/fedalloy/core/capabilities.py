"""Capabilities that a solver needs from a model besides classifying."""

from __future__ import annotations

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.aspects import Generative
from fedalloy.core.errors import SpecError
from fedalloy.core.protocols import Task


def check_capabilities(algorithm: Algorithm, task: Task) -> None:
    """Refuse, before the first round, a model without a capability that the solver needs."""
    known, asked = task.objective.capabilities, algorithm.solver.aspect(Generative)
    missing = asked.capabilities - known if asked is not None else frozenset()
    if asked is not None and missing:
        named = f" ({' or '.join(asked.models)})" if asked.models else ""
        raise SpecError(
            f"solver '{type(algorithm.solver).__name__}' needs a model that can {' and '.join(sorted(missing))}, but "
            f"this one can only {', '.join(sorted(known))}: choose a generative model{named}"
        )

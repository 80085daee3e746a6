"""Capabilities that a solver needs from a model besides classifying."""

from __future__ import annotations

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.aspects import Generative
from fedalloy.core.errors import SpecError
from fedalloy.core.protocols import Task

_BY_HITS = frozenset({"accuracy_after", "cross_score"})


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


def check_targets(algorithm: Algorithm, task: Task) -> None:
    """Refuse, before the first round, a task without what the algorithm assumes of its targets. Methods that
    make samples make them by class; some weightings use the share of correct predictions."""
    if algorithm.is_generative and task.kind not in (None, "classification"):
        raise SpecError(
            f"solver '{type(algorithm.solver).__name__}' makes samples of classes and needs one class per example, but "
            f"this task is of the kind '{task.kind}': choose a method without synthetic samples"
        )
    if algorithm.is_generative and task.objective.augmentation is not None:
        raise SpecError(
            f"solver '{type(algorithm.solver).__name__}' has losses of its own, which see the examples as they are: "
            "leave augment out of the task"
        )
    wanted = sorted(algorithm.requires & _BY_HITS)
    if wanted and task.kind == "regression":
        raise SpecError(
            f"weighting '{type(algorithm.weighting).__name__}' uses the clients' accuracy ({wanted[0]}), which a "
            "regression does not have: choose another weighting"
        )

"""What a model must be able to do for a solver that asks for more than a class."""

from __future__ import annotations

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import SpecError
from fedalloy.core.protocols import Task


def check_roles(algorithm: Algorithm, task: Task) -> None:
    """Refuse, before the first round, a model that cannot play what the solver asks of it."""
    known = task.objective.roles
    missing = algorithm.solver.roles - known
    if missing:
        raise SpecError(
            f"solver '{type(algorithm.solver).__name__}' needs a model that can {' and '.join(sorted(missing))}, and "
            f"this one can only {', '.join(sorted(known))}: choose a generative model ('acgan' or 'acgan_rows' for "
            "FedCGAN, 'cvae' or 'cvae_rows' for FedCVAE)"
        )

"""What travels to the clients in a round, and what it takes: the bytes of tensors, nothing for headers.

A client receives the parts that its solver works with. Leaves that stay at the clients travel to a client of which no
state is kept yet, and never again: from then on the client has them. Scores and statistics are numbers in headers.
"""

from __future__ import annotations

from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.protocols import Shared
from fedalloy.core.types import Contributions, Payload


def sent_to(algorithm: Algorithm, shared: Shared, *, known: bool) -> Shared:
    """The leaves that a client receives for its round; ``known``: it keeps a state of an earlier one."""
    received = algorithm.received(shared)
    return algorithm.exchanged(received) if known and algorithm.stateful else received


def bytes_down(algorithm: Algorithm, shared: Shared, clients: int, strangers: int) -> int:
    """What goes to so many clients, of whom so many keep no state yet."""
    first, later = (nbytes(sent_to(algorithm, shared, known=known)) for known in (False, True))
    return strangers * first + (clients - strangers) * later


def tried_models(algorithm: Algorithm, shared: Shared, cohort: Contributions) -> tuple[Shared, Payload]:
    """What every client of a cohort receives so that it can try the models of all others: the common model, and what
    each of them made of it."""
    common = {part: shared[part] for part in ("params", "buffers")}
    return common, {name: cohort.rows(name, cohort.ids) for name in _of_a_model(algorithm, cohort)}


def cross_bytes(algorithm: Algorithm, shared: Shared, cohort: Contributions) -> int:
    """What the exchange of models takes, where the weighting requires ``cross_score``."""
    if "cross_score" not in algorithm.requires or not len(cohort):
        return 0
    common = sum(tree.nbytes(shared[part]) for part in ("params", "buffers"))
    one = sum(tree.nbytes(cohort.template(name)) for name in _of_a_model(algorithm, cohort))
    return len(cohort) * (common + len(cohort) * one)


def _of_a_model(algorithm: Algorithm, cohort: Contributions) -> list[str]:
    return [name for name in (algorithm.update, "buffers") if name in cohort.parts]


def nbytes(parts: Shared | Payload) -> int:
    """The bytes of all parts.

    >>> import torch
    >>> nbytes({"params": {"w": torch.zeros(3)}, "buffers": {}})
    12
    """
    return sum(tree.nbytes(leaves) for leaves in parts.values())

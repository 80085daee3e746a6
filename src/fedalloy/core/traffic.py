"""What is sent to the clients in a round, in bytes of tensors, without headers.

A client receives the parts that its solver needs. Leaves that stay at the clients are sent to a client without a state,
and never again, because the client keeps them. Scores and statistics count as headers.
"""

from __future__ import annotations

from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.protocols import Shared
from fedalloy.core.types import Contributions, Payload


def sent_to(algorithm: Algorithm, shared: Shared, *, known: bool) -> Shared:
    """The leaves that a client receives for its round; ``known``: it has a state from an earlier round."""
    received = algorithm.received(shared)
    return algorithm.exchanged(received) if known and algorithm.stateful else received


def bytes_down(algorithm: Algorithm, shared: Shared, clients: int, strangers: int) -> int:
    """The bytes sent to ``clients`` clients, of which ``strangers`` have no state yet."""
    first = nbytes(sent_to(algorithm, shared, known=False))
    if strangers == clients:
        return clients * first
    return strangers * first + (clients - strangers) * nbytes(sent_to(algorithm, shared, known=True))


def tried_models(algorithm: Algorithm, shared: Shared, cohort: Contributions) -> tuple[Shared, Payload]:
    """What every client of a cohort receives to score the models of all others: the shared model, and every client's
    update of it."""
    common = {part: shared[part] for part in ("params", "buffers")}
    return common, {name: cohort.rows(name, cohort.ids) for name in _of_a_model(algorithm, cohort)}


def cross_bytes(algorithm: Algorithm, shared: Shared, cohort: Contributions) -> int:
    """The bytes of the exchange of models; 0 unless the weighting requires ``cross_score``."""
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

"""Lost workers of the engine ``ray``: which errors are a loss, and when the block that was running is to blame.

A worker whose machine is ending reports whatever failed first: a broken pipe, a reset connection, an error of the
object store, or an error in the middle of a client's program. So an error is a loss if its kind says so, and also if
the worker that reported it cannot read the object store of its machine any more, which it is asked to do.

A machine that is lost takes all its workers along, one after another, and the same block may be given to several of
them before the first loss is known. So a block that brought a worker down goes to another machine, where there is one,
and only deaths on different machines, or on the only one, count against the block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from typing import Any

from fedalloy.engines.cluster.worker import StoreLost

TRIES = 2
"""How often a block may bring its worker down before the run stops."""
MOST_ON_ONE = 16
"""The same on one of several machines, which may be going down with all its workers."""
_KINDS = (
    "RayActorError", "WorkerCrashedError", "ObjectLostError", "NodeDiedError", "OutOfMemoryError",
    "LocalRayletDiedError",
)  # fmt: skip


class Blame(Enum):
    """What an error says: that its worker is lost, that something it had asked of others is, or what it says itself."""

    WORKER = 1
    OTHERS = 2
    NOBODY = 3


def died(ray: Any, error: BaseException | None) -> bool:
    """Whether an error says that a worker, or what it held, is gone."""
    return isinstance(error, _kinds(ray, _KINDS))


def blame(ray: Any, error: BaseException, reads: Callable[[], bool]) -> Blame:
    """What the error of a call says; ``reads`` asks its worker to read the object store."""
    cause = getattr(error, "cause", None) if isinstance(error, ray.exceptions.RayTaskError) else None
    if died(ray, cause):
        return Blame.OTHERS
    if died(ray, error) or _cut_off(ray, cause or error) or not reads():
        return Blame.WORKER
    return Blame.OTHERS if isinstance(cause or error, _kinds(ray, ("RayError",))) else Blame.NOBODY


def _cut_off(ray: Any, error: BaseException) -> bool:
    """Whether a worker's connections have failed; errors of files name a file."""
    connection = isinstance(error, OSError | EOFError) and getattr(error, "filename", None) is None
    return connection or isinstance(error, (StoreLost, *_kinds(ray, ("RaySystemError",))))


def _kinds(ray: Any, names: Iterable[str]) -> tuple[type, ...]:
    """Those of Ray's errors that this version of Ray has."""
    return tuple(kind for name in names if (kind := getattr(ray.exceptions, name, None)) is not None)


def reason(error: BaseException) -> str:
    """The last line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]


def may_take(node: str, deaths: Sequence[str], others: Iterable[str]) -> bool:
    """Whether a block that brought workers down on some machines may go to a worker of this one.

    >>> may_take("a", ["a"], ["a", "b"]), may_take("b", ["a"], ["a", "b"]), may_take("a", ["a"], ["a"])
    (False, True, True)
    """
    return node not in deaths or not set(others) - set(deaths)


def is_to_blame(deaths: Sequence[str], machines: Collection[str], tries: int) -> bool:
    """Whether these deaths, by machine, are enough to blame the block.

    >>> is_to_blame(["a", "a"], {"a"}, 2)
    True
    >>> is_to_blame(["a", "a"], {"a", "b"}, 2), is_to_blame(["a", "b"], {"a", "b"}, 2)
    (False, True)
    """
    elsewhere = len(machines) == 1 or len(set(deaths)) > 1
    return len(deaths) >= (tries if elsewhere else MOST_ON_ONE)

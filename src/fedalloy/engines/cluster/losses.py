"""Lost workers of the engine ``ray``: which errors are a loss, and when the block that was running is to blame.

A machine that is lost takes all its workers along, one after another, and the same block may be given to several of
them before the first loss is known. So a block that brought a worker down goes to another machine, where there is one,
and only deaths on different machines, or on the only one, count against the block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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


def died(ray: Any, error: BaseException | None) -> bool:
    """Whether an error says that a worker, or what it held, is gone."""
    kinds = tuple(kind for name in _KINDS if (kind := getattr(ray.exceptions, name, None)) is not None)
    return isinstance(error, kinds)


def lost_its_store(error: BaseException) -> bool:
    """Whether a worker lives on without the object store of its machine."""
    return isinstance(getattr(error, "cause", None), StoreLost)


def cut_off(ray: Any, error: BaseException) -> bool:
    """The same for a worker that was asked for what it holds: Ray's own reads failed, and the worker reads no files."""
    system = getattr(ray.exceptions, "RaySystemError", StoreLost)
    return isinstance(getattr(error, "cause", None), StoreLost | OSError | system)


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

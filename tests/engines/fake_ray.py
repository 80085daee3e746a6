"""Ray's calls in one process and one thread, with workers that die where a test wants it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from fedalloy.core.errors import ClientError
from fedalloy.engines.cluster.worker import StoreLost

FETCH = ("prepare", "run", "dots", "cross", "reads")
"""Methods of a worker that read the object store."""


class RayError(Exception):
    """The base of Ray's errors."""


class ActorDied(RayError):
    """What Ray raises for a call to a dead actor."""


class TaskFailed(RayError):
    """An error inside a call."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


OTHERS = {
    name: type(name, (RayError,), {})
    for name in (
        "WorkerCrashedError", "ObjectLostError", "NodeDiedError", "OutOfMemoryError", "LocalRayletDiedError",
        "RaySystemError", "GetTimeoutError", "RpcError", "ObjectStoreFullError", "OutOfDiskError",
        "PlasmaObjectNotAvailable",
    )
}  # fmt: skip
"""Errors of Ray's that a test may let a worker report."""


def failed(cause: BaseException) -> TaskFailed:
    """An error inside a call as Ray raises it: also of the type of its cause, which may have come from call to call."""
    if isinstance(cause, TaskFailed):
        return failed(cause.cause)

    class Both(TaskFailed, type(cause)):  # type: ignore[misc]
        def __init__(self) -> None:
            self.cause = cause

        def __str__(self) -> str:
            return f"{type(cause).__name__}: {cause}"

    return Both()


@dataclass(eq=False)
class Reference:
    """The future result of a call: a value or an error."""

    value: Any = None
    error: BaseException | None = None


@dataclass(eq=False)
class FakeRay:
    """``dies(number, method)`` says whether the worker that gets call ``number`` dies of it, ``breaks`` whether it
    then lives on without the object store of its machine, which the methods in ``FETCH`` need. ``faults`` is what a
    call reports instead of its answer; with ``ending`` because its machine is ending, so that the worker is broken from
    then on. Calls that wait are heard in the order that ``pick`` chooses."""

    dies: Callable[[int, str], bool] = lambda number, method: False
    breaks: Callable[[int], bool] = lambda number: False
    pick: Callable[[list[Reference]], Reference] = lambda references: references[0]
    faults: Callable[[int, str], Exception | None] = lambda number, method: None
    ending: bool = True
    calls: int = 0
    started: int = 0
    exceptions: Any = field(
        default_factory=lambda: SimpleNamespace(
            RayError=RayError, RayActorError=ActorDied, RayTaskError=TaskFailed, **OTHERS
        )
    )

    def put(self, value: Any) -> Any:
        return value

    def get(self, reference: Reference) -> Any:
        if reference.error is not None:
            raise reference.error
        return reference.value

    def wait(self, references: list[Reference], num_returns: int, timeout: float | None) -> Any:
        return [self.pick(references)], []

    def remote(self, **resources: Any) -> Callable[[type], Any]:
        return lambda kind: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: Actor(self, kind())))

    def kill(self, actor: Actor, no_restart: bool) -> None:
        actor.dead = True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8.0}


class Actor:
    """A worker in this process; arguments and answers are copied, as if they were sent."""

    def __init__(self, ray: FakeRay, worker: Any) -> None:
        self.ray, self.worker, self.dead, self.broken = ray, worker, False, False
        ray.started += 1

    def __getattr__(self, method: str) -> Any:
        def call(*given: Any, returns: int = 1) -> Any:
            number, self.ray.calls = self.ray.calls, self.ray.calls + 1
            self.dead = self.dead or self.ray.dies(number, method)
            self.broken = self.broken or self.ray.breaks(number)
            lost = next((one.error for one in given if isinstance(one, Reference) and one.error), None)
            fault = self.ray.faults(number, method)
            self.broken = self.broken or (fault is not None and self.ray.ending)
            if self.dead or lost or (fault and not isinstance(fault, ClientError)):
                error = ActorDied("dead") if self.dead else failed(lost) if lost else fault
                return [Reference(error=error) for _ in range(returns)] if returns > 1 else Reference(error=error)
            if fault:
                return Reference(fault)
            if self.broken and method in FETCH:
                return Reference(error=failed(StoreLost("OSError: Broken pipe")))
            plain = [one.value if isinstance(one, Reference) else one for one in given]
            try:
                found = getattr(self.worker, method)(*_sent(plain))
            except Exception as error:
                return Reference(error=failed(error))
            return [Reference(one) for one in found] if returns > 1 else Reference(found)

        return SimpleNamespace(
            remote=call,
            options=lambda num_returns: SimpleNamespace(remote=lambda *given: call(*given, returns=num_returns)),
        )


def _sent(given: list[Any]) -> list[Any]:
    try:
        found: list[Any] = pickle.loads(pickle.dumps(given))
        return found
    except (pickle.PicklingError, AttributeError, TypeError):
        return copy.copy(given)

"""Ray's calls in one process and one thread, with workers that die where a test wants it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from fedalloy.engines.cluster.worker import StoreLost

FETCH = ("prepare", "run", "dots", "cross")
"""Methods of a worker that read the object store."""


class ActorDied(Exception):
    """What Ray raises for a call to a dead actor."""


class OtherError(Exception):
    """An error of Ray's that these tests do not raise."""


class TaskFailed(Exception):
    """An error inside a call."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(eq=False)
class Reference:
    """The future result of a call: a value or an error."""

    value: Any = None
    error: BaseException | None = None


@dataclass(eq=False)
class FakeRay:
    """``dies(number, method)`` says whether the worker that gets call ``number`` dies of it, ``breaks`` whether it
    then lives on without the object store of its machine, which the methods in ``FETCH`` need. Calls that wait are
    heard in the order that ``pick`` chooses."""

    dies: Callable[[int, str], bool] = lambda number, method: False
    breaks: Callable[[int], bool] = lambda number: False
    pick: Callable[[list[Reference]], Reference] = lambda references: references[0]
    calls: int = 0
    started: int = 0
    exceptions: Any = field(
        default_factory=lambda: SimpleNamespace(
            RayActorError=ActorDied, WorkerCrashedError=OtherError, ObjectLostError=OtherError,
            NodeDiedError=OtherError, OutOfMemoryError=OtherError, RayTaskError=TaskFailed,
        )
    )  # fmt: skip

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
            failed = next((one.error for one in given if isinstance(one, Reference) and one.error), None)
            if self.dead or failed:
                error: Exception = ActorDied("dead") if self.dead else TaskFailed(failed or Exception())
                return [Reference(error=error) for _ in range(returns)] if returns > 1 else Reference(error=error)
            if self.broken and method in FETCH:
                return Reference(error=TaskFailed(StoreLost("OSError: Broken pipe")))
            plain = [one.value if isinstance(one, Reference) else one for one in given]
            try:
                found = getattr(self.worker, method)(*_sent(plain))
            except Exception as error:
                return Reference(error=TaskFailed(error))
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

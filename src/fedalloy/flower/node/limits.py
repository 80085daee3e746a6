"""The limits that a node's policy sets for the work: model size, local steps, memory, clipping and noise.

Each is checked before the work begins, from the order and the number of examples.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.protocols import LocalSolver, Shared, Wire
from fedalloy.flower.node.policy import Policy
from fedalloy.flower.protocol.header import Refused
from fedalloy.methods.wires.clip import Clip
from fedalloy.methods.wires.noise import Noise

_MOST_LEAVES = 4_000
_BYTES_PER_PLACE = 48
"""Bytes per example and epoch of a round's plan: index and mask, and the memory to build them."""
_MORE_EPOCHS = ("personal_epochs", "shared_epochs")
_WITHIN_STEPS = ("inner", "langevin")
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
"""glibc's ``malloc_trim``, found once, before any order: carrying out one loads no library."""


def check_size(factory: Callable[[], nn.Module], most: int, *, own: bool = False) -> None:
    """Refuse a model with more parameters than allowed, before memory is allocated.

    The model is built without data to count its parameters; the operator's ``own`` model, which may need real tensors,
    is stopped while it is built.
    """
    count = leaves = 0

    def counting(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal count, leaves
        count, leaves = count + (parameter.numel() if isinstance(parameter, torch.Tensor) else 0), leaves + 1
        if count > most or leaves > _MOST_LEAVES:
            raise Refused(f"the model has more parameters than the policy of this node allows ({most})")

    hook = register_module_parameter_registration_hook(counting)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu" if own else "meta"):
            factory()
    finally:
        hook.remove()


def check_steps(solver: LocalSolver, epochs: int, examples: int, policy: Policy) -> None:
    """Refuse more local steps than allowed, and plans larger than the memory; ``epochs`` of -1 means the solver's."""
    said = dict(_numbers(solver))
    passes = (said.get("epochs", 1) if epochs < 0 else epochs) + sum(said.get(name, 0) for name in _MORE_EPOCHS)
    inside = math.prod(max(1, said.get(name, 1)) for name in _WITHIN_STEPS)
    steps = passes * math.ceil(examples / max(1, said.get("batch_size", examples))) * inside
    if steps > policy.max_steps:
        raise Refused(f"the order asks for {steps} local steps, the policy of this node allows {policy.max_steps}")
    if passes * examples * _BYTES_PER_PLACE > policy.max_memory_megabytes * 1e6:
        raise Refused("the order asks for more epochs than fit into the memory that the policy of this node allows")


def check_protected(algorithm: Algorithm, shared: Shared, policy: Policy) -> None:
    """Refuse a round whose updates would be sent without the clipping and the noise that the policy requires."""
    if policy.require_clip is None:
        return
    for part, form in algorithm.parts(shared).items():
        acting = [wire for wire in algorithm.wire if getattr(wire, "part", part) == part]
        if policy.require_noise and not (acting and _is_noise(acting[-1], form.like, policy.require_noise)):
            raise Refused(_wanted(part, f"noise of at least {policy.require_noise:g}", "noise"))
        if acting[-1:] and isinstance(acting[-1], Noise):
            acting.pop()
        if not (acting[-1:] and isinstance(acting[-1], Clip) and acting[-1].norm <= policy.require_clip):
            raise Refused(_wanted(part, f"clipping to at most {policy.require_clip:g}", "clip"))


def _is_noise(wire: Wire, like: str, least: float) -> bool:
    """Whether a wire adds large enough noise to every entry of a part. ``like``, the shape of the noise, comes from the
    server too: only that of the part itself is accepted."""
    return isinstance(wire, Noise) and wire.std >= least and wire.like == like


@contextmanager
def bounded_memory(megabytes: float, device: str) -> Iterator[None]:
    """Limit the additional memory of this process, where the system supports it (Linux, on a CPU)."""
    _give_back_free_memory()
    used = _used() if device == "cpu" and math.isfinite(megabytes) else None
    if used is None:
        yield
        return
    import resource  # only now: other systems than Linux may not have it

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = used + int(megabytes * 1e6)
    known = [one for one in (soft, hard) if one != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([wanted, *known]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _give_back_free_memory() -> None:
    """Return free memory to the system: what malloc keeps already counts as used, and could be used beyond the
    limit."""
    if _TRIM is not None:
        _TRIM(0)


def is_memory_error(error: BaseException | None) -> bool:
    """Whether an allocation failed; torch has no exception type for that on a CPU."""
    while error is not None:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error)[:500]:
            return True
        error = error.__cause__
    return False


def _used() -> int | None:
    """The memory that counts towards the limit now, in bytes."""
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    return None


def _numbers(solver: LocalSolver) -> Iterator[tuple[str, int]]:
    """The integer settings of a solver, after those of a solver inside it."""
    values = {one.name: getattr(solver, one.name) for one in fields(solver)}  # type: ignore[arg-type]
    for value in values.values():
        if isinstance(value, LocalSolver):
            yield from _numbers(value)
    yield from ((name, value) for name, value in values.items() if isinstance(value, int))


def _wanted(part: str, what: str, how: str) -> str:
    return (
        f"the policy of this node requires {what} of every part that it sends, and '{part}' would be sent without it: "
        f"add it to the recipe's [[wire]] (kind = '{how}', part = '{part}')"
    )

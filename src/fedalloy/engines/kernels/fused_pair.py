"""The updates of :mod:`fused_interpolated` by a compiled kernel: one pass over a client's rows takes
the step, makes the next mixture and adds up what the next step's angle needs, where torch takes thirteen passes."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.native import library, tracing
from fedalloy.engines.kinds import InterpolatedSgd

_NAMES = {torch.float32: "pair_float", torch.float64: "pair_double"}
_NUMBERS = ("clients", "columns", "spans", "stride")
_FACTORS = ("momentum", "decay", "pull", "angle", "lr", "scale")
_POINTERS = (
    "begin", "end", "place", "received", "gradient", "shares", "next", "federated", "local", "velocity",
    "local_velocity", "mixed", "dots",
)  # fmt: skip


class _PairJob(ctypes.Structure):
    """``struct pair`` of ``native.c``."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS),
        *((name, ctypes.c_double) for name in _FACTORS),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    )


class PairSteps:
    """The steps of a block. ``rows`` are the tensors of the kernel by name, ``[C, d]`` each and ``received`` ``[d]``;
    ``shares`` are ``[C, S, n]``, and ``spans`` the columns of each of these n."""

    def __init__(
        self, kernel: Any, rows: dict[str, Tensor], interpolated: InterpolatedSgd, shares: Tensor,
        spans: list[tuple[slice, int]], lr: float,
    ) -> None:  # fmt: skip
        self._kernel, self._shares, self._rows = kernel, shares.contiguous(), rows
        self._dots = _dots(rows["federated"], rows["local"])
        edges = ([span.start for span, _ in spans], [span.stop for span, _ in spans], [place for _, place in spans])
        self._edges = [torch.tensor(edge) for edge in edges]
        steps, places = shares.shape[1:]
        job = _PairJob(0, rows["federated"].shape[1], len(spans), steps * places)
        job.momentum, job.decay, job.pull = interpolated.momentum, interpolated.weight_decay, interpolated.pull
        job.angle, job.lr, job.dots = interpolated.angle, lr, self._dots.data_ptr()
        job.begin, job.end, job.place = (edge.data_ptr() for edge in self._edges)
        for name, leaf in rows.items():
            setattr(job, name, leaf.data_ptr())
        self._job, self._given = job, ctypes.byref(job)

    def take(self, step: int, running: int, scale: float) -> None:
        """The step of the first clients, whose gradients must be multiplied by ``scale``; then the next mixture."""
        _, steps, places = self._shares.shape
        size = self._shares.element_size() * places
        first, job = self._shares.data_ptr(), self._job
        job.clients, job.scale, job.shares = running, scale, first + step * size
        job.next = first + (step + 1) * size if step + 1 < steps else None
        self._kernel(self._given)


def pair_steps(
    rows: dict[str, Tensor], interpolated: InterpolatedSgd, shares: Tensor, spans: list[tuple[slice, int]], lr: float
) -> PairSteps | None:
    """The compiled steps; None where there are no kernels for these tensors."""
    compiled, dtype = library(), rows["federated"].dtype
    fit = all(leaf.is_cpu and leaf.dtype == dtype and leaf.is_contiguous() for leaf in rows.values())
    if compiled is None or tracing() or dtype not in _NAMES or not fit or shares.dtype != dtype or not shares.is_cpu:
        return None
    kernel = getattr(compiled, _NAMES[dtype])
    kernel.restype = None
    return PairSteps(kernel, rows, interpolated, shares, spans, lr)


def _dots(f: Tensor, own: Tensor) -> Tensor:
    """``|f|^2``, ``|l|^2`` and ``f . l`` of every client, ``[C, 3]`` in float64."""
    pairs = ((f, f), (own, own), (f, own))
    return torch.stack([(one * other).sum(1, dtype=torch.float64) for one, other in pairs], 1)

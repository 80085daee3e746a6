"""Reads the replies of ClientApps that do not use fedalloy as contributions.

Everything is checked before a byte becomes a tensor: which records there are, the names, shapes and types of the
arrays, their size, and that the statistics an algorithm needs are among the metrics.

Arrays come in numpy's format (``.npy``), whose header is not trusted: it states how many numbers follow, and numpy
allocates the memory before it checks that they are there, so that a few bytes could allocate terabytes. Here nothing is
allocated before the header, the received bytes and the expected size agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import nan, prod

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from torch import Tensor

from fedalloy.core import aspects
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.contributions import Notes
from fedalloy.core.errors import AlgorithmError, DataError, SpecError, nearest
from fedalloy.core.names import Names
from fedalloy.core.statistics import ANY_NUMBER, STATISTICS
from fedalloy.core.types import Contribution, Payload, Tree
from fedalloy.flower.protocol.header import Malformed
from fedalloy.tasks.datasets.archive import read_npy_header

BUFFERS = Names(("*running_mean", "*running_var", "*num_batches_tracked"))
"""BatchNorm's buffers: averaged by examples, not changed by the server's optimizer."""
_SENT = STATISTICS.keys() - {"cross_score", "bytes_up"}
"""Statistics that a client can measure itself."""
_STEPS = ("num_steps", "step_norm", "effective_steps")
MAX_STEPS = 100_000
"""The most local steps that a reply may report: clients run their own programs, so the number cannot be checked."""
Named = Mapping[str, str | Sequence[str]]
_NUMPY = "numpy.ndarray"
"""Flower's name for numpy's format."""
_MOST_HEADER = 4096
"""An upper bound for the header of an array."""
_DTYPES = {np.dtype(code).name: np.dtype(code) for code in "?bhilqBHILQefdg"}
"""Number types by the names that numpy writes. It accepts many other names and warns of outdated ones."""


class Lacking(Malformed):
    """A reply does not hold a statistic that the algorithm requires."""


def check_usable(algorithm: Algorithm) -> None:
    """Refuse algorithms that cannot work with clients that run their own program."""
    solver, name = algorithm.solver, type(algorithm.solver).__name__
    reasons = {
        f"solver '{name}' exchanges {', '.join(sorted(solver.parts))}": set(solver.parts) != {"delta"},
        f"solver '{name}' keeps something at the clients": solver.stateful or bool(aspects.local_leaves(solver)),
        "its wire rules run at the clients": bool(algorithm.wire),
        "it scores the clients' models on each other": "cross_score" in algorithm.weighting.requires,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise AlgorithmError(
            f"this algorithm cannot work with your own ClientApp: {'; '.join(found)}. Allowed are algorithms "
            "whose clients only send a trained model (fedavg, fedadam, aaggff_s, fedadp, krum, ...); "
            "for the others let fedalloy run the clients too ('fedalloy flower --help')"
        )


@dataclass(frozen=True)
class SentModel:
    """The global model as it was sent: trees for the algorithm, with the order and types of the arrays."""

    params: Tree
    buffers: Tree
    order: tuple[str, ...]

    @staticmethod
    def of(arrays: ArrayRecord, buffers: Names = BUFFERS) -> SentModel:
        """The model in a record; arrays that are not floating-point are buffers."""
        leaves = {name: torch.from_numpy(np.array(array.numpy())) for name, array in arrays.items()}
        kept = {name: leaf for name, leaf in leaves.items() if name in buffers or not leaf.is_floating_point()}
        params = {name: leaf for name, leaf in leaves.items() if name not in kept}
        if not params:
            raise SpecError("the initial arrays hold no floating-point parameter; send the model's state dict")
        return SentModel(params, kept, tuple(leaves))

    @property
    def leaves(self) -> Tree:
        """All leaves, in the order in which they were sent."""
        both = {**self.params, **self.buffers}
        return {name: both[name] for name in self.order}

    def record(self) -> ArrayRecord:
        """The record that nodes receive."""
        return ArrayRecord({name: Array(leaf.detach().cpu().numpy()) for name, leaf in self.leaves.items()})


@dataclass(frozen=True)
class ReplyReader:
    """Turns replies into contributions to an algorithm.

    ``metrics`` maps the clients' metrics to statistics (one or several), ``{"train_loss": "loss_before"}``;
    a metric that has a statistic's own name (``num-examples`` for ``num_examples``) needs no entry.
    """

    required: frozenset[str]
    rule: str
    metrics: Named = field(default_factory=dict)
    arrays_key: str = "arrays"
    max_steps: float = MAX_STEPS

    def __post_init__(self) -> None:
        for theirs, ours in self.pairs:
            if ours not in _SENT:
                raise SpecError(f"metrics: '{theirs}' cannot stand for '{ours}'; {nearest(ours, _SENT)}")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Every metric with each of its statistics."""
        several = [(theirs, (ours,) if isinstance(ours, str) else ours) for theirs, ours in self.metrics.items()]
        return [(theirs, one) for theirs, ours in several for one in ours]

    def read(self, content: RecordDict, model: SentModel) -> Contribution:
        """A contribution, or :class:`Malformed`."""
        arrays = _arrays(content, self.arrays_key)
        metrics = metrics_of(content)
        # A client that does not report its steps has taken some, if it has examples.
        stats = {"num_steps": self._known(metrics).get("num_steps", nan), **self.statistics(metrics)}
        check_arrays(arrays, model.leaves)
        stats["bytes_up"] = float(array_bytes(arrays))
        leaves = {name: _tensor(arrays[name], model.leaves[name]) for name in model.order}
        delta = {name: leaves[name] - sent for name, sent in model.params.items()}
        payload: Payload = {"delta": delta}
        if model.buffers:
            payload["buffers"] = {name: leaves[name] for name in model.buffers}
        return Contribution(payload, stats, {}, Notes.alone(payload))

    def statistics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The statistics that the algorithm needs, under their own names; every client counts as one example if the
        number is neither sent nor required."""
        known = self._known(metrics)
        missing = sorted(self.required - known.keys())
        if missing:
            raise Lacking(self._lacking(missing, metrics))
        for name in _STEPS:
            if known.get(name, 0.0) > self.max_steps:
                raise Malformed(
                    f"statistic '{name}' is {known[name]:g}; allowed: at most {self.max_steps:g} (max_steps)"
                )
        return {"num_examples": 1.0} | {name: known[name] for name in {*self.required, "num_examples"} & known.keys()}

    def _known(self, metrics: Mapping[str, float]) -> dict[str, float]:
        known = {name.replace("-", "_"): value for name, value in metrics.items()}
        return known | {ours: metrics[theirs] for theirs, ours in self.pairs if theirs in metrics}

    def _lacking(self, missing: list[str], metrics: Mapping[str, float]) -> str:
        wanted = "; ".join(f"{name} ({STATISTICS.get(name, ANY_NUMBER).meaning})" for name in missing)
        hint = next((name for name in metrics if name.replace("-", "_") != "num_examples"), "your_metric")
        return (
            f"weighting '{self.rule}' requires {wanted}, and the metrics sent are {_listed(metrics)}. Send a metric "
            f"named {missing[0]}, or, if one of them is exactly that, declare it: metrics={{'{hint}': '{missing[0]}'}}"
        )


def metrics_of(content: RecordDict) -> dict[str, float]:
    """The single numbers among the metrics of a reply."""
    records = list(content.metric_records.values())
    if len(records) != 1:
        raise Malformed(f"sent {len(records)} metric records instead of one")
    try:
        return {name: float(value) for name, value in records[0].items() if isinstance(value, int | float)}
    except OverflowError as error:
        raise Malformed("sent a metric that is too large for a number") from error


def check_arrays(arrays: ArrayRecord, expected: Tree) -> None:
    """Refuse arrays that are not the model's: names, shapes, kinds of number and sizes, all from the metadata."""
    if missing := expected.keys() - arrays.keys():
        raise Malformed(f"lacks the arrays {_listed(missing)}")
    if extra := arrays.keys() - expected.keys():
        raise Malformed(f"has the unexpected arrays {_listed(extra)}")
    for name, array in arrays.items():
        _check_array(name, array, expected[name])


def array_bytes(arrays: ArrayRecord) -> int:
    """The bytes of the numbers in a record, in the precision in which they are sent, without headers."""
    return sum(prod(array.shape) * np.dtype(array.dtype).itemsize for array in arrays.values())


def average(metrics: list[tuple[MetricRecord, float]], size: str = "") -> MetricRecord | None:
    """The mean of every number and list of numbers that all records have, each weighted by its examples. As Flower's
    own, without the number of examples (``size``), whose mean says nothing."""
    if not metrics:
        return None
    total = sum(size for _, size in metrics)
    weights = [count / total if total > 0 else 1 / len(metrics) for _, count in metrics]
    records = [
        {name: np.asarray(value, np.float64) for name, value in one.items() if name != size} for one, _ in metrics
    ]
    forms = [{(name, value.shape) for name, value in record.items()} for record in records]
    shared = [name for name, value in records[0].items() if all((name, value.shape) in form for form in forms)]
    means = {name: sum(w * record[name] for w, record in zip(weights, records, strict=True)) for name in shared}
    return MetricRecord({name: np.asarray(value).tolist() for name, value in means.items()})


def _arrays(content: RecordDict, key: str) -> ArrayRecord:
    """The trained model: the record with the given name, or the only one."""
    records = content.array_records
    if key in records:
        return records[key]
    if len(records) != 1:
        raise Malformed(f"sent {len(records)} array records, none of them named '{key}'")
    return next(iter(records.values()))


def _check_array(name: str, array: Array, expected: Tensor) -> None:
    if tuple(array.shape) != tuple(expected.shape):
        raise Malformed(f"{name} has shape {tuple(array.shape)} instead of {tuple(expected.shape)}")
    if not _same_kind(array.dtype, expected):
        raise Malformed(f"{name} holds {array.dtype} instead of {str(expected.dtype).removeprefix('torch.')}")
    most = prod(array.shape) * max(8, expected.element_size()) + _MOST_HEADER
    if len(array.data) > most:
        raise Malformed(f"{name} has {len(array.data)} bytes, its shape needs at most {most}")


def _same_kind(dtype: str, expected: Tensor) -> bool:
    """Floats may have another precision (they are converted to the model's); no other kind may change."""
    theirs, ours = _DTYPES.get(dtype), expected.numpy().dtype
    return theirs is not None and (theirs == ours or (theirs.kind == ours.kind == "f"))


def _tensor(array: Array, expected: Tensor) -> Tensor:
    """The values, after the metadata was checked; the bytes must agree with the metadata."""
    if array.stype != _NUMPY:
        raise Malformed(f"an array is written as {array.stype!s:.40}, which is not understood")
    try:
        values = read_npy(array.data, tuple(expected.shape), expected.numpy().dtype.kind)
    except DataError as error:
        raise Malformed(str(error)) from None
    with np.errstate(over="ignore"):  # values that are too large become infinite, and are then refused
        return torch.from_numpy(values.astype(expected.numpy().dtype))


def _listed(names: Mapping[str, object] | set[str]) -> str:
    return ", ".join(sorted(names)) or "(none)"


def read_npy(data: bytes, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """The array in ``data``, which must have this shape and hold numbers of this kind (``f``, ``i``, ``u``, ``b``).

    >>> import io, numpy
    >>> file = io.BytesIO(); numpy.save(file, numpy.arange(3.0))
    >>> read_npy(file.getvalue(), (3,), "f")
    array([0., 1., 2.])
    """
    declared, by_columns, dtype, start = read_npy_header(data, "an array", _MOST_HEADER)
    if tuple(declared) != shape or dtype.kind != kind:
        raise DataError(f"an array holds {dtype!s:.40} of shape {declared!s:.100}, which does not match its metadata")
    count = prod(shape)
    if len(data) - start != count * dtype.itemsize:
        raise DataError(f"an array needs {count * dtype.itemsize} bytes, and {len(data) - start} arrived")
    values = np.frombuffer(data, dtype, count, start)
    return values.reshape(shape, order="F" if by_columns else "C")

"""Running sums over the rows of a run, in bounded memory; rows of a running run can be added at any time."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedalloy.core.layer_names import layer_of
from fedalloy.results.grid import Grid
from fedalloy.results.statistics import mean, number

Counts = np.ndarray[Any, np.dtype[np.int64]]
MOST_LAYERS = 16
MOST_INFO = 24
WHOLE = ""
"""The name of the only layer of a run whose weights are per client."""
_NO_PHASES = ("round", "memory", "device_memory")
COLUMNS = ("counted", "absent", "late", "refused", "bytes_up", "bytes_down", "seconds")


@dataclass
class RunningSums:
    """Participation and cost over all rounds; ``counts[k]`` is how often client k's contribution was used."""

    counts: Counts = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    absent: int = 0
    late: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    barren: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one round."""
        ids = np.array(row.get("ids", ()), dtype=np.int64)
        self.counts = _longer(self.counts, int(ids.max(initial=-1)) + 1)
        self.counts += np.bincount(ids, minlength=len(self.counts))
        self.late += len(row.get("late", ()))
        self.absent += len(row.get("absent", ()))
        self.dropped.update(row.get("dropped", {}).values())
        self.barren += not row.get("ids")
        self.bytes_up += row.get("bytes_up") or 0
        self.bytes_down += row.get("bytes_down") or 0
        self.seconds += row.get("simulated_seconds") or 0.0

    def contributed(self, population: int) -> Counts:
        """The counts of ``population`` clients, zeros included; longer if a client beyond them contributed."""
        return _longer(self.counts, population)

    def times(self, client: int) -> int:
        """How often a client contributed."""
        return int(self.counts[client]) if client < len(self.counts) else 0

    @property
    def contributions(self) -> int:
        """The number of contributions that were used."""
        return int(self.counts.sum())

    def dump(self) -> bytes:
        """The state as bytes."""
        rest = {name: value for name, value in vars(self).items() if name != "counts"}
        buffer = io.BytesIO()
        np.savez(buffer, counts=self.counts, rest=np.array(json.dumps(rest)))
        return buffer.getvalue()

    def load(self, data: bytes) -> None:
        """Restore a dumped state; empty ``data`` means the initial state."""
        kept = vars(RunningSums())
        if data:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                kept = json.loads(str(arrays["rest"])) | {"counts": arrays["counts"]}
        for name, value in kept.items():
            setattr(self, name, Counter(value) if name == "dropped" else value)


@dataclass
class History:
    """Numbers per round: losses, participation, cost so far, and evaluations."""

    rounds: list[int] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    columns: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    info: dict[str, list[float]] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, Grid] = field(default_factory=dict)
    info_grids: dict[str, Grid] = field(default_factory=dict)
    layers_left_out: set[str] = field(default_factory=set)
    info_left_out: set[str] = field(default_factory=set)
    running_sums: RunningSums = field(default_factory=RunningSums)

    def add(self, row: Mapping[str, Any]) -> None:
        """One row of ``rounds.jsonl``."""
        self.running_sums.add(row)
        self.rounds.append(int(row["round"]))
        self.train_loss.append(number(row.get("train_loss")))
        counts = [len(row.get(name, ())) for name in ("ids", "absent", "late", "dropped")]
        cost = (self.running_sums.bytes_up, self.running_sums.bytes_down, self.running_sums.seconds)
        for name, value in zip(COLUMNS, (*counts, *cost), strict=True):
            self.columns[name].append(float(value))
        self._add_weights(row)
        for name, value in _flat(row.get("info", {})):
            self._add_info(row, name, value)
        if row.get("evaluation"):
            self.evaluations.append(_evaluation(row, self.running_sums))

    def _add_weights(self, row: Mapping[str, Any]) -> None:
        weights, ids = row.get("weights", ()), row.get("ids", ())
        for layer, values in weights_by_layer(weights, len(ids)).items():
            if layer not in self.weights and len(self.weights) == MOST_LAYERS:
                self.layers_left_out.add(layer)
            else:
                self.weights.setdefault(layer, Grid()).add(int(row["round"]), ids, values)

    def _add_info(self, row: Mapping[str, Any], name: str, value: Any) -> None:
        if isinstance(value, list):
            if name not in self.info_grids and len(self.info_grids) == MOST_INFO:
                self.info_left_out.add(name)
                return
            known = row.get("ids", ())
            ids = known if len(value) == len(known) else range(len(value))
            self.info_grids.setdefault(name, Grid()).add(int(row["round"]), ids, value)
        elif isinstance(value, int | float) or value is None:
            line = self.info.setdefault(name, [])
            line += [math.nan] * (len(self.rounds) - 1 - len(line)) + [number(value)]


def _engine(told: object) -> str:
    """An engine as text; ``auto`` tells what it chose.

    >>> _engine("loop"), _engine({"engine": "batched", "threads": 1, "measured_seconds": {"loop": 0.1}})
    ('loop', 'batched (1 thread)')
    """
    if not isinstance(told, Mapping):
        return str(told or "")
    threads = told.get("threads")
    counted = "1 thread" if threads == 1 else f"{threads} threads"
    return f"{told.get('engine', '')} ({counted})" if threads else str(told.get("engine", ""))


@dataclass
class Clock:
    """Time per phase and peak memory, from ``timings.jsonl``.

    >>> clock = Clock()
    >>> clock.add({"round": 1, "engine": {"engine": "batched", "threads": 1, "measured_seconds": {"batched x1": 0.02}}})
    >>> clock.engine
    'batched (1 thread)'
    """

    seconds: Counter[str] = field(default_factory=Counter)
    memory: int = 0
    device_memory: int = 0
    engine: str = ""

    def add(self, row: Mapping[str, Any]) -> None:
        """One row."""
        self.memory = max(self.memory, int(row.get("memory") or 0))
        self.device_memory = max(self.device_memory, int(row.get("device_memory") or 0))
        self.engine = _engine(row.get("engine")) or self.engine
        for name, value in row.items():
            if name not in _NO_PHASES and _is_number(value):
                self.seconds[name] += value


def phases(rows: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Seconds per phase over the rows of ``timings.jsonl``; phases that the engine reports are subtracted from the
    clients' time, and the server's time is called combine.

    >>> dict(phases([{"round": 1, "clients": 0.5, "server": 0.25, "profile": {"train": 0.375}}]))
    {'clients': 0.125, 'combine': 0.25, 'train': 0.375}
    """
    total: Counter[str] = Counter()
    for row in rows:
        inside = row.get("profile", {})
        told = {name: float(value) for name, value in row.items() if name not in _NO_PHASES and _is_number(value)}
        told["clients"] = max(0.0, told["clients"] - sum(inside.values()))
        told["combine"] = told.pop("server")
        for phase, spent in (*told.items(), *inside.items()):
            total[phase] += spent
    return total


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _evaluation(row: Mapping[str, Any], running_sums: RunningSums) -> dict[str, Any]:
    kept = {name: row[name] for name in ("round", "evaluation", "evaluation_global", "global") if name in row}
    if "evaluation_mix" in row:
        kept["evaluation_mix"] = row["evaluation_mix"]
    return kept | {"bytes": running_sums.bytes_up + running_sums.bytes_down, "seconds": running_sums.seconds}


def weights_by_layer(weights: Any, clients: int) -> dict[str, list[float]]:
    """One weight per client for every layer (:func:`fedalloy.core.layer_names.layer_of`); those for the whole model are
    under :data:`WHOLE`. Records of element-wise rules hold the mean over each leaf; a layer has the mean of its leaves.

    >>> weights_by_layer({"fc.weight": [0.5, 1.0], "fc.bias": [0.25, 1.0]}, 2), weights_by_layer([0.5], 1)
    ({'fc': [0.375, 1.0]}, {'': [0.5]})
    """
    leaves = weights if isinstance(weights, Mapping) else {WHOLE: weights}
    found: dict[str, list[list[float]]] = {}
    for leaf, values in leaves.items():
        if isinstance(values, list) and len(values) == clients:
            found.setdefault(layer_of(leaf), []).append(values)
    return {layer: mean_of_columns(some) for layer, some in found.items()}


def mean_of_columns(rows: Sequence[Sequence[float | None]]) -> list[float]:
    """The element-wise mean of several lists of one length."""
    return [number(some[0]) if len(some) == 1 else mean(some) for some in zip(*rows, strict=True)]


def _longer(counts: Counts, length: int) -> Counts:
    return np.pad(counts, (0, max(0, length - len(counts))))


def _flat(info: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in info.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value

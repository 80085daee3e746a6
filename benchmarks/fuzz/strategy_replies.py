"""Replies of ClientApps that are not fedalloy's to its Strategy: records of arrays and of metrics."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fuzz.driving import Way
from benchmarks.fuzz.mutating import Case
from benchmarks.fuzz.states import check_finite, check_length

LIMIT = 25.0
_HOW, _LABELS, _METRICS, _DATA = "how", "labels.json", "metrics.json", "array-"
METHODS = ("fedavg", "median", "qfedavg", "fedadam")
START: dict[str, np.ndarray] = {
    "w": np.array([1.0, 2.0], dtype=np.float32),
    "bn.running_var": np.array([1.0, 1.0], dtype=np.float32),
    "bn.num_batches_tracked": np.array(3, dtype=np.int64),
}


def _npy(value: np.ndarray) -> bytes:
    made = io.BytesIO()
    np.save(made, value)
    return made.getvalue()


@functools.cache
def examples() -> list[Case]:
    """An honest reply, for rules that use it differently."""
    labels = [[name, str(value.dtype), list(value.shape), "numpy.ndarray"] for name, value in START.items()]
    arrays = {f"{_DATA}{place}.npy": _npy(value) for place, value in enumerate(START.values())}
    metrics = json.dumps({"num-examples": 10, "train_loss": 0.5}).encode()
    plain = {_LABELS: json.dumps(labels).encode(), _METRICS: metrics, **arrays}
    return [{**plain, _HOW: method.encode()} for method in METHODS]


def _content(case: Case) -> Any:
    """The records of a case; None if Flower itself refuses them."""
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

    try:
        arrays = {
            name: Array(dtype, tuple(shape), stype, case.get(f"{_DATA}{place}.npy", b""))
            for place, (name, dtype, shape, stype) in enumerate(json.loads(case.get(_LABELS, b"[]")))
        }
        return RecordDict(
            {"arrays": ArrayRecord(arrays), "metrics": MetricRecord(json.loads(case.get(_METRICS, b"{}")))}
        )
    except Exception:
        return None


@functools.cache
def _stage(method: str) -> tuple[Any, Any, Any]:
    """A strategy that has asked three nodes, its state then, and the messages it sent."""
    import logging

    from flwr.app import Array, ArrayRecord, ConfigRecord
    from flwr.supercore.task_identity import TaskIdentity

    from fedalloy.flower.strategy import Strategy
    from tests.flower.grids import Grid

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1  # as inside a run
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    metrics = {"train_loss": "loss_before"} if method == "qfedavg" else None
    strategy = Strategy(method, metrics=metrics, max_norm=LIMIT, poll=0.0)
    grid = Grid(dict.fromkeys((1, 2, 3), lambda message: None), {1: "a", 2: "b", 3: "c"})
    arrays = ArrayRecord({name: Array(value) for name, value in START.items()})
    sent = list(strategy.configure_train(1, arrays, ConfigRecord(), grid))
    for number, message in enumerate(sent):
        message.metadata.__dict__["_message_id"] = f"message-{number}"
    return strategy, (strategy._state, strategy._model), sent


def read(case: Case, folder: Path) -> str:
    """One round with two honest replies beside it."""
    from flwr.app import Message

    content = _content(case)
    if content is None:
        return "no record"
    method = case.get(_HOW, b"").decode("latin-1")
    strategy, (state, model), sent = _stage(method if method in METHODS else METHODS[0])
    strategy._state, strategy._model, strategy._row = state, model, {"round": 1}
    honest = _content(examples()[0])
    replies = [Message(one, reply_to=message) for one, message in zip((content, honest, honest), sent, strict=True)]
    before = dict(model.params)
    strategy.aggregate_train(1, replies)
    check_finite(strategy._state)
    if method in ("fedavg", "median"):
        check_length(before, strategy._state["shared"]["params"], LIMIT)
    return "counted" if 0 in strategy._row.get("ids", ()) else "dropped"


WAY = Way("strategy-replies", examples, read, 10_000)

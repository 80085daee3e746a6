"""Metrics of a server or a node for Prometheus, on loopback only: what ``status`` and the audit log say, as numbers.

They are computed when they are asked for, from files, and nothing is counted twice. There is no access control: whoever
has an account on the machine can read them, and nobody else can reach them. They hold names of sites and runs.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from fedalloy.core.errors import SpecError
from fedalloy.flower.layout import NodePlace
from fedalloy.flower.node.audit import FILE as AUDIT
from fedalloy.flower.pki import expires

ADDRESS = "127.0.0.1"
EXPIRY = "fedalloy_certificate_expiry_timestamp_seconds"
Restarts = Callable[[], Mapping[str, int]]
Rows = Mapping[Any, float]
"""Values by the tuple of their labels."""


@dataclass(frozen=True)
class Measurement:
    """A metric: its name, what it is, the names of its labels, and its values by theirs. Totals only grow."""

    name: str
    text: str
    labels: tuple[str, ...]
    values: Rows
    total: bool = False


@contextmanager
def serving(port: int | None, collect: Callable[[], Iterable[Measurement]]) -> Iterator[None]:
    """Serve metrics on a port of this machine; without one, nothing happens."""
    if port is None:
        yield
        return
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise SpecError("metrics need the extra 'metrics' of fedalloy: pip install 'fedalloy[metrics]'") from None
    registry = CollectorRegistry()
    registry.register(_Collector(collect))
    try:
        server, thread = start_http_server(port, addr=ADDRESS, registry=registry)
    except OSError as error:
        raise SpecError(f"metrics cannot be served on {ADDRESS}:{port} ({error}); choose another port") from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass(eq=False)
class _Collector:
    """Metrics as Prometheus' library wants them."""

    metrics: Callable[[], Iterable[Measurement]]

    def describe(self) -> list[Any]:
        """Nothing is asked before it is needed."""
        return []

    def collect(self) -> Iterator[Any]:
        """All metrics, now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for one in self.metrics():
            family = (CounterMetricFamily if one.total else GaugeMetricFamily)(
                one.name, one.text, labels=list(one.labels)
            )
            for labels, value in one.values.items():
                family.add_metric(list(labels), value)
            yield family


@dataclass
class NodeMetrics:
    """The metrics of a node; its audit log is read on from where the last look ended. Two monitors may ask at once."""

    place: NodePlace
    running: Callable[[], bool]
    restarts: Restarts = dict
    _read: int = 0
    _orders: Counter[tuple[str, ...]] = field(default_factory=Counter)
    _sent: float = 0.0
    _last: float | None = None
    _alone: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self) -> Iterator[Measurement]:
        with self._alone:
            self._look()
            orders, sent, last = dict(self._orders), self._sent, self._last
        yield plain("fedalloy_node_up", "whether the node's program runs", self.running())
        yield from common(self.restarts)
        text = "what was asked of the node and how it answered"
        yield Measurement("fedalloy_node_orders", text, ("asked", "status"), orders, total=True)
        yield Measurement("fedalloy_node_sent_bytes", "bytes of tensors in its answers", (), {(): sent}, total=True)
        if last is not None:
            yield plain("fedalloy_node_last_order_timestamp_seconds", "the last order", last)
        if self.place.secure and self.place.authority.is_file():
            ends = {(self.place.authority.name,): expires(self.place.authority).timestamp()}
            yield Measurement(EXPIRY, "when a certificate expires", ("certificate",), ends)
        free = shutil.disk_usage(self.place.folder).free
        yield plain("fedalloy_disk_free_bytes", "free disk in the node's folder", free)

    def _look(self) -> None:
        file = self.place.config.store / AUDIT
        if not file.exists():
            return
        with file.open("rb") as log:
            log.seek(self._read)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                # An entry that somebody has damaged is for 'audit' to name: the other metrics are told all the same.
                with suppress(ValueError, TypeError, AttributeError, KeyError):
                    self._count(json.loads(line))

    def _count(self, row: Mapping[str, Any]) -> None:
        if "asked" in row:
            self._orders[str(row["asked"]), str(row.get("status", ""))] += 1
            self._sent += sum(row.get("bytes", {}).values())
            self._last = float(row["time"])


def common(restarts: Restarts) -> Iterator[Measurement]:
    """The metrics of every service."""
    builds = {(version("fedalloy"), version("flwr")): 1.0}
    yield Measurement("fedalloy_build_info", "the installed versions", ("fedalloy", "flwr"), builds)
    counts = {(name,): float(count) for name, count in restarts().items()}
    yield Measurement(
        "fedalloy_process_restarts", "processes that died and were started again", ("process",), counts, True
    )


def plain(name: str, text: str, value: float) -> Measurement:
    """A metric without labels."""
    return Measurement(name, text, (), {(): float(value)})

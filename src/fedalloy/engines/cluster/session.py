"""The connection to Ray: a cluster of its own on this machine, or one that is already running."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fedalloy.core.errors import FedalloyError, SpecError

LOCAL = "local"
AUTO = "auto"
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}
_HERE = ("127.", "localhost:")
_OPEN_SECONDS = 10.0
# With this setting Ray's own processes listen on the loopback address only.
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Workers of a Ray of its own run with the priority of this process, as those of other engines do; Ray's default is
# nice 15, with which they get next to nothing of a machine that others use.
_OWN = {"RAY_worker_niceness": "0"}


class ClusterError(FedalloyError):
    """The cluster cannot be reached, or has no workers left."""

    passing = True


def load_ray() -> Any:
    """Ray, which reports nothing about its use; refused where it is not installed."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise SpecError("engine 'ray' needs the package ray: pip install 'fedalloy[ray]'") from error
    return ray


def connect(address: str, cores: int | None) -> bool:
    """Connect this process; returns whether it must also disconnect. A cluster of its own has ``cores`` (None: as
    many as the machine has), listens on the loopback address and ends with this process."""
    place = known_address() if address == AUTO else address
    if (address == LOCAL or (place or "").startswith(_HERE)) and "ray" not in sys.modules:
        os.environ.update(_LOOPBACK)
    if address == LOCAL:
        for name, value in _OWN.items():
            os.environ.setdefault(name, value)
    ray = load_ray()
    if ray.is_initialized():
        _check_same(ray, address)
        return False
    given: dict[str, Any] = {"address": place}
    if address == LOCAL:
        given |= {"num_cpus": cores, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    try:
        if place is None:  # Ray would take any cluster that it sees on this machine, also somebody else's
            raise ValueError("ray start has noted no cluster here, and RAY_ADDRESS is not set")
        if place != LOCAL:
            _check_open(place)
        with _own_handlers(), _own_groups():
            ray.init(log_to_driver=False, logging_level="ERROR", configure_logging=False, **given)
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"engine 'ray': no connection to address = '{address}' ({error}): 'local' starts Ray on this machine, "
            "'auto' takes the cluster that runs here (ray start --head), host:port that of another machine"
        ) from error
    return True


def known_address() -> str | None:
    """The cluster that this machine belongs to, as ``RAY_ADDRESS`` says or ``ray start`` has noted it; None if neither
    does."""
    told = os.environ.get("RAY_ADDRESS", "").strip()
    if told not in ("", AUTO):
        return told
    return next((found for place in _noted_below() if (found := _note_in(place))), None)


def _noted_below() -> list[str]:
    """Where ``ray start`` puts its note: clusters of batch jobs often set TMPDIR, maybe not when Ray was started."""
    if (own := os.environ.get("RAY_TMPDIR")) is not None:
        return [own]
    return [*([os.environ["TMPDIR"]] if "TMPDIR" in os.environ else []), "/tmp"]


def _note_in(place: str) -> str:
    try:
        return (Path(place) / "ray" / "ray_current_cluster").read_text().strip()
    except OSError:
        return ""


def _check_open(address: str) -> None:
    """Refuse an address at which nobody listens: Ray itself would try for minutes."""
    host, found, port = address.rpartition(":")
    if not found or not port.isdigit():
        raise ValueError("an address is host:port")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_OPEN_SECONDS):
        pass


def disconnect() -> None:
    """End the connection, and a cluster of its own with it."""
    ray = load_ray()
    with _own_handlers():
        ray.shutdown()


def _check_same(ray: Any, address: str) -> None:
    """Refuse another cluster than the one this process is connected to."""
    there = ray.get_runtime_context().gcs_address
    if address not in (AUTO, there):
        raise SpecError(
            f"engine 'ray': this process is already connected to Ray at {there}, so address = '{address}' cannot be "
            "used: set address = 'auto', or call ray.shutdown() before"
        )


@contextmanager
def _own_handlers() -> Iterator[None]:
    """Keep the handlers of signals, which Ray replaces: fedalloy ends a run after its round."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with _none_set():
            yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


@contextmanager
def _own_groups() -> Iterator[None]:
    """Let every process of Ray lead a group of its own: a signal to the run's whole group, as ``timeout`` sends it,
    would end Ray, and with it the run in the middle of a round. They end with this process as before; where the system
    does not see to that, Ray does it by the group."""
    from ray._private import services

    real = getattr(services, "ConsolePopen", None)  # not every version has it
    if real is None or not sys.platform.startswith("linux"):
        yield
        return
    services.ConsolePopen = partial(real, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = real


@contextmanager
def _none_set() -> Iterator[None]:
    """Let Ray set no handler of SIGTERM: with its own, a signal that comes while Ray starts would end the program, in
    the middle of the first round and without a reason."""
    from ray._private import utils

    real = getattr(utils, "set_sigterm_handler", None)  # not every version has it
    if real is None:
        yield
        return
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = real

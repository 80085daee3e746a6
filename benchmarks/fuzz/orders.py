"""Orders to nodes: what an untrusted server may send to a node with its own data and policy."""

from __future__ import annotations

import functools
import logging
import tempfile
from pathlib import Path

from benchmarks.fuzz.driving import Way
from benchmarks.fuzz.mutating import Case
from benchmarks.fuzz.tensor_messages import case_of_message, content_of, status_of
from benchmarks.fuzz.watching import HOOK, Fault

_POLICY = """
max_parameters = 100000
max_steps = 200
max_memory_megabytes = 150
max_megabytes = 50
"""


_KNOWN = ("SpecError", "DataError", "AlgorithmError", "CheckpointError", "RegistryError", "RunLocked")


@functools.cache
def _node() -> Path:
    """The folder of a node: its data and its policy."""
    import numpy as np

    from tests.flower.orders import example

    logging.getLogger("fedalloy.flower").setLevel(logging.CRITICAL)
    place = Path(tempfile.mkdtemp(prefix="fuzz-node-", dir="/dev/shm"))
    HOOK.also = (str(place),)
    task = example("train")[0]["task"]
    x, y = np.ones((10, *task["shape"]), dtype=np.float32), np.arange(10) % task["classes"]
    (place / "data").mkdir()
    np.savez(place / "data" / "mine.npz", x=x, y=y)
    (place / "policy.toml").write_text(_POLICY)
    return place


@functools.cache
def examples() -> list[Case]:
    """One order of every kind, as a fedalloy server sends it."""
    from fedalloy.flower.protocol.tensor_messages import TensorMessage, pack
    from tests.flower.orders import KINDS, example

    return [case_of_message(pack(TensorMessage(*example(kind)))) for kind in KINDS]


def read(case: Case, folder: Path) -> str:
    """The node's answer, which must be a result, a refusal, or a failure of a known kind or at a named stage."""
    from fedalloy.flower.config import NodeConfig
    from fedalloy.flower.node.answer import respond

    place = _node()
    config = NodeConfig("0", str(place / "data"), folder / "store", place / "policy.toml")
    status, reason = status_of(respond(content_of(case), config.to_keys()))
    if status == "failed" and " at stage " not in reason and reason.split()[0] not in _KNOWN:
        raise Fault("crash", f"an order failed: {reason}")
    return status


WAY = Way("orders", examples, read, 10_000)

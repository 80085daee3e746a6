"""The process that carries out a node's orders: started by the first of them, gone when there are none."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

import fedalloy
from fedalloy.flower.node.data import LocalTask, local_task, remembering
from fedalloy.flower.prefork import NotCarriedOut, worker
from fedalloy.flower.programs import wait_until
from fedalloy.flower.protocol.header import FORMAT, plain_record, signed
from fedalloy.flower.protocol.orders import check_task
from fedalloy.flower.protocol.tensor_messages import TensorMessage, pack, unpack
from tests.flower import shares

pytestmark = pytest.mark.flower
HELLO = {"format": FORMAT, "fedalloy": fedalloy.__version__, "kind": "hello"}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store whose name is longer than that of any socket may be; its worker ends with the test."""
    monkeypatch.setenv("PYTHONPATH", str(Path(fedalloy.__file__).parents[1]))
    store = tmp_path / ("long" * 40)
    yield store
    for left in workers(store):
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)


def config(store: Path) -> dict[str, str]:
    return {"fedalloy-client": "north", "fedalloy-data": "recipe", "fedalloy-store": str(store)}


def test_the_first_order_starts_it_the_next_finds_it_and_a_dead_one_is_replaced(store):
    message = unpack(worker.ask(store, config(store), pack(TensorMessage(HELLO, {"part": {"w": torch.ones(3)}}))))
    assert "a part 'part', which does not belong to it" in message.header["reason"]
    noted = json.loads((store / "audit.jsonl").read_text())
    assert (noted["asked"], noted["status"]) == ("unreadable", "refused"), "also the first order, if it is refused"
    (first,) = workers(store)
    message = unpack(worker.ask(store, config(store), pack(TensorMessage(HELLO))))
    assert (message.header["status"], message.header["client"]) == ("ok", "north")
    assert workers(store) == [first]
    assert (store / worker.SOCKET).stat().st_mode & 0o077 == 0, "nobody else may speak to it"
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not workers(store), "it ended", 60)
    assert unpack(worker.ask(store, config(store), pack(TensorMessage(HELLO)))).header["status"] == "ok"
    assert len(workers(store)) == 1


def workers(store: Path) -> list[int]:
    """The processes that serve a store, zombies left out."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(store.resolve()).encode() in words and b"fedalloy.flower.prefork.worker" in words:
            found.append(int(entry.name))
    return found


def test_it_leaves_when_nobody_needs_it(store):
    store.mkdir(parents=True)
    code = (
        f"from fedalloy.flower.prefork.worker import serve; from pathlib import Path; serve(Path({str(store)!r}), 0.2)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    assert not (store / worker.SOCKET).exists()


def test_one_that_cannot_start_is_an_answer_and_no_silence(store, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(NotCarriedOut, match=r"did not start; see .*node\.log"):
        worker.ask(store, config(store), pack(TensorMessage(HELLO)))


def test_an_answer_without_the_means_of_making_one_is_a_letter_too():
    assert unpack(plain_record(signed(status="refused", reason="why"))).header == {
        "format": FORMAT,
        "fedalloy": fedalloy.__version__,
        "status": "refused",
        "reason": "why",
    }


def test_data_are_read_again_when_they_have_changed(tmp_path):
    made: list[Any] = []
    told: dict[str, Any] = {"shape": [6], "classes": 3, "model": "logistic", "seed": 1}
    spec = check_task(told)

    def make(source: str, client: int, *rest: Any, **named: Any) -> LocalTask:
        made.append((source, client))
        return local_task(source, client, *rest, **named)

    task = remembering(make)
    shares.write_share(tmp_path, 0)
    first = task(str(tmp_path), 0, spec)
    assert task(str(tmp_path), 0, check_task(told)) is first
    assert task(str(tmp_path), 0, check_task({**told, "seed": 2})) is not first
    assert task(str(tmp_path), 0, spec) is first
    assert len(made) == 2
    os.utime(tmp_path / "0.npz", ns=(1, 1))
    assert task(str(tmp_path), 0, spec) is not first

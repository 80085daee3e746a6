"""A node trains and answers with few copies of the model; the numbers are those of the plain program."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.client import Assignment, run_client
from fedalloy.core.keys import Key
from fedalloy.core.types import Context, Examples
from fedalloy.flower.node import training
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.samples import Samples
from fedalloy.tasks.objective import ModuleObjective

pytestmark = pytest.mark.flower


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


class Mirror(nn.Module):
    """A buffer that is a view of a parameter, as of models that remember their own weights."""

    exchanged_buffers = ("seen",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(3, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x)
        self.seen = self.linear.weight.detach()
        return found


def made(build: Any, settings: dict[str, Any], kernel: Any, epochs: int = 2) -> Any:
    objective = ModuleObjective(build)
    params, buffers = objective.init(Key.of(1))
    shared = {"params": params, "buffers": buffers}
    before = {part: {name: leaf.clone() for name, leaf in leaves.items()} for part, leaves in shared.items()}
    algorithm = Algorithm(Sgd(lr=0.3, batch_size=8, **settings), Samples(), ServerSgd())
    draw = torch.Generator().manual_seed(3)
    examples = Examples(torch.randn(30, 6, generator=draw), torch.randint(0, 3, (30,), generator=draw))
    ctx = Context(1, 5, Key.of(2), local_lr=0.3, rounds=4)
    state = algorithm.init_client(shared, Key.of(4), objective.init)
    key = ctx.key.each(torch.tensor([0]))
    with torch.no_grad():
        found = run_client(algorithm, objective, shared, state, Assignment(examples, epochs), key, ctx, kernel)
    for part, leaves in before.items():
        assert all(torch.equal(leaf, shared[part][name]) for name, leaf in leaves.items()), "what was received is kept"
    return found


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"clip_norm": 0.5}, {"decay": 0.5}])
@pytest.mark.parametrize("build", [dense, normed, Mirror])
@pytest.mark.parametrize("epochs", [0, 1, 3])
def test_the_kernel_of_a_node_gives_the_numbers_of_the_plain_one(build, settings, epochs):
    ours, plain = made(build, settings, training.train, epochs), made(build, settings, None, epochs)
    assert {name: repr(value) for name, value in ours.stats.items()} == {
        name: repr(value) for name, value in plain.stats.items()
    }
    assert ours.payload.keys() == plain.payload.keys()
    for part, leaves in plain.payload.items():
        assert list(leaves) == list(ours.payload[part])
        assert all(torch.equal(leaf, ours.payload[part][name]) for name, leaf in leaves.items()), part


PROBE = """
import sys, torch
from pathlib import Path
from torch import nn
from tests.flower import test_node_memory as here
from fedalloy.flower.node import training

SIDE, LAYERS = 1200, 6
sides = [6, *[SIDE] * (LAYERS + 1), 3]
build = lambda: nn.Sequential(*map(nn.Linear, sides, sides[1:]))
here.made(build, {}, None)

def held(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

before = held("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
here.made(build, {}, training.train if sys.argv[1] == "ours" else None)
print((held("VmHWM") - before) * 1024 / (SIDE * SIDE * LAYERS * 4))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_step_of_a_node_holds_one_model_less():
    """``made`` holds the model as it was built, the received one and a copy of it, beside what the step holds."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576", "OMP_NUM_THREADS": "1"}
    found = {}
    for which in ("ours", "plain"):
        command = [sys.executable, "-c", PROBE, which]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found[which] = float(done.stdout)
    assert found["ours"] < found["plain"] - 0.5, found


def test_an_answer_that_is_sent_on_is_given_up_chunk_by_chunk(monkeypatch):
    pytest.importorskip("flwr", reason="needs the extra 'flower'")
    from flwr.app import Message
    from flwr.supercore.inflatable import inflatable_utils as utils
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.task_identity import TaskIdentity

    from fedalloy.flower.prefork import transfers, worker
    from fedalloy.flower.protocol.header import signed
    from fedalloy.flower.protocol.tensor_messages import TensorMessage, pack, unpack

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(utils, "push_object_contents_from_iterable", transfers.push_in_turn)
    content = pack(TensorMessage(signed(status="ok"), {"delta": {"w": torch.arange(12 << 20, dtype=torch.float32)}}))
    whole = {one: each.deflate() for one, each in get_all_nested_objects(content).items()}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=worker.send_frame, args=(ours, {}, content, 0))
        sender.start()
        _, received = worker.receive_frame(theirs, 1 << 20)
        sender.join()
    message = Message(received, 1, "train")
    known, objects = message.object_id, get_all_nested_objects(message)
    sent: dict[str, bytes] = {}
    left: list[int] = []

    def push(one: str, data: bytes) -> None:
        sent[one] = data
        (chunks,) = [vars(each)["_chunks"] for each in received.array_records["tensors"].values()]
        left.append(sum(len(chunk.data) for _, chunk in chunks))

    transfers._giving(utils.push_objects)(objects, push, max_concurrent_pushes=1)
    assert whole.items() <= sent.items(), "the objects that Flower makes of the whole array"
    assert left[len(left) // 2] < 30 << 20
    assert left[-1] == 0
    read = transfers._joining(utils.inflate_object_from_contents)(known, dict(sent))
    assert torch.equal(unpack(read.content).parts["delta"]["w"], torch.arange(12 << 20, dtype=torch.float32))


def test_a_flower_that_keeps_chunks_elsewhere_gets_the_data(monkeypatch):
    pytest.importorskip("flwr", reason="needs the extra 'flower'")
    from flwr.app import Array
    from flwr.app.message.arraychunk import ArrayChunk

    from fedalloy.flower.prefork import worker

    monkeypatch.setattr(Array, "slice_array", lambda self: [])
    array = Array("uint8", (6,), "fedalloy.raw", b"")
    worker._divide(array, [("one", ArrayChunk(memoryview(b"abc"))), ("two", ArrayChunk(memoryview(b"def")))])
    assert array.data == b"abcdef"

"""Top-k and the scaled sign: what is sent, what waits, what it costs, whatever runs the clients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

from fedalloy import algorithms
from fedalloy.core import registry, tree
from fedalloy.core.client import Assignment, run_client
from fedalloy.core.keys import Key
from fedalloy.core.packing import bytes_up
from fedalloy.core.types import Context, Examples
from fedalloy.methods.wires.scaled_sign import ScaledSign
from fedalloy.methods.wires.topk import TopK
from fedalloy.testing import EngineCase, check_engine, check_rule, small_task
from fedalloy.testing.cases import CHANGING, FAILING
from fedalloy.testing.comparing import differences

WIRES = (TopK(0.3), ScaledSign())


def payload(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict:
    key = Key.of(seed)
    leaves = {"a": key.fold("a").normal(2, 3, dtype=dtype), "b": key.fold("b").normal(4, dtype=dtype)}
    return {"delta": leaves, "buffers": {"mean": torch.ones(2)}}


def fresh(wire, like: dict) -> dict:
    return wire.init_client({"params": like["delta"]}, Key.of(0))


def flat(leaves: dict) -> torch.Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in leaves.values()])


def test_the_largest_entries_of_the_whole_model_are_sent_and_the_rest_waits():
    wire, rows = TopK(0.5), {"delta": {"a": torch.tensor([5.0, 1.0]), "b": torch.tensor([-4.0, 0.5])}}
    sent, kept = wire.encode(rows, fresh(wire, rows), {})
    assert flat(sent["delta"]).tolist() == [5.0, 0.0, -4.0, 0.0]
    assert flat(kept["residual"]).tolist() == [0.0, 1.0, 0.0, 0.5]
    sent, kept = wire.encode({"delta": tree.zeros_like(rows["delta"])}, kept, {})
    assert flat(sent["delta"]).tolist() == [0.0, 1.0, 0.0, 0.5]
    assert not flat(kept["residual"]).any()


def test_the_sign_is_scaled_by_the_mean_size():
    wire, rows = ScaledSign(), {"delta": {"a": torch.tensor([3.0, -1.0]), "b": torch.tensor([0.0, 4.0])}}
    sent, kept = wire.encode(rows, fresh(wire, rows), {})
    assert flat(sent["delta"]).tolist() == [2.0, -2.0, 0.0, 2.0]
    assert flat(kept["residual"]).tolist() == [1.0, 1.0, 0.0, 2.0]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_lost(wire, dtype):
    """Over any number of rounds, what was sent and what still waits add up to what was to be sent."""
    mine, wanted, arrived = fresh(wire, payload(0, dtype)), torch.zeros(10, dtype=dtype), torch.zeros(10, dtype=dtype)
    for seed in range(6):
        one = payload(seed, dtype)
        sent, mine = wire.encode(one, mine, {})
        wanted, arrived = wanted + flat(one["delta"]), arrived + flat(sent["delta"])
        assert sent["buffers"] is one["buffers"]
        assert all(sent["delta"][name].dtype == dtype for name in one["delta"])
    torch.testing.assert_close(arrived + flat(mine["residual"]), wanted)


@given(st.integers(1, 40), st.floats(1e-3, 1.0), st.integers(0, 1000))
def test_top_k_sends_k_entries_that_are_no_smaller_than_the_rest(length, ratio, seed):
    vector = Key.of(seed).normal(length, dtype=torch.float64)
    sent = TopK(ratio).compress(vector)
    kept = sent != 0
    assert int(kept.sum()) == max(math.floor(ratio * length + 1e-9), 1)
    assert torch.equal(sent[kept], vector[kept])
    if not bool(kept.all()):
        assert float(vector[kept].abs().min()) >= float(vector[~kept].abs().max())


@pytest.mark.parametrize("wire", WIRES)
def test_a_block_of_clients_is_its_clients_one_by_one(wire):
    ones = [payload(seed)["delta"] for seed in range(5)]
    kept = [wire.encode({"delta": one}, fresh(wire, {"delta": one}), {})[1] for one in reversed(ones)]
    apart = [wire.encode({"delta": one}, mine, {}) for one, mine in zip(ones, kept, strict=True)]
    mine = {"residual": tree.stack([one["residual"] for one in kept])}
    sent, after = vmap(wire.encode)({"delta": tree.stack(ones)}, mine, {})
    assert list(differences(sent["delta"], tree.stack([one["delta"] for one, _ in apart]), 1e-12)) == []
    assert list(differences(after["residual"], tree.stack([one["residual"] for _, one in apart]), 1e-12)) == []


@pytest.mark.parametrize(
    ("wire", "length", "width", "expected"),
    [
        (TopK(1 / 4), 256, 4, 64 * (4 + 1)),
        (TopK(1 / 4), 257, 4, 64 * (4 + 2)),
        (TopK(1 / 64), 65_536, 4, 1024 * (4 + 2)),
        (TopK(1 / 64), 65_537, 4, 1024 * (4 + 4)),
        (TopK(1e-3), 10, 8, 8 + 1),
        (ScaledSign(), 8, 4, 1 + 4),
        (ScaledSign(), 9, 4, 2 + 4),
        (ScaledSign(), 11_200_000, 4, 1_400_004),
    ],
)
def test_what_a_vector_costs(wire, length, width, expected):
    assert wire.compressed_bytes(length, width) == expected


def test_only_the_compressed_part_gets_cheaper():
    one = {part: tree.stack([leaves]) for part, leaves in payload(0, torch.float32).items()}
    assert bytes_up(one, {"delta": TopK(0.2)}, 1).tolist() == [2 * (4 + 1) + 8]
    assert bytes_up(one, {"delta": ScaledSign()}, 1).tolist() == [2 + 4 + 8]


def test_a_client_reports_the_bytes_it_really_sends():
    task, algorithm = small_task("batchnorm"), algorithms.fedcams("scaled_sign", batch_size=3)
    params, buffers = task.objective.init(Key.of(0))
    shared = algorithm.init(params, 5, buffers)["shared"]
    mine = Assignment(Examples(*vars(task.data("train", torch.tensor([3])).client(0)).values()))
    ctx, keys = Context(1, 5, Key.of(1)), Key.of(1).each(torch.tensor([3]))
    found = run_client(algorithm, task.objective, shared, algorithm.init_client(shared, Key.of(2)), mine, keys, ctx)
    expected = -(-tree.count(params) // 8) + 8 + tree.nbytes(buffers)
    assert found.stats["bytes_up"] == expected
    assert set(found.state["wire"]) == {"0"}
    assert tree.norm(found.state["wire"]["0"]["residual"]) > 0


@pytest.mark.parametrize("wire", WIRES)
def test_every_promise_of_a_wire(wire):
    assert check_rule("wire", wire) == []


@pytest.mark.parametrize("compressor", ["topk", "scaled_sign"])
@pytest.mark.parametrize("model", ["mlp", "batchnorm"])
def test_engines_agree_and_absent_clients_keep_their_memory(compressor, model):
    algorithm = algorithms.fedcams(compressor, ratio=0.2, server_lr=0.1, batch_size=3)
    changing, failing = (
        EngineCase("c", "memories", algorithm, small_task(model), rounds) for rounds in (CHANGING, FAILING)
    )
    # The same body under vmap: a sign has no tolerance for a kernel that rounds differently.
    assert check_engine(registry.find("engine", "batched")(kernel="mapped"), [changing]) == []
    assert check_engine(registry.find("engine", "loop")(), [changing, failing]) == []


def test_ratio_must_be_a_share():
    for ratio in (0.0, -0.1, 1.5):
        with pytest.raises(ValueError, match=r"\(0, 1\]"):
            TopK(ratio)

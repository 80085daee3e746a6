"""Plain SGD on convolutional chains: equal to the loop for all that it takes; the rest goes to other kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional

import fedalloy
from fedalloy.algorithms import fedavg, fedprox
from fedalloy.core.factors import FactoredTree, LowRank
from fedalloy.core.keys import Key
from fedalloy.core.types import Block
from fedalloy.engines import batched
from fedalloy.engines.batched import Batched, stages_for
from fedalloy.engines.kernels import between_products, conv_graphs, conv_kernel, conv_sgd
from fedalloy.engines.kernels.conv_chain import Op
from fedalloy.engines.kernels.conv_graphs import CapturedRound, ConvGraphs, signature
from fedalloy.engines.kernels.conv_kernel import ConvSgd
from fedalloy.engines.kernels.conv_sgd import Batches
from fedalloy.engines.kernels.tracing import Fuser
from fedalloy.engines.kinds import PlainSgd
from fedalloy.engines.loop import Loop
from fedalloy.engines.out_of_core import StorageLimit
from fedalloy.testing import SmallTask
from tests.engines.rounds import gaps, play, shared_of, task_of

CHAINS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "two convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(20, 7), nn.ReLU(), nn.Linear(7, 3),
        ),
        (2, 8, 8),
    ),
    "strides, padding, uneven windows": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, (3, 2), stride=(2, 1), padding=1), nn.Tanh(), nn.AvgPool2d(2),
            nn.Conv2d(4, 3, 2, stride=2, padding=(1, 0), bias=False), nn.MaxPool2d((1, 2)), nn.Sigmoid(), nn.Flatten(),
            nn.Linear(6, 3),
        ),
        (1, 9, 11),
    ),
    "flat examples": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(3), nn.ReLU(), nn.Flatten(),
            nn.Linear(16, 3, bias=False),
        ),
        (36,),
    ),
}  # fmt: skip
METHODS = {
    "plain": fedavg(lr=0.3, batch_size=2, epochs=2),
    "decay": fedavg(lr=0.3, batch_size=2, weight_decay=0.1),
    "momentum": fedavg(lr=0.1, batch_size=4, momentum=0.9, nesterov=True, weight_decay=0.01),
    "prox": fedprox(0.3, lr=0.2, batch_size=2, epochs=2),
}


def task(name: str, sizes: tuple[int, ...] = (5, 3, 6, 1)) -> SmallTask:
    """Images with blank regions, where all places of a window have the same value."""
    factory, shape = CHAINS[name]
    made = task_of(factory, sizes, shape)
    block = made.block
    return replace(made, block=Block(block.x * (block.x > 0.7), block.y, block.start, block.size))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chain", CHAINS)
def test_a_round_is_the_loops(chain, method):
    engine, algorithm, data = Batched(kernel="fused"), METHODS[method], task(chain)
    for round in (1, 2):
        assert gaps(play(engine, algorithm, data, round=round), play(Loop(), algorithm, data, round=round)) == []
    assert engine._conv_graphs is not None


def test_binary_losses_are_taken():
    def factory() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 1))

    data = task_of(factory, shape=(1, 4, 4), classes=2, loss="binary")
    engine, algorithm = Batched(kernel="fused"), METHODS["plain"]
    assert gaps(play(engine, algorithm, data), play(Loop(), algorithm, data)) == []
    assert engine._conv_graphs is not None


def padding_counts(block: Any, everybody: bool) -> Batches:
    counted = torch.ones_like(block.mask)
    return Batches(block.data.x, block.data.y, block.rows, counted, block.seen, (len(block),) * len(block.running))


def nothing_back(grad: torch.Tensor, stage: Any, batch: int, image: Any) -> torch.Tensor:
    return grad.new_zeros(len(grad), batch, *image)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "padding counts": (conv_sgd.Batches, "of", staticmethod(padding_counts)),
    "no gradient through patches": (between_products, "unpatched", nothing_back),
    "bias kept": (conv_kernel, "move_bias", lambda *_: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    owner, name, wrong = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    data, algorithm = task("two convolutions"), METHODS["plain"]
    assert gaps(play(Batched(kernel="fused"), algorithm, data), play(Loop(), algorithm, data)) != []


UNKNOWN = {
    "overlapping pools": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(18, 3)),
    "dilation": lambda: nn.Sequential(nn.Conv2d(1, 2, 3, dilation=2), nn.Flatten(), nn.Linear(8, 3)),
    "no dense layer": lambda: nn.Sequential(nn.Conv2d(1, 3, 6), nn.Flatten()),
    "activation at the end": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3), nn.ReLU()),
    "a norm": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(32, 3)),
    "rounding up": lambda: nn.Sequential(
        nn.Conv2d(1, 2, 4), nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(8, 3)
    ),
}


@pytest.mark.parametrize("model", UNKNOWN)
def test_other_models_are_left_to_other_kernels(model):
    data = task_of(UNKNOWN[model], shape=(1, 6, 6))
    assert stages_for(data.objective, shared_of(METHODS["plain"], data), data.block) is None


def test_the_registered_model_is_a_chain_of_its_layers():
    objective = fedalloy.task("digits", model="energy_cnn", clients=2).objective
    params, _ = objective.init(Key.of(0))
    block = Block(torch.zeros(2, 64), torch.zeros(2).long(), torch.tensor([0]), torch.tensor([2]))
    assert stages_for(objective, {"params": params}, block) is None
    from fedalloy.tasks.models.convolutional import cnn
    from fedalloy.tasks.objective import ModuleObjective

    made = ModuleObjective(lambda: cnn((256,), 10, width=8))
    stages = stages_for(made, {"params": made.init(Key.of(0))[0]}, replace(block, x=torch.zeros(2, 256)))
    assert stages is not None
    assert [stage.weight for stage in stages] == ["conv1.weight", "conv2.weight", "hidden.weight", "output.weight"]


def test_on_a_cpu_ordinary_convolutions_are_used(monkeypatch):
    monkeypatch.setattr(ConvGraphs, "train", lambda *_: pytest.fail("asked"))
    play(Batched(), METHODS["plain"], task("two convolutions"))


def test_low_precision_is_close():
    data, algorithm = task("two convolutions"), METHODS["plain"]
    found = play(Batched(kernel="fused", precision="bf16"), algorithm, data).cohort.payload["delta"]
    right = play(Loop(), algorithm, data).cohort.payload["delta"]
    for name, leaf in right.items():
        assert 0 < float((found[name] - leaf).norm() / leaf.norm()) < 0.05


def dense_heavy() -> SmallTask:
    """A model whose first dense layer is larger than the factors of its updates."""

    def factory() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 60), nn.ReLU(), nn.Linear(60, 3)
        )

    return task_of(factory, (5, 3, 6, 1, 0), (2, 8, 8))


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_updates_of_large_dense_layers_stay_factors(precision):
    algorithm, data = fedavg(lr=0.3, batch_size=2), dense_heavy()
    engine = Batched(kernel="fused", precision=precision)
    tolerance = 1e-9 if precision == "float32" else 0.05
    for round in (1, 2):
        found, right = (
            play(engine, algorithm, data, round=round).cohort,
            play(Loop(), algorithm, data, round=round).cohort,
        )
        leaves = found.payload["delta"]
        assert isinstance(leaves, FactoredTree)
        assert isinstance(leaves.stored["3.weight"], LowRank)
        weights = torch.tensor([0.1, 0.4, 0.3, 0.15, 0.05], dtype=torch.float64)
        sums, expected = found.combine("delta", weights), right.combine("delta", weights)
        assert max(float((sums[name] - leaf).abs().max()) for name, leaf in expected.items()) < tolerance
        assert torch.allclose(found.norms("delta"), right.norms("delta"), rtol=tolerance, atol=tolerance)
        assert not leaves._whole, "norms and sums need no whole update"
        assert max(float((leaves[n] - v).abs().max()) for n, v in right.payload["delta"].items()) < tolerance


def test_factors_give_the_same_bits_where_rows_are_kept_on_disk(tmp_path):
    algorithm, sums = fedavg(lr=0.3, batch_size=2), []
    for limit in (4000.0, 0.0):
        engine = Batched(kernel="fused")
        engine.storage = StorageLimit(limit, tmp_path)
        found = play(engine, algorithm, dense_heavy()).cohort
        sums.append(found.combine("delta", torch.rand(len(found), generator=torch.Generator().manual_seed(0))))
    assert all(torch.equal(leaf, sums[1][name]) for name, leaf in sums[0].items())


@pytest.mark.parametrize("weighting", [{"wire": True}, {"decay": 0.01}])
def test_where_updates_are_read_they_are_whole(weighting):
    from fedalloy.methods.wires.clip import Clip

    algorithm = fedavg(lr=0.3, batch_size=2, weight_decay=weighting.get("decay", 0.0))
    algorithm = replace(algorithm, wire=(Clip(1.0),)) if "wire" in weighting else algorithm
    found = play(Batched(kernel="fused"), algorithm, dense_heavy())
    assert isinstance(found.cohort.payload["delta"], dict)
    assert gaps(found, play(Loop(), algorithm, dense_heavy())) == []


class Nothing:
    """Stands in for a graph."""

    def replay(self) -> None: ...


def test_a_second_replay_does_not_show_the_first_ones_update():
    kept = LowRank(torch.ones(1, 2, 1), torch.ones(1, 1, 2), lambda leaf: leaf)
    rows = torch.zeros(1, 1, 1, dtype=torch.int64)
    batches = Batches(rows, rows, rows, rows == 0, rows[0], (1,))
    result = FactoredTree({"w": kept}), torch.zeros(1, 2), torch.zeros(1, 1)
    captured = CapturedRound(Nothing(), {}, batches, torch.zeros(()), result)  # type: ignore[arg-type]
    first = captured.replay({}, batches, 0.1)[0]
    assert float(first["w"].sum()) == 4.0
    kept.left.mul_(2)
    assert float(captured.replay({}, batches, 0.1)[0]["w"].sum()) == 8.0


def test_what_a_graph_is_kept_by():
    """A schedule needs no new graph, finished clients need none without momentum, and with weight decay both do."""
    rows = torch.zeros(2, 3, 1, dtype=torch.int64)
    some = Batches(rows, rows, rows, rows == 0, rows[..., 0], (3, 2))
    plain = ConvSgd((), "cross_entropy", PlainSgd(), "float32", Fuser(compiled=False))
    assert plain.is_still
    assert signature(plain, {}, some, 0.1) == signature(plain, {}, some, 0.2)
    for sgd in (PlainSgd(weight_decay=0.1), PlainSgd(pull=0.1), PlainSgd(momentum=0.5)):
        moving = replace(plain, sgd=sgd)
        assert not moving.is_still
        assert (signature(moving, {}, some, 0.1) != signature(moving, {}, some, 0.2)) == (sgd.momentum == 0)


def test_examples_at_another_address_get_no_graph_of_their_own(monkeypatch):
    made: list[Any] = []

    def capture(kernel: Any, params: Any, batches: Batches, lr: float) -> Any:
        made.append(batches.x.data_ptr())
        result, graph = conv_graphs.measured(kernel, params, batches, lr), cast(torch.cuda.CUDAGraph, Nothing())
        return CapturedRound(graph, dict(params), batches, torch.zeros(()), result)

    monkeypatch.setattr(conv_graphs, "_capture", capture)
    monkeypatch.setattr(conv_graphs, "_is_on_gpu", lambda batches: True)
    engine, algorithm, data = Batched(kernel="fused"), METHODS["plain"], task("flat examples")
    play(engine, algorithm, data)
    other = replace(data, block=replace(data.block, x=data.block.x + 1.0))
    assert gaps(play(engine, algorithm, other), play(Loop(), algorithm, other)) == []
    assert made == [data.block.x.data_ptr()]


def test_a_failing_compiler_is_no_failing_round(monkeypatch):
    def failing(*_: Any) -> Any:
        raise RuntimeError("compiler: no ptxas\n\nthe cause")

    monkeypatch.setattr("fedalloy.engines.kernels.tracing._compiled", failing)
    engine, algorithm, data = Batched(kernel="fused"), METHODS["plain"], task("flat examples")
    engine._conv_graphs = ConvGraphs(_fusing=Fuser(compiled=True))
    with pytest.warns(RuntimeWarning, match=r"uncompiled.*no ptxas.*the cause"):
        first = play(engine, algorithm, data)
    assert gaps(first, play(Loop(), algorithm, data)) == []
    assert gaps(play(engine, algorithm, data, round=2), play(Loop(), algorithm, data, round=2)) == []


def test_blocks_have_room_for_their_patches(monkeypatch):
    monkeypatch.setattr(batched, "_on_gpu", lambda shared: False)
    engine, algorithm, data = Batched(kernel="fused", memory_mb=0.3), METHODS["plain"], task("two convolutions")
    shared = shared_of(algorithm, data)
    with_patches = engine._most(algorithm, data.objective, shared, {}, data.block)
    mapped = Batched(kernel="mapped", memory_mb=0.3)._most(algorithm, data.objective, shared, {}, data.block)
    assert 1 <= with_patches < mapped


@pytest.mark.parametrize("size", [2, 3])
def test_pooling_takes_torchs_place_of_equal_numbers(size):
    """Against torch's own gradient, on images full of equal numbers and with NaN."""
    image = (Key.of(5).uniform(1, 2, 7, 7, 3, dtype=torch.float64) * 3).floor()
    image[0, 0, 0, 0, 0] = torch.nan
    op = Op("maxpool", (size, size))
    first = image[0].permute(0, 3, 1, 2).clone().requires_grad_()
    expected = functional.max_pool2d(first, size)
    (right,) = torch.autograd.grad(expected.nan_to_num(0.0).sum(), first)
    value, _ = between_products.largest(op, image)
    assert torch.equal(value[0].permute(0, 3, 1, 2).nan_to_num(9.0), expected.detach().nan_to_num(9.0))
    back = between_products.undo_all([op], [image, value], torch.ones_like(value))
    right[0, 0, 0, 0] = 1.0  # torch.nan_to_num has no gradient where it replaces NaN
    assert torch.equal(back[0].permute(0, 3, 1, 2), right)


@pytest.mark.parametrize("size", [2, 3])
def test_relu_before_pooling_is_undone_with_it(size):
    """Against torch's own gradient, on images in which many windows have no positive number and many equal ones."""
    image = (Key.of(6).uniform(1, 2, 7, 7, 3, dtype=torch.float64) * 5).floor() - 3
    ops = [Op("relu"), Op("maxpool", (size, size))]
    first = image[0].permute(0, 3, 1, 2).clone().requires_grad_()
    expected = functional.max_pool2d(first.relu(), size)
    factor = Key.of(7).normal(*expected.shape, dtype=torch.float64)
    (right,) = torch.autograd.grad((expected * factor).sum(), first)
    values = [image, image.relu()]
    values.append(between_products.largest(ops[1], values[1])[0])
    back = between_products.undo_all(ops, values, factor.permute(0, 2, 3, 1).unsqueeze(0))
    assert torch.equal(back[0].permute(0, 3, 1, 2), right)
    assert (right != 0).any()

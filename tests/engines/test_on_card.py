"""What would go wrong in silence on a card: settings that nothing reads, numbers of another model or a later round."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from fedalloy.algorithms import fedavg
from fedalloy.core.types import Block
from fedalloy.engines import batched
from fedalloy.engines.batched import Batched
from fedalloy.engines.kernels import client_conv, conv_graphs, cuda_graphs, fused, fused_graph, tracing, vmap_kernel
from fedalloy.engines.kernels.conv_graphs import CapturedRound, ConvGraphs
from fedalloy.engines.kernels.conv_sgd import Batches
from fedalloy.engines.kernels.cuda_graphs import CudaGraphs
from fedalloy.engines.kernels.tracing import Fuser
from fedalloy.engines.loop import Loop
from fedalloy.engines.shared_cohort import Overwritten
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.testing import SmallTask
from tests.engines.rounds import gaps, play, task_of

PLAIN = fedavg(lr=0.3, batch_size=2)


def precisions(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[bool]:
    """Whether products were in tf32 in every call of a function, on what passes for a card."""
    seen: list[bool] = []
    kept = getattr(owner, name)

    def noting(*given: Any) -> Any:
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return kept(*given)

    monkeypatch.setattr(owner, name, noting)
    monkeypatch.setattr(batched, "_on_gpu", lambda shared: True)
    return seen


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_models_with_batch_norm_have_the_precision_that_was_asked_for(precision, monkeypatch):
    seen = precisions(monkeypatch, vmap_kernel, "train")
    data = task_of(normed, (4, 4, 6))
    assert gaps(play(Batched(precision=precision), PLAIN, data), play(Loop(), PLAIN, data)) == []
    assert seen == [precision == "tf32"]
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_fused_dense_layers_have_the_precision_that_was_asked_for(precision, monkeypatch):
    seen = precisions(monkeypatch, fused, "descend")
    data = task_of(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    play(Batched(kernel="fused", precision=precision), PLAIN, data)
    assert seen == [precision == "tf32"]


def test_a_step_that_cannot_be_captured_is_no_secret(monkeypatch):
    def failing(*_: Any) -> Any:
        raise RuntimeError("this step has no graph\nmore")

    monkeypatch.setattr(batched, "_on_gpu", lambda shared: True)
    monkeypatch.setattr(CudaGraphs, "train", failing)
    engine, data = Batched(), task_of(lambda: nn.Linear(4, 3))
    with pytest.warns(RuntimeWarning, match="without CUDA graphs, which is slower: this step has no graph"):
        first = play(engine, PLAIN, data)
    assert gaps(first, play(Loop(), PLAIN, data)) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert gaps(play(engine, PLAIN, data, round=2), play(Loop(), PLAIN, data, round=2)) == []


def test_a_compiler_that_is_missing_is_no_secret(monkeypatch):
    monkeypatch.setattr(batched, "_on_gpu", lambda shared: True)
    monkeypatch.setattr(batched, "find_spec", lambda name: None)
    monkeypatch.setattr(CudaGraphs, "train", lambda self, training: vmap_kernel.train(training))
    data = task_of(lambda: nn.Linear(4, 3))
    batched._warn_not_compiled.cache_clear()
    with pytest.warns(RuntimeWarning, match="Triton is not installed"):
        play(Batched(compiled=True), PLAIN, data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        play(Batched(), PLAIN, data)


def test_graphs_of_many_shapes_do_not_fill_the_memory(monkeypatch):
    made: list[Any] = []

    def capture(self: Any, algorithm: Any, objective: Any, ctx: Any, values: Any, whole: bool) -> Any:
        made.append(values["x"].shape)
        return values["x"].shape

    monkeypatch.setattr(CudaGraphs, "_capture", capture)
    monkeypatch.setattr(cuda_graphs, "MOST_GRAPHS", 2)
    graphs, given = CudaGraphs(), (PLAIN, task_of(normed).objective, None)
    for size in (1, 2, 1, 3, 1):
        shape = torch.Size([size, 4])
        assert graphs._graph(*given, {"x": torch.zeros(shape)}, True) == shape  # type: ignore[arg-type, comparison-overlap]
    assert [shape[0] for shape in made] == [1, 2, 3], "the graph that was not used for longest is given up"
    assert len(graphs._captured) == 2


def test_every_step_size_of_a_schedule_keeps_no_graph_of_its_own(monkeypatch):
    made: list[Any] = []

    class Kept:
        def __init__(self, *given: Any) -> None:
            self.kernel: fused_graph.Kernel = given[0]
            self.ctx = given[3]

        def replay(self, params: Any, block: Any) -> Any:
            descend: Any = fused.descend
            return descend(*self.kernel, params, block, self.ctx)

    def capture(*given: Any) -> Any:
        made.append(Kept(*given))
        return made[-1]

    monkeypatch.setattr(batched, "_on_gpu", lambda shared: True)
    monkeypatch.setattr(fused_graph, "capturable", lambda params, block: True)
    monkeypatch.setattr(fused_graph, "_capture", capture)
    algorithm, data = fedavg(lr=0.3, batch_size=2, decay=0.9), task_of(lambda: nn.Linear(4, 3))
    engine = Batched(kernel="fused")
    for round in range(1, 12):
        found = play(engine, algorithm, data, round=round)
        assert gaps(found, play(Loop(), algorithm, data, round=round)) == []
    assert len(made) == fused_graph.MOST_GRAPHS


def model_of(activation: type[nn.Module], stride: int, pad: int) -> Any:
    return lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=stride, padding=pad), activation(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


def test_what_was_compiled_for_one_model_is_not_called_for_another(monkeypatch):
    """One engine, two models whose tensors have the same shapes."""
    made: list[Any] = []

    def compiled(function: Any, given: Any) -> Any:
        made.append(function)
        places = [one is not None for one in given]

        def call(*leaves: Tensor) -> Tensor:
            rest = iter(leaves)
            result: Tensor = function(*(next(rest) if there else None for there in places))
            return result

        return call

    monkeypatch.setattr(tracing, "_compiled", compiled)
    engine = Batched(kernel="fused")
    engine._conv_graphs = ConvGraphs(_fusing=Fuser(compiled=True))
    first, *others = [task_of(model_of(*kind), shape=(1, 6, 6)) for kind in ((nn.ReLU, 1, 0), (nn.Tanh, 1, 0))]
    count = []
    for data in (first, *others, first):
        assert gaps(play(engine, PLAIN, data), play(Loop(), PLAIN, data)) == []
        count.append(len(made))
    assert count[0] < count[1] == count[2], "every function of a model is compiled once"


class Nothing:
    """Stands in for a graph."""

    def replay(self) -> None: ...


def test_contributions_of_a_replay_are_not_read_after_the_next(monkeypatch):
    def capture(kernel: Any, params: Any, batches: Batches, lr: float) -> Any:
        result = conv_graphs.measured(kernel, params, batches, lr)
        return CapturedRound(cast(Any, Nothing()), dict(params), batches, torch.zeros(()), result)

    monkeypatch.setattr(conv_graphs, "_capture", capture)
    monkeypatch.setattr(conv_graphs, "_is_on_gpu", lambda batches: True)
    engine, data = Batched(kernel="fused"), task_of(model_of(nn.ReLU, 1, 0), shape=(1, 6, 6), sizes=(4, 4, 4))
    play(engine, PLAIN, data)
    held, weights = play(engine, PLAIN, data).cohort, torch.full((3,), 1 / 3)
    kept, right = held.keep(), held.combine("delta", weights)
    later = held.with_stats({"more": torch.zeros(3)})
    play(engine, PLAIN, data, round=2)
    for asked in (held, later):
        with pytest.raises(Overwritten, match=r"keep\(\) copies them"):
            asked.combine("delta", weights)
    with pytest.raises(Overwritten):
        held.alone("delta", "other")
    assert all(torch.equal(kept.combine("delta", weights)[name], leaf) for name, leaf in right.items())


def between() -> nn.Module:
    """What is between these convolutions is not part of their kernels."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(3), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def test_what_kernels_read_in_tf32_is_rounded(monkeypatch):
    """Matrix units cut off what tf32 does not have, so every operand that kernels do not round themselves is rounded by
    what is before them."""
    unrounded: list[str] = []

    def checked(name: str, kernel: Any, *given: Any, **named: Any) -> Any:
        images = [one for one in given if isinstance(one, Tensor) and one.dim() == 5]
        grads = [given[2]] if name != "convolve" else []
        if any(bool((one.view(torch.int32) & 0x1FFF).any()) for one in (*images, *grads)):
            unrounded.append(name)
        return kernel(*given, **named)

    for name in ("convolve", "into_weight"):
        monkeypatch.setattr(client_conv, name, partial(checked, name, getattr(client_conv, name)))
    monkeypatch.setattr(conv_graphs, "has_kernels", lambda device: True)
    made = task_of(between, shape=(1, 6, 6))
    objective, block = ModuleObjective(between, dtype=torch.float32), made.block
    data = SmallTask(objective, Block(block.x.float(), block.y, block.start, block.size))
    found = play(Batched(kernel="fused", precision="tf32"), PLAIN, data).cohort.payload["delta"]
    right = play(Loop(), PLAIN, data).cohort.payload["delta"]
    assert not unrounded
    for name, leaf in right.items():
        assert float((found[name] - leaf).norm() / leaf.norm()) < 0.01

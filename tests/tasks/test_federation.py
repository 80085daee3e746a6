"""A federation hands out the right examples without copying, in memory or drawn on demand."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import DataPart, Objective, Task
from fedalloy.core.types import Block, Examples, Tree
from fedalloy.tasks.datasets.base import Dataset, from_clients
from fedalloy.tasks.datasets.lazy_synthetic import LogisticClients, lazy_synthetic
from fedalloy.tasks.federation import FederatedTask, GeneratedTask, Pool, federate
from fedalloy.tasks.partitions.dirichlet import Dirichlet
from fedalloy.tasks.partitions.iid import Iid
from fedalloy.tasks.partitions.natural import Natural
from fedalloy.tasks.partitions.sizes import Sizes

KEY = Key.of(0)
PARTS: tuple[DataPart, ...] = ("train", "valid", "test")


@dataclass(frozen=True)
class NoModel(Objective):
    """Stands in for an objective: a task only carries it."""

    def init(self, key: Key) -> tuple[Tree, Tree]:
        raise NotImplementedError

    def loss(
        self, params: Tree, buffers: Tree, x: Tensor, y: Tensor, mask: Tensor | None, draw: Tensor | None
    ) -> tuple[Tensor, Tree]:
        raise NotImplementedError

    def outputs(self, params: Tree, buffers: Tree, x: Tensor) -> Tensor:
        raise NotImplementedError

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def hits(self, outputs: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError


MODEL: Objective = NoModel()


def numbered(size: int = 200, classes: int = 5, **more) -> Dataset:
    """Examples that carry their own row number."""
    rows = torch.arange(size)
    return Dataset(rows.unsqueeze(1).to(torch.float32), rows % classes, classes, **more)


def task_of(**options) -> FederatedTask:
    return federate(numbered(), Dirichlet(0.5), 8, MODEL, key=KEY, **options)


def rows_of(task: FederatedTask | GeneratedTask, part: DataPart) -> list[list[float]]:
    block = task.everyone(part)
    return [block.client(k).x[:, 0].tolist() for k in range(task.population)]


@given(seed=st.integers(0, 300), clients=st.integers(1, 20), valid=st.sampled_from([0.0, 0.2]))
def test_every_example_is_in_one_part_of_one_client_with_its_label(seed, clients, valid):
    task = federate(numbered(), Dirichlet(0.5), clients, MODEL, valid_fraction=valid, key=Key.of(seed))
    seen = [row for part in PARTS for rows in rows_of(task, part) for row in rows]
    assert sorted(seen) == list(range(200))
    for part in PARTS:
        block = task.everyone(part)
        assert torch.equal(block.y, block.x[:, 0].to(torch.int64) % 5)
    sizes = sum(task.everyone(part).size for part in PARTS)
    assert isinstance(sizes, Tensor)
    assert torch.equal(sizes, task.manifest.sizes)
    assert task.population == clients


def test_blocks_share_the_pool():
    task = task_of()
    some = task.data("train", torch.tensor([5, 2]))
    assert some.x.data_ptr() == task.train.x.data_ptr()
    assert some.client(0).x[:, 0].tolist() == rows_of(task, "train")[5]
    assert some.client(1).x[:, 0].tolist() == rows_of(task, "train")[2]
    assert len(task.data("test", torch.tensor([], dtype=torch.int64)).size) == 0


def test_it_is_a_task():
    task: Task = task_of()
    lazy: Task = lazy_synthetic(10, MODEL, key=KEY)
    assert task.population == 8
    assert lazy.population == 10


def test_the_same_key_gives_the_same_federation():
    assert task_of().manifest.digest == task_of().manifest.digest
    assert rows_of(task_of(), "test") == rows_of(task_of(), "test")
    other = federate(numbered(), Dirichlet(0.5), 8, MODEL, key=Key.of(1))
    assert other.manifest.digest != task_of().manifest.digest


def test_the_global_test_set_is_everybodys_or_the_one_that_came():
    task = task_of()
    assert task.global_test is not None
    assert sorted(task.global_test.x[:, 0].tolist()) == sorted(chain.from_iterable(rows_of(task, "test")))
    came = Examples(torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64))
    assert federate(numbered(test=came), Iid(), 4, MODEL, key=KEY).global_test is came
    assert task_of(test_fraction=0.0).global_test is None
    assert task_of(test_fraction=0.0).everyone("test").size.tolist() == [0] * 8


def test_the_natural_test_flag_is_respected():
    held_out = torch.arange(200) % 10 == 3
    task = federate(numbered(held_out=held_out), Iid(), 4, MODEL, key=KEY)
    assert sorted(chain.from_iterable(rows_of(task, "test"))) == list(range(3, 200, 10))


def test_natural_clients_keep_their_names():
    pairs = [([[0.0]] * 4, [0, 1, 0, 1]), ([[1.0]] * 3, [1, 1, 0]), ([[2.0]] * 2, [0, 1])]
    data = from_clients(pairs, ["ann", "bob", "cat"])
    task = federate(data, Natural(), None, MODEL, key=KEY)
    assert task.names == ("ann", "bob", "cat")
    assert task.manifest.sizes.tolist() == [4, 3, 2]
    two = federate(data, Natural(), 2, MODEL, key=KEY)
    assert two.names == tuple(["ann", "bob", "cat"][int(rows[0])] for rows in rows_of(two, "train"))
    assert federate(data, Iid(), 3, MODEL, key=KEY).names is None


def test_the_number_of_clients_comes_from_the_rule_or_must_be_given():
    assert federate(numbered(), Sizes((9, 4)), None, MODEL, key=KEY).population == 2
    with pytest.raises(SpecError, match="give 'clients'"):
        federate(numbered(), Iid(), None, MODEL, key=KEY)


def test_unknown_ids_and_parts_are_refused():
    for task in (task_of(), lazy_synthetic(8, MODEL, key=KEY)):
        for wrong in (-1, 8):
            with pytest.raises(DataError, match=r"0\.\.7"):
                task.data("train", torch.tensor([wrong]))
        with pytest.raises(SpecError, match="did you mean 'train'"):
            task.data("trian", torch.tensor([0]))  # type: ignore[arg-type]


def test_another_precision_leaves_labels_alone():
    task = task_of().to("cpu", torch.float64)
    assert task.train.x.dtype == torch.float64
    assert task.train.y.dtype == torch.int64
    assert task.global_test is not None
    assert task.global_test.x.dtype == torch.float64
    assert rows_of(task, "train") == rows_of(task_of(), "train")


def test_a_pool_may_hold_clients_without_examples():
    pool = Pool.gather(
        torch.arange(4.0),
        torch.arange(4),
        [torch.tensor([3, 1]), torch.tensor([], dtype=torch.int64), torch.tensor([0])],
    )
    assert [pool.everyone().client(k).x.tolist() for k in range(3)] == [[3, 1], [], [0]]


class TestDrawnOnDemand:
    def test_a_client_is_the_same_alone_and_in_company(self):
        task = lazy_synthetic(1000, MODEL, key=KEY, clients=LogisticClients(20, alpha=1.0, beta=1.0))
        many = task.data("train", torch.tensor([3, 700, 999]))
        alone = task.data("train", torch.tensor([700]))
        assert torch.equal(many.client(1).x, alone.client(0).x)
        assert torch.equal(many.client(1).y, alone.client(0).y)
        assert not torch.equal(many.client(0).x, many.client(1).x)

    def test_parts_are_disjoint_pieces_of_one_draw(self):
        task = lazy_synthetic(5, MODEL, key=KEY, clients=LogisticClients(20), valid_fraction=0.1)
        parts = [task.data(part, torch.tensor([4])).client(0) for part in PARTS]
        assert [len(part) for part in parts] == [14, 2, 4]
        assert len(torch.cat([part.x for part in parts]).unique(dim=0)) == 20

    def test_a_billion_clients_cost_nothing(self):
        begin = time.perf_counter()
        task = lazy_synthetic(10**9, MODEL, key=KEY)
        block = task.data("train", torch.tensor([10**9 - 1, 5]))
        assert task.global_test is not None
        assert time.perf_counter() - begin < 2
        assert block.x.shape == (64, 60)

    def test_one_model_explains_clients_until_alpha_parts_them(self):
        def agreement(alpha: float) -> float:
            task = lazy_synthetic(200, MODEL, key=KEY, clients=LogisticClients(20, 5, 3, alpha=alpha))
            data = task.everyone("train")
            x = torch.cat([data.x, torch.ones(len(data.x), 1)], 1)
            wanted = torch.nn.functional.one_hot(data.y, 3).float()
            return float(((x @ torch.linalg.lstsq(x, wanted).solution).argmax(1) == data.y).float().mean())

        assert agreement(0.0) > 0.8 > agreement(5.0)

    def test_beta_moves_the_inputs(self):
        def spread(beta: float) -> float:
            data = lazy_synthetic(200, MODEL, key=KEY, clients=LogisticClients(20, beta=beta)).everyone("train")
            return float(torch.stack([data.client(k).x.mean(0) for k in range(200)]).std(0).mean())

        assert spread(3.0) > 5 * spread(0.0)

    def test_the_global_test_set_is_fixed(self):
        task = lazy_synthetic(10_000, MODEL, key=KEY)
        again = lazy_synthetic(10_000, MODEL, key=KEY)
        assert task.global_test is not None
        assert again.global_test is not None
        assert torch.equal(task.global_test.x, again.global_test.x)
        assert len(task.global_test) == 100 * 6
        assert lazy_synthetic(5, MODEL, key=KEY, test_fraction=0.0).global_test is None

    def test_another_precision(self):
        assert lazy_synthetic(5, MODEL, key=KEY).to("cpu", torch.float64).everyone("train").x.dtype == torch.float64

    def test_any_function_will_do(self):
        def make(ids: Tensor, key: Key) -> Block:
            size = ids + 2
            return Block(torch.zeros(int(size.sum()), 1), torch.zeros(int(size.sum())), size.cumsum(0) - size, size)

        task = GeneratedTask(MODEL, 3, make, KEY)
        assert task.everyone("train").size.tolist() == [1, 2, 3]
        assert task.everyone("test").start.tolist() == [1, 4, 8]

    def test_senseless_arguments_are_refused(self):
        with pytest.raises(SpecError, match="at least 1 client"):
            lazy_synthetic(0, MODEL, key=KEY)
        with pytest.raises(SpecError, match="at least 1"):
            LogisticClients(samples=0)
        with pytest.raises(SpecError, match="together below 1"):
            lazy_synthetic(3, MODEL, key=KEY, test_fraction=1.0)

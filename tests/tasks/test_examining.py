"""Bad data speak up when they come in, whichever way, and only once."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedalloy import compare, fit
from fedalloy.algorithms import fedavg, fedper, lgfedavg, local_only
from fedalloy.core.errors import DataError
from fedalloy.core.keys import Key
from fedalloy.core.types import Block, Examples
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.node.data import local_task
from fedalloy.flower.protocol.orders import check_task
from fedalloy.tasks import examining
from fedalloy.tasks.assembly import make_objective, make_task
from fedalloy.tasks.datasets.base import Dataset, from_clients
from fedalloy.tasks.examining import ExaminedTask, batch_of, examined, notices
from fedalloy.tasks.federation import FederatedTask, GeneratedTask

SIZES = (6, 3, 40)


def good(size: int, classes: int = 3) -> tuple[Any, Any]:
    rows = np.arange(size * 4, dtype=np.float64).reshape(size, 4) / 100
    return rows, np.arange(size) % classes


def clients() -> list[tuple[Any, Any]]:
    return [good(size) for size in SIZES]


def spoilt(value: float) -> list[tuple[Any, Any]]:
    made = clients()
    made[1][0][[0, 2], 1] = value
    return made


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_features_that_are_no_number_are_refused_with_their_client(value):
    with pytest.raises(DataError, match=r"2 of 49 .* NaN or infinity in their features: client 1 \(2 of 3\)"):
        from_clients(spoilt(value))
    with pytest.raises(DataError, match=r"client 1 'b' \(2 of 3\); fill such gaps"):
        from_clients(spoilt(value), names=["a", "b", "c"])


def test_infinities_that_cancel_are_found():
    made = clients()
    made[0][0][:2, 0] = [np.inf, -np.inf]
    with pytest.raises(DataError, match=r"client 0 \(2 of 6\)"):
        from_clients(made)


def test_large_numbers_are_fine():
    assert len(Dataset(torch.full((4, 3), 1e308, dtype=torch.float64), torch.zeros(4, dtype=torch.int64), 1)) == 4


@pytest.mark.parametrize("label", [-1, 3])
def test_labels_out_of_range_are_refused_and_the_error_says_how_to_number_classes(label):
    made = clients()
    made[2][1][5] = label
    with pytest.raises(DataError, match=r"1 of 49 .*0\.\.2 .*client 2 \(1 of 40\).*names\.index"):
        from_clients(made, classes=3)


@pytest.mark.parametrize("labels", [["cat", "dog", "cat"], np.array(["cat", "dog", "cat"], dtype=object)])
def test_labels_that_are_text_are_refused_and_the_error_says_how_to_encode_them(labels):
    with pytest.raises(DataError, match=r"client 1: labels must be numbers, not text .*'cat'.*names\.index"):
        from_clients([good(6), (good(3)[0], labels)])


def test_features_that_are_text_are_refused():
    with pytest.raises(DataError, match=r"client 0: features must be numbers, not text .*'x'"):
        from_clients([([["x"], ["y"]], [0, 1])])


def test_targets_and_the_common_test_set_are_looked_at_too():
    x, y = torch.zeros(4, 2), torch.tensor([0.0, 1.0, torch.nan, 2.0])
    with pytest.raises(DataError, match="NaN or infinity as their target"):
        Dataset(x, y, 0)
    labels = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(DataError, match=r"the test set for all \(1 of 4\)"):
        Dataset(x, labels, 2, test=Examples(x, torch.tensor([0, 1, 2, 1])))


def test_a_folder_is_looked_at(tmp_path):
    for name, (x, y) in zip("abc", spoilt(np.nan), strict=True):
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    with pytest.raises(DataError, match=r"client 1 'b' \(2 of 3\)"):
        make_task({"kind": "folder", "path": str(tmp_path)})
    np.savez(tmp_path / "b.npz", x=good(3)[0], y=np.array(["cat", "dog", "cat"]))
    with pytest.raises(DataError, match=r"b: labels must be numbers.*names\.index"):
        make_task({"kind": "folder", "path": str(tmp_path)})


def changed(task: FederatedTask, **tensors: torch.Tensor) -> FederatedTask:
    return replace(task, train=replace(task.train, **tensors))


def test_tensors_put_into_a_task_in_python_are_looked_at_when_it_runs():
    task = make_task(from_clients(clients()))
    x = task.train.x.clone()
    x[int(task.train.start[2]), 0] = torch.nan
    with pytest.raises(DataError, match=r"client 2 \(1 of 32\)"):
        fit(fedavg(), changed(task, x=x), rounds=1)
    y = task.train.y.clone()
    y[-1] = 7
    with pytest.raises(DataError, match=r"0\.\.2 .*client 2 \(1 of 32\)"):
        fit(fedavg(), changed(task, y=y), rounds=1)


def test_a_model_with_fewer_outputs_than_classes_is_refused_before_round_1():
    task = make_task(from_clients(clients()), model=lambda inputs: torch.nn.Linear(inputs, 2))
    with pytest.raises(DataError, match=r"a label that is not a class number in 0\.\.1 \(found 0\.\.2\)"):
        fit(fedavg(), task, rounds=1)


def test_data_in_memory_are_looked_at_once_for_all_runs(monkeypatch):
    task = make_task(from_clients(clients()))
    calls: list[int] = []
    monkeypatch.setattr(examining, "check_examples", lambda x, *rest: calls.append(len(x)))
    fit(fedavg(), task, rounds=1)
    assert len(calls) == 3
    fit(fedavg(), task, rounds=2)
    assert len(calls) == 3


def lazy(bad: int | None = None) -> GeneratedTask:
    def make(ids: torch.Tensor, key: Key) -> Block:
        x = key.each(ids).normal(4, 2).reshape(-1, 2).to(torch.float32)
        x[ids.repeat_interleave(4) == (-1 if bad is None else bad)] = torch.nan
        size = torch.full_like(ids, 4)
        return Block(x, torch.arange(len(x)) % 3, size.cumsum(0) - size, size)

    return GeneratedTask(make_objective((2,), 3, "logistic"), 10_000, make, Key.of(0), test_fraction=0.25)


def test_a_client_that_is_made_when_asked_for_is_looked_at_then_and_not_again(monkeypatch):
    task = examined(lazy(bad=7))
    assert isinstance(task, ExaminedTask)
    task.data("train", torch.tensor([3, 5000, 9999]))
    with pytest.raises(DataError, match=r"3 of 6 examples .*client 7 \(3 of 3\)"):
        task.data("train", torch.tensor([3, 6, 7]))
    with pytest.raises(DataError, match=r"client 7 \[test\]"):
        task.data("test", torch.tensor([7]))
    calls: list[list[int]] = []
    monkeypatch.setattr(examining, "_check_block", lambda block, ids, *rest: calls.append(ids.tolist()))
    task.data("train", torch.tensor([3, 8, 9999]))
    task.data("train", torch.tensor([3, 8, 9999]))
    assert calls == [[8]]
    assert sum(len(page) for pages in task.seen.values() for page in pages.values()) < 20_000


def test_a_run_over_lazy_data_is_refused_when_the_client_comes():
    assert fit(fedavg(), lazy(), cohort=4, rounds=1, evaluate_clients=5).status == "finished"
    with pytest.raises(DataError, match=r"client 0 \(3 of 3\)"):
        fit(fedavg(), replace(lazy(bad=0), population=4), rounds=1)


def test_a_node_looks_at_its_own_data(tmp_path):
    spec = check_task({"shape": [4], "classes": 3})
    for x, y, fault in ((*spoilt(np.nan)[1], r"features: client .* \(2 of 3\)"), (good(3)[0], [0, 1, 9], r"0\.\.2")):
        np.savez(tmp_path / "mine.npz", x=x, y=y)
        with pytest.raises(DataError, match=fault):
            local_task(str(tmp_path), 0, spec)
    np.savez(tmp_path / "mine.npz", x=np.zeros((0, 4)), y=[])
    assert len(local_task(str(tmp_path), 0, spec).examples("train")) == 0


def test_a_client_without_examples_is_left_out_and_small_ones_are_told_once(tmp_path, caplog):
    made = from_clients([*clients(), ([], [])], names=["a", "b", "c", "empty"])
    assert made.names == ("a", "b", "c")
    task = make_task(made)
    with caplog.at_level(logging.WARNING, logger="fedalloy"):
        done = fit(fedavg(batch_size=16), task, rounds=2, folder=tmp_path / "run")
    assert done.notices == (
        "clients without any example are left out: empty",
        "clients with fewer training examples than a batch of 16: 2 of 3 (0 'a', 1 'b')",
    )
    assert [one.message for one in caplog.records] == list(done.notices)
    assert read_run(tmp_path / "run").environment["notices"] == list(done.notices)
    with caplog.at_level(logging.WARNING, logger="fedalloy"):
        fit(fedavg(batch_size=16), task, rounds=1)
        compared = compare(task, {"a": fedavg(batch_size=64)}, tmp_path / "compared", seeds=[0, 1], rounds=1)
    assert [one.message.partition(":")[0] for one in caplog.records[2:]] == [
        "clients with fewer training examples than a batch of 64"
    ], "what was not said before, and once"
    for run in compared.outcomes:
        assert run.folder is not None
        assert len(read_run(run.folder).environment["notices"]) == 2, "every record has all"


def test_clients_that_a_partition_leaves_empty_take_part_without_a_step():
    task = make_task(from_clients(clients()))
    empty = replace(task.train, size=torch.cat([task.train.size[:2], torch.tensor([0])]))
    done = fit(fedavg(batch_size=None), replace(task, train=empty), rounds=2)
    assert done.status == "finished"
    assert done.notices == ("clients without training examples, which take no steps: 1 of 3 (2)",)


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [(lgfedavg(), "none of them matches names = classifier.*, head.*"),
     (fedper(names=("0.*", "1.*")), "all of them match"),
     (fedper(names=("1.*",)), ""), (local_only(), ""), (fedavg(), "")],
)  # fmt: skip
def test_a_model_of_which_nothing_is_shared_is_told(algorithm, told):
    """Its layers are not named as the method expects: every client would train alone without a word."""
    task = make_task(from_clients(clients()), model=lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)))
    found = [line for line in notices(task, algorithm.solver) if "stay at the clients" in line]
    assert len(found) == bool(told)
    assert told in "".join(found)


def test_the_batch_size_of_a_solver_inside_another():
    assert batch_of(fedper(batch_size=7).solver) == 7


@pytest.mark.parametrize("what", [None, 3, "digits", [None], [(1, 2, 3)], {"a": good(3)}])
def test_clients_that_are_no_pairs_are_refused(what):
    with pytest.raises(DataError, match=r"one pair \(x, y\) per client"):
        from_clients(what)


def test_clients_may_come_from_an_iterator():
    assert len(from_clients(iter(clients()))) == len(from_clients(clients()))


def test_numbers_that_are_no_labels_are_refused_before_a_model_of_that_size_is_made():
    with pytest.raises(DataError, match=r"up to 1000000000, with 2 different ones in 2 examples"):
        from_clients([([[0.0], [1.0]], [0, 10**9])])
    assert from_clients([([[0.0], [1.0]], [0, 10**9])], classes=10**9 + 1).classes == 10**9 + 1


def test_complex_numbers_are_refused():
    with pytest.raises(DataError, match="complex"):
        from_clients([(np.ones((2, 1), dtype="complex64"), [0, 1])])


def test_whole_numbers_of_a_type_for_fractions_are_told():
    made = from_clients([([[0.0], [1.0]], [0.0, 1.0])])
    assert made.classes == 0
    assert "regression" in made.notices[0]
    assert not from_clients([([[0.0], [1.0]], [0.5, 1.0])]).notices

"""Data that are read on demand: a bounded cache, reading ahead, what a resumed run notices and what it cannot."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedalloy
from fedalloy.core.errors import CheckpointError, DataError
from fedalloy.core.types import Examples
from fedalloy.tasks.client_cache import ClientCache
from fedalloy.tasks.lazy import LazyTask
from tests.tasks.sources import doors

MEGABYTE = 1 << 20
FEDAVG = fedalloy.algorithms.fedavg(lr=0.1, batch_size=10)


def client(number: int, features: int = 64) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(number).standard_normal((20, features), dtype=np.float32)
    return x, (x[:, 0] > 0).astype(np.int64)


def resident() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024 / MEGABYTE


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        for number in range(1000):
            yield from zip(*client(number, 256), strict=True)


@pytest.mark.parametrize("source", ["function", "stream"])
def test_a_run_over_many_clients_keeps_a_bounded_number_in_memory(source):
    def run(clients: int) -> Any:
        if source == "function":
            task = fedalloy.task(client, "logistic", clients=clients, classes=2, cache_mb=2)
        else:
            task = fedalloy.task(Stream(), "logistic", ids=np.arange(20_000) // 20, lazy=True, cache_mb=2)
        result = fedalloy.fit(FEDAVG, task, rounds=3, cohort=100, evaluate_clients=300, engine="batched")
        return task, result

    run(1000)
    resting = resident()
    task, result = run(1_000_000)
    assert result.status == "finished"
    assert 0 < task.cache.used <= 2 * MEGABYTE
    assert resident() - resting < 25  # the stream alone has 20 MB, the million clients 5 GB


def test_the_cache_forgets_the_oldest_and_never_grows_beyond_its_size():
    reads: list[int] = []

    def read(number: int) -> Any:
        reads.append(number)
        one = fedalloy.task([client(number)], "logistic", test_fraction=0.0).data("train", torch.tensor([0])).client(0)
        return {"train": one, "valid": one, "test": one}

    each = 3 * (20 * 64 * 4 + 20 * 8)
    cache = ClientCache(read, 2 * each)
    for number in (0, 1, 0, 2, 0, 1):
        cache.get(number)
        assert cache.used <= 2 * each
    assert reads == [0, 1, 2, 1]
    assert pickle.loads(pickle.dumps(ClientCache(len, 8))).used == 0  # type: ignore[arg-type]


def test_the_next_cohort_is_read_while_this_one_is_trained():
    threads: dict[int, str] = {}

    def source(number: int) -> Any:
        threads.setdefault(number, threading.current_thread().name)
        return client(number)

    task = fedalloy.task(source, "logistic", clients=10_000, classes=2)
    result = fedalloy.fit(FEDAVG, task, rounds=4, cohort=20, evaluate_every=4, evaluate_clients=5, engine="loop")
    cohorts = [row["ids"] for row in result.rounds()]
    ahead = [sum(threads[number].startswith("fedalloy-data") for number in cohort) for cohort in cohorts]
    assert ahead[0] == 0
    assert sum(ahead[1:]) > 0


def test_an_error_while_reading_ahead_is_raised_when_the_client_is_needed():
    def source(number: int) -> Any:
        if number > 5:
            raise OSError("the disk is gone")
        return client(number)

    task = fedalloy.task(source, "logistic", clients=100, classes=2)
    with pytest.raises(DataError, match=r"source of client \d+ raised OSError: the disk is gone"):
        fedalloy.fit(FEDAVG, task, rounds=3, cohort=30)


def test_a_forked_process_starts_with_an_empty_cache():
    task = fedalloy.task(client, "logistic", clients=50, classes=2)
    assert isinstance(task, LazyTask)
    task.prefetch(lambda: torch.arange(20))
    task.data("train", torch.arange(3))
    child = os.fork()
    if not child:
        found = task.data("train", torch.arange(3)).size.tolist() == [16, 16, 16] and task.cache.used < MEGABYTE
        os._exit(0 if found else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_process_forks_between_clients_that_are_read_ahead():
    """A lock that the source holds while a process forks would be held in the child for ever."""
    lock, reading, enough = threading.Lock(), threading.Event(), threading.Event()

    def source(number: int) -> Any:
        with lock:
            if threading.current_thread().name.startswith("fedalloy-data"):
                reading.set()
                enough.wait(20)
        return client(number)

    task = fedalloy.task(source, "logistic", clients=50, classes=2)
    task.prefetch(lambda: torch.arange(20))
    assert reading.wait(20)
    threading.Timer(0.3, enough.set).start()
    child = os.fork()
    if not child:
        os._exit(0 if lock.acquire(timeout=5) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_source_may_fork_while_it_reads_ahead():
    codes: list[int] = []

    def read(number: int) -> Any:
        child = os.fork()
        if not child:
            os._exit(0)
        codes.append(os.waitpid(child, 0)[1])
        return {"train": Examples(torch.zeros(1, 2), torch.zeros(1))}

    cache = ClientCache(read, MEGABYTE)
    cache.prefetch(lambda: [0, 1])
    if (reader := cache._reader) is not None:
        reader.join(20)
    assert codes == [0, 0]


def test_workers_train_on_data_that_are_read_on_demand():
    lazy = fedalloy.task(client, "logistic", clients=6, classes=2)
    eager = fedalloy.task(client, "logistic", clients=6, lazy=False)
    models = [
        fedalloy.fit(FEDAVG, task, rounds=2, engine=engine).model
        for task, engine in ((lazy, "workers"), (eager, "loop"))
    ]
    assert all(torch.allclose(models[0][name], models[1][name], atol=1e-6) for name in models[0])


class TestResuming:
    def folder(self, place: Path, clients: int = 9) -> Path:
        place.mkdir(exist_ok=True)
        for number in range(clients):
            x, y = client(number, 4)
            np.savez(place / f"{number}.npz", x=x, y=y)
        return place

    def run(self, data: Path, out: Path, rounds: int, **more: Any) -> Any:
        task = fedalloy.task(data, "logistic", lazy=True, classes=2)
        return fedalloy.fit(FEDAVG, task, rounds=rounds, cohort=3, folder=out, **more)

    def test_changed_data_are_noticed_without_reading_all_of_them(self, tmp_path):
        data = self.folder(tmp_path / "data")
        self.run(data, tmp_path / "run", 2)
        x, y = client(3, 4)
        np.savez(data / "3.npz", x=x + 1, y=y)  # neither a witness nor of another size
        resumed = self.run(data, tmp_path / "run", 3, resume=True)
        assert resumed.status == "finished"
        assert any(
            "does not notice a file of another client whose size did not change" in one for one in resumed.notices
        )
        np.savez(data / "3.npz", x=x[:-1], y=y[:-1])
        with pytest.raises(CheckpointError, match="files"):
            self.run(data, tmp_path / "run", 4, resume=True)

    def test_the_fingerprint_reads_a_few_clients_and_says_so(self):
        reads: list[int] = []

        def source(number: int) -> Any:
            reads.append(number)
            return client(number, 4)

        task = fedalloy.task(source, "logistic", clients=100_000, classes=2)
        reads.clear()
        told = task.fingerprint() or {}
        assert sorted(set(reads)) == [0, 25_000, 50_000, 74_999, 99_999]
        assert len(reads) <= 6, "one more for the form of the data"
        assert told["clients"] == 100_000
        assert any("does not notice a change in the data of any other client" in one for one in task.notices)

    def test_a_witness_is_compared_by_its_contents(self, tmp_path):
        data = self.folder(tmp_path / "data")
        self.run(data, tmp_path / "run", 1)
        x, y = client(0, 4)
        np.savez(data / "0.npz", x=x + 1, y=y)
        with pytest.raises(CheckpointError, match="some clients"):
            self.run(data, tmp_path / "run", 2, resume=True)


def test_standardising_is_that_of_a_task_in_memory():
    values = doors.clients()
    settings: dict[str, Any] = {"standardise": "client", "valid_fraction": 0.1}
    eager = fedalloy.task(values, "logistic", **settings)
    lazy = fedalloy.task(lambda number: values[number], "logistic", clients=3, classes=2, **settings)
    for part in ("train", "valid", "test"):
        one, two = (task.data(part, torch.arange(3)) for task in (eager, lazy))
        assert all(torch.equal(one.client(k).x, two.client(k).x) for k in range(3))


def test_gaps_of_a_lazy_folder_are_filled_as_in_memory(tmp_path):
    pandas = pytest.importorskip("pandas")
    for number, (x, y) in enumerate(doors.clients()):
        frame = pandas.DataFrame(
            {"a": x[:, 0], "b": x[:, 1], "y": y, "sex": ["f", "m"] * (len(y) // 2) + ["f"] * (len(y) % 2)}
        )
        frame.loc[::4, "a"] = None
        frame.loc[::5, "sex"] = None
        frame.to_csv(tmp_path / f"{number}.csv", index=False)
    (tmp_path / "schema.toml").write_text('missing = "mean"\n[categorical]\nsex = ["f", "m"]\n')
    eager = fedalloy.task(tmp_path, "logistic")
    lazy = fedalloy.task(tmp_path, "logistic", lazy=True, classes=2)
    assert eager.encoding == lazy.encoding == {"sex": ("f", "m", "(missing)")}
    for part in ("train", "test"):
        one, two = (task.data(part, torch.arange(3)) for task in (eager, lazy))
        assert all(torch.equal(one.client(k).x, two.client(k).x) for k in range(3))
    (tmp_path / "schema.toml").write_text('missing = "mean"\ncategorical = ["sex"]\n')
    with pytest.raises(DataError, match=r"values of column 'sex' must be declared in schema\.toml"):
        fedalloy.task(tmp_path, "logistic", lazy=True, classes=2)

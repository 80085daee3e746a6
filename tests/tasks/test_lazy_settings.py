"""Settings of tasks whose data are read on demand: those of a task in memory, or an error that says what to do."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch

import fedalloy
from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.core.protocols import DataPart
from tests.tasks.sources import doors

PARTS: tuple[DataPart, ...] = ("train", "valid", "test")


def both(clients: list[Any], **settings: Any) -> tuple[Any, Any]:
    """The same clients on demand and in memory."""
    count = len(clients)
    lazy = fedalloy.task(lambda k: clients[k], "logistic", clients=count, classes=2, **settings)
    return lazy, fedalloy.task(clients, "logistic", **settings)


def many(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(5)
    return [(rng.normal(size=(20, 2)).astype(np.float32) + k, np.arange(20) % 2) for k in range(count)]


def test_newcomers_are_those_of_a_task_in_memory():
    lazy, eager = both(many(9), newcomers=3)
    assert lazy.population == eager.population == 6
    assert lazy.unseen_ids.tolist() == eager.unseen_ids.tolist() == [6, 7, 8]
    for part in PARTS:
        one, two = (task.data(part, torch.arange(9)) for task in (lazy, eager))
        assert all(torch.equal(one.client(k).x, two.client(k).x) for k in range(9))
    assert lazy.global_test is not None
    assert torch.equal(lazy.global_test.x, eager.global_test.x)
    named = {f"c{k}": pair for k, pair in enumerate(many(9))}
    on_demand = fedalloy.task(named, "logistic", lazy=True, classes=2, newcomers=3)
    assert on_demand.names == fedalloy.task(named, "logistic", newcomers=3).names
    with pytest.raises(SpecError, match="newcomers = 9 of 9 clients"):
        both(many(9), newcomers=9)


def test_newcomers_on_demand_never_take_part_and_are_scored_afterwards():
    from fedalloy.experiment.unseen import evaluate_unseen

    lazy, eager = both(many(6), newcomers=2)
    runs = [fedalloy.fit("fedavg", task, rounds=2, engine="loop") for task in (lazy, eager)]
    assert {client for row in runs[0].rounds() for client in row["ids"]} == {0, 1, 2, 3}
    scores = [evaluate_unseen(run.trained, steps=(0, 1)).summary(1) for run in runs]
    assert scores[0] == scores[1]


def test_label_noise_on_demand_changes_as_many_labels_and_no_test_labels():
    clients = [(np.zeros((400, 1), np.float32), np.arange(400) % 4) for _ in range(3)]

    def labels(**noise: Any) -> dict[DataPart, torch.Tensor]:
        task = fedalloy.task(
            lambda k: clients[k], "logistic", clients=3, classes=4, valid_fraction=0.25,
            noise={"kind": "pair", "ratio": 0.3, **noise},
        )  # fmt: skip
        return {part: task.data(part, torch.arange(3)).y for part in PARTS}

    plain = fedalloy.task(lambda k: clients[k], "logistic", clients=3, classes=4, valid_fraction=0.25)
    true = {part: plain.data(part, torch.arange(3)).y for part in PARTS}
    seen = labels()
    assert torch.equal(seen["test"], true["test"])
    for part in ("train", "valid"):
        changed = seen[part] != true[part]
        assert 0.22 < float(changed.float().mean()) < 0.38
        assert torch.equal(seen[part][changed], (true[part][changed] + 1) % 4), "pairs: to the next class"
    assert all(torch.equal(value, seen[part]) for part, value in labels().items()), "the same every time"
    noisy = labels(test="noisy")["test"]
    assert 0.2 < float((noisy != true["test"]).float().mean()) < 0.4
    changed = (seen["train"] != true["train"]).reshape(3, -1)
    assert not torch.equal(changed[0], changed[1]), "every client has draws of its own"


def test_noise_that_needs_all_labels_at_once_is_refused_and_told_where_it_differs():
    with pytest.raises(SpecError, match=r"'public_code' changes all labels .* set lazy=False, or protocol = 'paper'"):
        both(many(3), noise={"kind": "pair", "ratio": 0.1, "protocol": "public_code"})
    lazy, _ = both(many(3), noise={"kind": "pair", "ratio": 0.1})
    assert any("label noise is drawn client by client" in one for one in lazy.notices)
    quantities = [(x, y + 0.5) for x, y in many(3)]
    with pytest.raises(SpecError, match="label noise needs one class number"):
        fedalloy.task(lambda k: quantities[k], "logistic", clients=3, noise={"kind": "pair", "ratio": 0.1})
    with pytest.raises(SpecError, match=r"synthetic needs all examples in memory.*lazy=False"):
        both(many(3), synthetic={"path": "x.npz"})


def test_a_classifier_of_its_own_and_noise_are_part_of_what_is_resumed(tmp_path):
    plain, _ = both(many(3))
    lazy, _ = both(many(3), classifier="mlp")
    assert lazy.classifier is not None
    fedalloy.fit("fedavg", plain, rounds=1, folder=tmp_path)
    for other in ({"classifier": "mlp"}, {"noise": {"kind": "pair", "ratio": 0.0}}, {"newcomers": 1}):
        with pytest.raises(CheckpointError):
            fedalloy.fit("fedavg", both(many(3), **other)[0], rounds=2, folder=tmp_path, resume=True)


def test_a_validation_part_beyond_the_first_clients_is_told_honestly(tmp_path):
    x, y = many(1)[0]
    parts = {"train": (x, y), "test": (x, y)}
    late = {**parts, "valid": (x, y)}
    options: dict[str, Any] = {"clients": 300, "classes": 2, "valid_fraction": 0.2}
    with pytest.raises(SpecError, match=r"training and testing, as the first 100 clients have it: .*leave valid_frac"):
        fedalloy.task(lambda k: late if k == 200 else parts, "logistic", **options)
    rows = [*parts] * 60 + ["valid"]
    for number, name in enumerate(rows):  # files are known without reading, so that all of them are looked at
        place = tmp_path / f"{number // 2:03}"
        place.mkdir(exist_ok=True)
        if name == "valid":
            np.savez(place / "train.npz", x=x, y=y)
        np.savez(place / f"{name}.npz", x=x, y=y)
    task = fedalloy.task(tmp_path, "logistic", lazy=True, classes=2, valid_fraction=0.2)
    assert task.data("valid", torch.tensor([0, task.population - 1])).size.tolist() == [0, 20]


def test_a_client_with_gaps_alone_has_no_examples_where_rows_are_dropped(tmp_path):
    (tmp_path / "a.csv").write_text("p,q,y\n1,2,0\n3,4,1\n5,,1\n")
    (tmp_path / "b.csv").write_text("p,q,y\n1,,0\n,4,1\n")
    (tmp_path / "c.csv").write_text("p,q,y\n7,8,0\n9,1,1\n")
    (tmp_path / "schema.toml").write_text('missing = "drop"\n')
    lazy = fedalloy.task(tmp_path, "logistic", lazy=True, classes=2, test_fraction=0.0)
    eager = fedalloy.task(tmp_path, "logistic", test_fraction=0.0)
    assert lazy.data("train", torch.arange(3)).size.tolist() == [2, 0, 2]
    assert (eager.names, eager.data("train", torch.arange(2)).size.tolist()) == (("a", "c"), [2, 2])
    assert "clients without any example are left out: b" in eager.notices
    assert fedalloy.fit("fedavg", lazy, rounds=1).status == "finished"


def test_the_end_of_the_program_does_not_wait_for_a_function_that_is_read_ahead():
    program = (
        "import time, torch\n"
        "from fedalloy.tasks.client_cache import ClientCache\n"
        "cache = ClientCache(lambda client: time.sleep(60), 1 << 20)\n"
        "cache.prefetch(lambda: [1])\n"
        "time.sleep(0.2)\n"
        "raise KeyboardInterrupt\n"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert "KeyboardInterrupt" in done.stderr
    assert time.monotonic() - begin < 30


def test_a_newer_request_replaces_one_that_has_not_begun():
    import threading

    from fedalloy.tasks.client_cache import ClientCache

    read: list[int] = []
    gate, done = threading.Event(), threading.Event()

    def one(client: int) -> Any:
        gate.wait(10)
        read.append(client)
        if client == 3:
            done.set()
        return {"train": doors_example()}

    cache = ClientCache(one, 1 << 20)
    for client in (1, 2, 3):
        cache.prefetch(lambda client=client: [client])  # type: ignore[misc]
        time.sleep(0.05)
    gate.set()
    assert done.wait(10)
    assert read == [1, 3]


def doors_example() -> Any:
    return fedalloy.task(doors.clients(), "logistic").data("train", torch.tensor([0])).client(0)

"""What nodes say in numbers: ranges, sizes that are pinned, steps that the server counts itself."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedalloy import algorithms
from fedalloy.core.errors import AlgorithmError
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.protocol.tensor_messages import TensorMessage, outline, pack, unpack
from fedalloy.flower.strategy import Strategy
from tests.flower.fake import federation, play, recipe_file
from tests.flower.grids import Grid

pytestmark = pytest.mark.flower
TWO_ARE_ENOUGH = {"minimum": 2, "deadline": 20.0}


def saying(*, in_round: int | None = None, **numbers: Any):
    """A node that tells other statistics than its own."""

    def tamper(content: RecordDict) -> RecordDict:
        if not outline(content).parts:
            return content
        tensor_message = unpack(content)
        tamper.round += 1  # type: ignore[attr-defined]
        if in_round not in (None, tamper.round):  # type: ignore[attr-defined]
            return content
        return pack(
            TensorMessage(
                {**tensor_message.header, "stats": {**tensor_message.header["stats"], **numbers}}, tensor_message.parts
            )
        )

    tamper.round = 0  # type: ignore[attr-defined]
    return tamper


def rows_with(place, tamper, algorithm: str = "fedavg", rounds: int = 1, **tables) -> list[dict[str, Any]]:
    run = {"rounds": rounds, **tables.pop("run", {})}
    recipe = recipe_file(place, algorithm, engine=TWO_ARE_ENOUGH, run=run, evaluate={"every": rounds}, **tables)
    grid = federation(place)
    grid.nodes[101].tamper = tamper
    play(recipe, place / "run", grid)
    return list(read_run(place / "run").rounds())


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (-1e9, "is -1000000000; allowed: whole numbers 0 to 10000000"),
        (1e15, "is 1e+15; allowed: whole numbers 0 to 10000000 (max_examples)"),
        (12.5, "is 12.5; allowed: whole numbers"),
        (None, "is not finite"),
    ],
)
def test_a_node_with_an_impossible_size_is_dropped_and_named(number, reason, tmp_path):
    (row,) = rows_with(tmp_path, saying(num_examples=number))
    assert reason in row["dropped"]["1"]
    assert row["ids"] == [0, 2]
    assert sum(row["weights"]) == pytest.approx(1)


def test_a_node_that_changes_its_size_is_dropped_also_after_a_resume(tmp_path):
    first, second = rows_with(tmp_path, saying(in_round=2, num_examples=5), rounds=2)
    assert (first["dropped"], list(second["dropped"])) == ({}, ["1"])
    assert "in its first round of this run" in second["dropped"]["1"]


def test_fednova_takes_no_lengths_from_nodes(tmp_path):
    lies: dict[str, Any] = {"step_norm": 1e-9, "effective_steps": 1e9, "num_steps": 0}
    (honest,) = rows_with(tmp_path / "honest", lambda content: content, "fednova")
    (lying,) = rows_with(tmp_path / "lying", saying(**lies), "fednova")
    for column in ("ids", "weights", "num_steps", "idle"):
        assert lying[column] == honest[column]


def test_nobody_sets_everybodys_variance_by_a_size_of_its_own(tmp_path):
    """Under a median one node claims many examples and a variance of minus five: it is refused, and had no say."""

    def hostile(content: RecordDict) -> RecordDict:
        if not outline(content).parts:
            return content
        tensor_message = unpack(content)
        for name, leaf in tensor_message.parts["buffers"].items():
            tensor_message.parts["buffers"][name] = torch.full_like(leaf, -5 if name.endswith("running_var") else 0)
        stats = {**tensor_message.header["stats"], "num_examples": 9_999_999}
        return pack(TensorMessage({**tensor_message.header, "stats": stats}, tensor_message.parts))

    model = "tests.flower.test_numbers:normed"
    policy = tmp_path / "policy.toml"
    policy.write_text(f'models = ["{model}"]\n')
    recipe = recipe_file(tmp_path, "median", engine=TWO_ARE_ENOUGH, run={"rounds": 1}, task={"model": model})
    grid = federation(tmp_path, **{"fedalloy-policy": str(policy)})
    grid.nodes[101].tamper = hostile
    ending = play(recipe, tmp_path / "run", grid)
    (row,) = read_run(tmp_path / "run").rounds()
    assert "running_var is negative" in row["dropped"]["1"]
    assert bool((ending.state["shared"]["buffers"]["1.running_var"] > 0).all())


def normed() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10))


def test_scores_that_no_accuracy_can_be_are_not_taken(tmp_path):
    def boasting(content: RecordDict) -> RecordDict:
        tensor_message = outline(content)
        if "cross_score" not in tensor_message.header:
            return content
        return pack(TensorMessage({**tensor_message.header, "cross_score": [1e9, 0.5, 0.5]}))

    (row,) = rows_with(tmp_path, boasting, "fedboosting")
    assert "its 'cross_score' is 1000000000; allowed: 0 to 1" in row["unscored"]["1"]
    assert max(row["info"]["cross_score"]) <= 2


# ---------------------------------------------------------------------------------------------- strategies


@pytest.fixture(autouse=True)
def _inside_a_run(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def arrays() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(2, np.float32)), "bn.running_var": Array(np.ones(1, np.float32))})


def app(client: int, variance: float = 2.0, evaluate: Any = 10, **metrics: Any):
    """A ClientApp that moves w by one; metrics may be functions of the round."""

    def answer(message):
        round = int(message.content["config"]["server-round"])
        if message.metadata.message_type == "evaluate":
            return RecordDict({"metrics": MetricRecord({"acc": 0.1 * client, "num-examples": evaluate})})
        told = {"num-examples": 10, **{name.replace("_", "-"): value for name, value in metrics.items()}}
        told = {name: value(round) if callable(value) else value for name, value in told.items()}
        trained = {"w": np.full(2, client + 1, np.float32), "bn.running_var": np.full(1, variance, np.float32)}
        record = ArrayRecord({name: Array(value) for name, value in trained.items()})
        return RecordDict({"arrays": record, "metrics": MetricRecord(told)})

    return answer


def strategy_rows(algorithm="fedavg", rounds: int = 1, folder=None, **settings: Any):
    apps = {900: app(0), 17: app(1), 345: app(2), **settings.pop("apps", {})}
    names = {900: "a", 17: "b", 345: "c"} | {number: str(number) for number in apps if number not in (900, 17, 345)}
    strategy = Strategy(algorithm, poll=0.0, folder=folder, **settings)
    result = strategy.start(Grid(apps, names), arrays(), num_rounds=rounds)
    return strategy.history, result


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"num_examples": -10}, "is -10; allowed"),
        ({"num_examples": 10**15}, "(max_examples)"),
        ({"num_examples": math.nan}, "is not finite"),
        ({"num_examples": 2.5}, "is 2.5; allowed: whole numbers"),
        ({"num_steps": -1}, "statistic 'num_steps' is -1"),
        ({"num_steps": 10**6}, "at most 100000 (max_steps)"),
        ({"variance": -5.0}, "bn.running_var is negative"),
    ],
)
def test_a_reply_with_an_impossible_number_is_left_out(told, reason):
    (row,), result = strategy_rows(apps={17: app(1, **told)})
    assert reason in row["dropped"]["1"]
    assert row["ids"] == [0, 2]
    assert float(result.arrays["bn.running_var"].numpy()[0]) == 2.0


@pytest.mark.parametrize(("told", "reason"), [({"step_norm": 1e-9}, "allowed: 0, and 1 to"),
                                              ({"effective_steps": 1e9}, "(max_steps)")])  # fmt: skip
def test_lengths_that_no_client_can_have_are_left_out(told, reason):
    defaults = {"step_norm": 3.0, "effective_steps": 3.0}
    apps = {number: app(client, **defaults) for client, number in ((0, 900), (2, 345))}
    (row,), _ = strategy_rows(algorithms.fednova(), apps={**apps, 17: app(1, **{**defaults, **told})})
    assert reason in row["dropped"]["1"]
    assert max(row["weights"]) <= 1


def test_sizes_are_pinned_for_the_run_and_survive_a_resume(tmp_path):
    def growing(round):
        return 10 if round < 3 else 9_000_000

    apps = {17: app(1, num_examples=growing)}
    rows, _ = strategy_rows(rounds=2, folder=tmp_path / "run", apps=apps)
    assert [row["dropped"] for row in rows] == [{}, {}]
    (third,), _ = strategy_rows(rounds=3, folder=tmp_path / "run", apps=apps)
    assert "is 9e+06, but was 10 in its first round" in third["dropped"]["1"]
    assert json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[2])["ids"] == [0, 2]


def test_a_measure_of_ones_own_need_not_be_whole():
    apps = {number: app(client, mine=0.5 + client) for client, number in enumerate((900, 17, 345))}
    (row,), _ = strategy_rows(weighted_by_key="mine", apps=apps)
    assert row["dropped"] == {}
    assert [float(weight) for weight in row["weights"]] == pytest.approx([0.5 / 4.5, 1.5 / 4.5, 2.5 / 4.5])


def test_an_idle_client_is_named_and_does_not_win():
    apps = {17: app(1, num_examples=0), 5: app(3, num_steps=0), 6: app(4)}
    (row,), _ = strategy_rows("krum", apps=apps)
    assert (row["idle"], row["ids"]) == ([0, 3], [1, 2, 4])  # by name: 5, 6, a, b, c


def test_a_rule_for_more_clients_than_came_leaves_the_model_and_says_why():
    apps = {5: app(3), 6: app(4, variance=-1.0)}
    (row,), result = strategy_rows(algorithms.krum(byzantine=1), apps=apps)
    assert "needs at least 5 contributions that count, got 4" in row["refusal"]
    assert result.arrays["w"].numpy().tolist() == [0.0, 0.0]
    with pytest.raises(AlgorithmError, match="needs at least 5 clients"):
        strategy_rows(algorithms.krum(byzantine=1))


@pytest.mark.parametrize("size", [10**15, -3, math.nan])
def test_scores_with_an_impossible_size_do_not_count(size):
    (row,), result = strategy_rows(apps={345: app(2, evaluate=size)})
    assert result.evaluate_metrics_clientapp[1]["acc"] == pytest.approx(0.05)
    assert row["evaluation"]["acc"]["mean"] == pytest.approx(0.05)

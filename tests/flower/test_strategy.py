"""The strategy for apps of one's own, on a grid without a network: weights, screening, absence, resuming."""

from __future__ import annotations

import json
import logging
import math
import re

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedalloy import algorithms
from fedalloy.core.algorithm import server_step
from fedalloy.core.errors import AlgorithmError, CheckpointError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context, Contribution
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.foreign import ReplyReader, SentModel
from fedalloy.flower.strategy import Strategy
from tests.flower.grids import Grid

START: dict[str, np.ndarray] = {
    "w": np.array([1.0, 2.0], dtype=np.float32),
    "bn.num_batches_tracked": np.array(3, dtype=np.int64),
}
METRICS = {0: {"train_loss": 1.0, "acc": 0.9}, 1: {"train_loss": 3.0, "acc": 0.5}, 2: {"train_loss": 2.0, "acc": 0.7}}


@pytest.fixture(autouse=True)
def _inside_a_run(monkeypatch):
    """Messages can be made inside a run only; and Flower's logger keeps its messages to itself."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)


def arrays() -> ArrayRecord:
    return ArrayRecord({name: Array(value) for name, value in START.items()})


def node(client: int, *, change=None, metrics=None, evaluate: float = 0.5):
    """A ClientApp that moves w by client + 1 and has 10 (client + 1) examples."""

    def answer(message):
        received = message.content["arrays"]
        sizes = {"num-examples": 10 * (client + 1)}
        if message.metadata.message_type == "evaluate":
            return RecordDict({"metrics": MetricRecord({"eval_acc": evaluate + client / 10, **sizes})})
        trained = {name: array.numpy() for name, array in received.items()}
        trained["w"] = trained["w"] + np.float32(client + 1)
        trained["bn.num_batches_tracked"] = np.asarray(trained["bn.num_batches_tracked"] + 1)
        trained = change(trained) if change else trained
        told = {**METRICS[client], **sizes} if metrics is None else metrics
        record = ArrayRecord({name: Array(value) for name, value in trained.items()})
        return RecordDict({"arrays": record, "metrics": MetricRecord(told)})

    return answer


def grid(**changed) -> Grid:
    """Three nodes whose ids are not in the order of their names."""
    nodes = {900: node(0), 17: node(1), 345: node(2)}
    names = {900: "a", 17: "b", 345: "c"}
    return Grid({**nodes, **{int(key[1:]): value for key, value in changed.items()}}, names)


def expected(algorithm, stats, ids=(0, 1, 2), population=3) -> torch.Tensor:
    """What the server half makes of the same contributions."""
    params, buffers = {"w": torch.tensor(START["w"])}, {"bn.num_batches_tracked": torch.tensor(3)}
    contributions = []
    for i in ids:
        payload = {"delta": {"w": torch.full((2,), i + 1.0)}, "buffers": {"bn.num_batches_tracked": torch.tensor(4)}}
        contributions.append(Contribution(payload, {**stats[i], "num_examples": 10.0 * (i + 1)}, {}))
    cohort = Cohort.gather(list(ids), contributions)
    ctx = Context(1, population, Key.of(0).fold("round", 1), local_lr=algorithm.solver.lr_at(1))
    step = server_step(algorithm, algorithm.init(params, population, buffers), cohort, ctx)
    return step.state["shared"]["params"]["w"]


@pytest.mark.parametrize(
    ("algorithm", "metrics", "stats"),
    [
        (algorithms.fedavg(), None, [{}, {}, {}]),
        (algorithms.aaggff_s(), {"train_loss": "loss_before"}, [{"loss_before": v} for v in (1.0, 3.0, 2.0)]),
        (algorithms.qfedavg(lr=0.5), {"train_loss": "loss_before"}, [{"loss_before": v} for v in (1.0, 3.0, 2.0)]),
        (algorithms.fedfa(), {"acc": "accuracy_after"}, [{"accuracy_after": v} for v in (0.9, 0.5, 0.7)]),
        (
            algorithms.fednova(),
            {"train_loss": ("step_norm", "effective_steps")},
            [{"step_norm": v, "effective_steps": v} for v in (1.0, 3.0, 2.0)],
        ),
        (algorithms.fedadp(), None, [{}, {}, {}]),
        (algorithms.fedadam(server_lr=0.1), None, [{}, {}, {}]),
    ],
)
def test_a_round_is_the_server_step_on_what_the_clients_sent(algorithm, metrics, stats):
    strategy = Strategy(algorithm, metrics=metrics, poll=0.0)
    result = strategy.start(grid(), arrays(), num_rounds=1)
    np.testing.assert_allclose(result.arrays["w"].numpy(), expected(algorithm, stats).numpy(), rtol=1e-6)
    count = result.arrays["bn.num_batches_tracked"].numpy()
    assert (count.dtype, int(count)) == (np.dtype("int64"), 4), "an integer buffer keeps its type"
    assert list(result.arrays) == list(START), "the order of the arrays is the model's"
    assert strategy.history[0]["ids"] == [0, 1, 2], "clients are counted by name"


def test_results_are_reported_as_flower_does():
    strategy = Strategy("fedavg", poll=0.0)
    result = strategy.start(grid(), arrays(), num_rounds=2, evaluate_fn=lambda round, _: MetricRecord({"round": round}))
    assert [record["round"] for record in result.evaluate_metrics_serverapp.values()] == [0, 1, 2]
    assert result.train_metrics_clientapp[1]["train_loss"] == pytest.approx((10 * 1 + 20 * 3 + 30 * 2) / 60)
    assert result.evaluate_metrics_clientapp[2]["eval_acc"] == pytest.approx((10 * 0.5 + 20 * 0.6 + 30 * 0.7) / 60)
    assert strategy.history[1]["evaluation"]["eval_acc"]["worst"] == pytest.approx(0.5)


def test_aggregated_metrics_are_those_of_flowers_own_strategy():
    """Lists too; the mean of the sizes is none of them."""
    lists = [{"curve": [1.0 * client, 2.0], "other": [0.0] * (1 + client)} for client in range(3)]
    sent = [{**METRICS[client], **lists[client], "num-examples": 10 * (client + 1)} for client in range(3)]
    whole = grid(n900=node(0, metrics=sent[0]), n17=node(1, metrics=sent[1]), n345=node(2, metrics=sent[2]))
    ours = Strategy("fedavg", poll=0.0).start(whole, arrays(), num_rounds=1)
    assert ours.train_metrics_clientapp[1]["curve"] == pytest.approx([(20 * 1 + 30 * 2) / 60, 2.0])
    assert {*ours.train_metrics_clientapp[1]} == {*METRICS[0], "curve"}
    assert {*ours.evaluate_metrics_clientapp[1]} == {"eval_acc"}


def test_the_bytes_of_the_arrays_in_the_messages_are_recorded(tmp_path):
    """Two floats and an integer: 16 bytes in each direction, whatever the headers of arrays take; one client sends its
    model in doubles, and one sends something else, which does not count."""
    wide = node(1, change=lambda trained: {**trained, "w": trained["w"].astype(np.float64)})
    federation = grid(n17=wide)
    strategy = Strategy("fedavg", poll=0.0, folder=tmp_path / "run")
    strategy.start(federation, arrays(), num_rounds=2)
    assert [(row["bytes_down"], row["bytes_up"]) for row in strategy.history] == [(3 * 16, 2 * 16 + 24)] * 2
    assert [(row["bytes_down"], row["bytes_up"]) for row in read_run(tmp_path / "run").rounds()] == [(48, 56)] * 2
    other = Strategy("fedavg", poll=0.0)
    other.start(grid(n345=node(2, change=shaped)), arrays(), num_rounds=1)
    assert (other.history[0]["bytes_down"], other.history[0]["bytes_up"]) == (3 * 16, 2 * 16)


def shaped(trained):
    return {**trained, "w": np.zeros(3, dtype=np.float32)}


def lying(message):
    """Labels say the right shape, the bytes hold something else."""
    content = node(1)(message)
    if "arrays" not in content:
        return content
    good = content["arrays"]["w"]
    content["arrays"]["w"] = Array(good.dtype, good.shape, good.stype, Array(np.zeros(4, dtype=np.float32)).data)
    return content


def huge(message):
    content = node(1)(message)
    if "arrays" not in content:
        return content
    good = content["arrays"]["w"]
    content["arrays"]["w"] = Array(good.dtype, good.shape, good.stype, good.data + bytes(100_000))
    return content


def headed(header: str, data: bytes = bytes(8), version: int = 1):
    """The right labels on an array whose own header says something else."""
    text = header.encode()
    whole = b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 * min(version, 2), "little") + text + data
    return written(whole)


def written(data: bytes, stype: str = "numpy.ndarray"):
    def answer(message):
        content = node(1)(message)
        if "arrays" in content:
            content["arrays"]["w"] = Array("float32", (2,), stype, data)
        return content

    return answer


TERABYTES = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}"
RIGHT = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (headed(TERABYTES), "does not match its metadata"),
        (headed(TERABYTES, version=2), "does not match its metadata"),
        (headed(RIGHT, bytes(4)), "needs 8 bytes, and 4 arrived"),
        (headed(RIGHT, bytes(16)), "needs 8 bytes, and 16 arrived"),
        (headed(RIGHT, version=9), "unknown version|cannot be read"),
        (headed(RIGHT.replace("<f4", "|O")), "does not match its metadata"),
        (headed(RIGHT.replace("(2,)", "(-2,)")), "does not match its metadata|cannot be read"),
        (headed(RIGHT.replace("(2,)", "((" * 300)), "cannot be read"),
        (headed("[" * 4000), "cannot be read"),
        (written(b"\x93NUMPY\x02\x00\xff\xff\xff\xff"), "cannot be read"),
        (written(b"PK\x03\x04" + bytes(12)), "cannot be read"),
        (written(b""), "cannot be read"),
        (written(bytes(8), "fedalloy.raw"), "written as fedalloy.raw"),
        (node(1, change=lambda t: {**t, "w": t["w"] * np.float32(math.nan)}), "not finite"),
        (node(1, change=shaped), r"w has shape \(3,\) instead of \(2,\)"),
        (node(1, change=lambda t: {**t, "w": t["w"].astype(np.int64)}), "w holds int64 instead of float32"),
        (node(1, change=lambda t: {"w": t["w"]}), "lacks the arrays bn.num_batches_tracked"),
        (node(1, change=lambda t: {**t, "evil": t["w"]}), "unexpected arrays evil"),
        (node(1, metrics={"train_loss": 1.0}), "requires num_examples"),
        (node(1, metrics={"num-examples": math.nan}), "'num_examples' is not finite"),
        (lying, "does not match its metadata"),
        (huge, "100136 bytes, its shape needs at most"),
        (lambda message: RecordDict({}), "0 array records"),
    ],
)
def test_a_bad_contribution_is_left_out_and_its_node_named(bad, reason, caplog):
    strategy = Strategy("fedavg", poll=0.0)
    with caplog.at_level("WARNING", logger="flwr"):
        result = strategy.start(grid(n17=bad), arrays(), num_rounds=1)
    np.testing.assert_allclose(result.arrays["w"].numpy(), START["w"] + (10 * 1 + 30 * 3) / 40)
    assert strategy.history[0]["ids"] == [0, 2]
    assert re.search(reason, strategy.history[0]["dropped"]["1"]), strategy.history[0]["dropped"]
    assert any("client 1 (node 17, 'b')" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<f2", "longdouble"])
def test_arrays_of_other_precision_and_order_are_read_right(order, dtype):
    values = np.asarray(np.arange(6.0).reshape(2, 3), dtype=dtype, order=order)
    model = SentModel.of(ArrayRecord({"w": Array(np.zeros((2, 3), dtype=np.float32))}))
    sent = Array(str(values.dtype.newbyteorder("=")), (2, 3), "numpy.ndarray", Array(values).data)
    content = RecordDict({"arrays": ArrayRecord({"w": sent}), "metrics": MetricRecord({"num-examples": 1})})
    found = ReplyReader(frozenset({"num_examples"}), "x").read(content, model)
    assert torch.equal(found.payload["delta"]["w"], torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize(
    ("bad", "reason"),
    [(lambda message: None, "no reply"), (lambda message: Error(2, "it broke"), "its app raised an error (it broke)")],
)
def test_silence_and_errors_are_attributed_to_the_node_that_was_asked(bad, reason):
    strategy = Strategy("aaggff_s", metrics={"train_loss": "loss_before"}, poll=0.0)
    strategy.start(grid(n345=bad), arrays(), num_rounds=1, timeout=0.0)
    row = strategy.history[0]
    assert row["ids"] == [0, 1]
    assert row["absent"] == [2]
    assert reason in row["failures"]["2"]
    assert row["info"]["imputed"].tolist() == [2]


def test_a_reply_that_cannot_be_read_keeps_no_other_from_being_read():
    class Choking(Grid):
        def pull_messages(self, message_ids):
            if any(self.waiting[one].metadata.dst_node_id == 17 for one in message_ids if one in self.waiting):
                if len(list(message_ids)) == 1:
                    self.waiting.pop(next(iter(message_ids)))
                raise ValueError("garbage")
            return super().pull_messages(message_ids)

    whole, strategy = grid(), Strategy("fedavg", fraction_evaluate=0.0, poll=0.0)
    strategy.start(Choking(whole.nodes, whole.names), arrays(), num_rounds=1)
    assert strategy.history[0]["ids"] == [0, 2]
    assert "cannot be read: garbage" in strategy.history[0]["failures"]["1"]


def test_messages_that_are_too_large_together_go_one_by_one():
    class Narrow(Grid):
        def push_messages(self, messages):
            return super().push_messages(messages) if len(list(messages)) == 1 else []

    whole, strategy = grid(), Strategy("fedavg", fraction_evaluate=0.0, poll=0.0)
    strategy.start(Narrow(whole.nodes, whole.names), arrays(), num_rounds=1)
    assert strategy.history[0]["ids"] == [0, 1, 2]


def test_a_client_that_left_keeps_its_place_for_when_it_comes_back():
    whole, strategy = grid(), Strategy("aaggff_s", metrics={"train_loss": "loss_before"}, poll=0.0)
    model = arrays()
    for round in (1, 2, 3):
        there = Grid({n: h for n, h in whole.nodes.items() if round != 2 or n != 900}, whole.names)
        sent = list(strategy.configure_train(round, model, ConfigRecord(), there))
        there.push_messages(sent)
        moved, _ = strategy.aggregate_train(round, there.pull_messages([m.metadata.message_id for m in sent]))
        assert moved is not None
        model = moved
        assert strategy._row["ids"] == ([1, 2] if round == 2 else [0, 1, 2])
        assert strategy._row["absent"] == ([0] if round == 2 else [])


def test_a_statistic_that_nobody_sends_ends_the_run_and_says_what_to_do():
    with pytest.raises(AlgorithmError) as error:
        Strategy("aaggff_s", poll=0.0).start(grid(), arrays(), num_rounds=1)
    for part in ("requires loss_before", "before it trains", "acc, num-examples, train_loss", "metrics={", "node 900"):
        assert part in str(error.value)


def test_what_needs_fedalloys_own_clients_is_refused_when_built():
    for name in ("scaffold", "superfed_mm", "fedcams", "fedboosting"):
        with pytest.raises(AlgorithmError, match="cannot work with your own ClientApp"):
            Strategy(name)
    with pytest.raises(SpecError, match="cannot stand for 'loss_befor'"):
        Strategy("fedavg", metrics={"train_loss": "loss_befor"})
    with pytest.raises(AlgorithmError, match="needs every client"):
        Strategy("aaggff_s", fraction_train=0.4, min_train_nodes=1, poll=0.0).start(grid(), arrays())


def test_waiting_for_nodes_ends():
    with pytest.raises(AlgorithmError, match="only 3 of 4 nodes"):
        Strategy("fedavg", min_available_nodes=4, wait=0.0, poll=0.0).start(grid(), arrays())


def test_sampled_rounds_are_drawn_by_key_and_not_by_node_id():
    def asked(renamed: dict[int, int]) -> list[list[int]]:
        whole = grid()
        nodes = {renamed[n]: handler for n, handler in whole.nodes.items()}
        used = Grid(nodes, {renamed[n]: name for n, name in whole.names.items()})
        strategy = Strategy("fedavg", fraction_train=0.5, min_train_nodes=1, poll=0.0)
        strategy.start(used, arrays(), num_rounds=6)
        return [row["ids"] for row in strategy.history]

    first = asked({900: 900, 17: 17, 345: 345})
    assert first == asked({900: 4, 17: 5, 345: 3})
    assert len({tuple(ids) for ids in first}) > 1


def test_a_run_goes_on_from_its_folder_as_if_it_had_not_stopped(tmp_path):
    def strategy(folder):
        return Strategy(
            algorithms.aaggff_s(), metrics={"train_loss": "loss_before"}, poll=0.0, folder=tmp_path / folder
        )

    whole = strategy("whole").start(grid(), arrays(), num_rounds=4)
    strategy("cut").start(grid(), arrays(), num_rounds=2)
    resumed = strategy("cut")
    rest = resumed.start(grid(), arrays(), num_rounds=4)
    assert rest.arrays["w"].numpy().tolist() == whole.arrays["w"].numpy().tolist()
    assert rest.train_metrics_clientapp == whole.train_metrics_clientapp
    for stream in ("rounds.jsonl", "clients.jsonl"):
        assert (tmp_path / "cut" / stream).read_bytes() == (tmp_path / "whole" / stream).read_bytes()
    assert read_run(tmp_path / "cut").status == {"state": "finished", "round": 4, "reason": ""}
    assert [row["round"] for row in resumed.history] == [3, 4]
    rows = [json.loads(line) for line in (tmp_path / "whole" / "clients.jsonl").read_text().splitlines()]
    assert rows[0]["eval_acc"] == pytest.approx([0.5, 0.6, 0.7])
    with pytest.raises(CheckpointError, match="another strategy"):
        Strategy("fedavg", poll=0.0, folder=tmp_path / "cut").start(grid(), arrays(), num_rounds=4)


def test_metrics_may_keep_the_statistics_own_names():
    reader = ReplyReader(frozenset({"loss_before", "num_examples"}), "Rule")
    assert reader.statistics({"num-examples": 4, "loss-before": 2.0}) == {"num_examples": 4, "loss_before": 2.0}

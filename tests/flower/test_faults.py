"""Nodes that die, lie, lag or refuse: the round goes on without them, and the record says who and why."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

import fedalloy
from fedalloy.core.errors import SpecError
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.engine import FederationError, Flower
from fedalloy.flower.node_registry import Seat, identity_of
from fedalloy.flower.prefork.worker import receive_frame, send_frame
from fedalloy.flower.protocol.header import FORMAT
from fedalloy.flower.protocol.tensor_messages import TensorMessage, outline, pack, unpack
from tests.flower.fake import FakeClock, FakeNode, federation, play, recipe_file
from tests.flower.test_federation import assert_equal, simulated

pytestmark = pytest.mark.flower
NAMES = ("north", "south", "west")
TWO_ARE_ENOUGH = {"minimum": 2, "deadline": 20.0}


def only_training(change):
    """Tamper with contributions and leave everything else alone."""

    def tamper(content: RecordDict) -> RecordDict | Error:
        return change(content) if outline(content).parts else content

    return tamper


def changed(**leaves):
    """Other tensors in place of a contribution's own."""

    def change(content: RecordDict) -> RecordDict:
        message = unpack(content)
        return pack(TensorMessage(message.header, {"delta": {**message.parts["delta"], **leaves}}))

    return only_training(change)


def with_header(**entries):
    def change(content: RecordDict) -> RecordDict:
        message = unpack(content)
        return pack(TensorMessage({**message.header, **entries}, message.parts))

    return only_training(change)


def with_data(*arguments: Any):
    """An array in the place of the bytes that all tensors are."""

    def change(content: RecordDict) -> RecordDict:
        del content.config_records["fedalloy"]["tensors"]
        content["tensors"] = ArrayRecord({"all": Array(*arguments)})
        return content

    return only_training(change)


def with_bytes(data: Any):
    def change(content: RecordDict) -> RecordDict:
        content.config_records["fedalloy"]["tensors"] = data
        return content

    return only_training(change)


def with_listing(**entry: Any):
    """Say something else about the first tensor."""

    def change(content: RecordDict) -> RecordDict:
        header = json.loads(str(content.config_records["fedalloy"]["header"]))
        first = dict(zip(("name", "dtype", "shape"), header["parts"]["delta"][0], strict=True)) | entry
        header["parts"]["delta"][0] = list(first.values())
        content.config_records["fedalloy"]["header"] = json.dumps(header)
        return content

    return only_training(change)


def hidden_part(content: RecordDict) -> RecordDict:
    content["more"] = ArrayRecord({"w": Array("float32", (1,), "fedalloy.raw", bytes(4))})
    return content


FAULTS = {
    "nan": (changed(**{"output.bias": torch.full((10,), torch.nan)}), "not finite"),
    "shape": (changed(**{"output.bias": torch.zeros(11)}), "has shape (11,) instead of (10,)"),
    "dtype": (changed(**{"output.bias": torch.zeros(10, dtype=torch.float64)}), "has dtype torch.float64"),
    "name": (changed(extra=torch.zeros(1)), "has unexpected extra"),
    "size": (with_data("uint8", (12_000_000,), "fedalloy.raw", bytes(12_000_000)), "12.0 MB, the limit is 10 MB"),
    "bytes": (with_bytes(bytes(11_000_000)), "11.0 MB, the limit is 10 MB"),
    "no bytes": (with_bytes("text"), "its tensors are not bytes"),
    "few bytes": (with_bytes(bytes(8)), "have 8 bytes, their shapes and dtypes need"),
    "too little": (with_data("uint8", (40,), "fedalloy.raw", bytes(40)), "have 40 bytes, their shapes and dtypes need"),
    "claimed size": (with_listing(shape=[10**9]), "bytes, their shapes and dtypes need 40000"),
    "endless": (with_listing(shape=[0, 10**30]), "has no valid shape"),
    "negative": (with_listing(shape=[-1]), "has no valid shape"),
    "type": (with_listing(dtype="object"), "is written as object, which is not understood"),
    "twice": (with_listing(name="output.bias"), "two tensors of the same name"),
    "no name": (with_listing(name=None), "is not a list of tensors"),
    "format": (with_data(torch.zeros(10).numpy()), "written as numpy.ndarray, which is not understood"),
    "part": (only_training(hidden_part), "arrays that its header does not name: more"),
    "stats": (with_header(stats={"num_examples": "many"}), "'num_examples' is not a number"),
    "huge": (with_header(stats={"num_examples": 10**400}), "'num_examples' is not a number"),
    "no stats": (with_header(stats={}), "did not send the statistics num_examples"),
    "status": (with_header(status="perhaps", reason="who knows"), "failed: who knows"),
    "garbage": (only_training(lambda content: RecordDict({"x": ConfigRecord({"y": 1})})), "no fedalloy header"),
    "header": (only_training(lambda c: RecordDict({"fedalloy": ConfigRecord({"header": "["})})), "not JSON"),
    "raised": (only_training(lambda content: Error(2, "boom")), "its app raised an error (boom)"),
    "crashed": (only_training(lambda content: Error(8)), "its app crashed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_contribution_is_dropped_and_named(fault, tmp_path):
    tamper, reason = FAULTS[fault]
    engine = {**TWO_ARE_ENOUGH, "max_megabytes": 10.0}
    recipe = recipe_file(tmp_path, engine=engine, run={"rounds": 1}, evaluate={"metrics": ["loss"]})
    grid = federation(tmp_path)
    grid.nodes[101].tamper = tamper
    ending = play(recipe, tmp_path / "run", grid)
    row = next(read_run(tmp_path / "run").rounds())
    assert reason in row["dropped"]["1"]
    assert row["ids"] == [0, 2]
    assert 1 in row["absent"] or fault == "nan"
    two = recipe_file(tmp_path / "two", sampling={"kind": "list", "cohorts": [[0, 2]]}, run={"rounds": 1})
    assert_equal(ending.state["shared"]["params"], simulated(two)[0].state["shared"]["params"])


def test_a_silent_node_is_cut_at_the_deadline(tmp_path):
    grid, clock = federation(tmp_path), FakeClock()
    grid.nodes[102].answers = False
    recipe = recipe_file(tmp_path, engine=TWO_ARE_ENOUGH, run={"rounds": 1})
    (tmp_path / "run").mkdir()
    bound = {str(n): identity(grid.nodes[100 + n]) for n in range(3)}
    (tmp_path / "run" / "bindings.json").write_text(json.dumps(bound))
    play(recipe, tmp_path / "run", grid, clock)
    row = next(read_run(tmp_path / "run").rounds())
    assert row["dropped"] == {"2": "no answer within 20 s"}
    assert row["unscored"] == {"2": "no answer within 20 s"}
    assert 40 <= clock.now < 45


def identity(node: FakeNode) -> str:
    return f"key {hashlib.sha256(node.key.encode()).hexdigest()[:32]}"


class TestWaiting:
    def test_the_run_waits_visibly_for_its_minimum(self, tmp_path):
        grid, said = federation(tmp_path), list[str]()
        grid.nodes[102].online = False
        clock = FakeClock(on_sleep=lambda now: setattr(grid.nodes[102], "online", now > 30))
        ending = play(recipe_file(tmp_path), tmp_path / "run", grid, clock, said.append)
        assert ending.status == "finished"
        assert any("waiting: 2 of the 3 contributions a round needs (2: no node has connected" in text for text in said)
        assert sum("waiting" in text for text in said) == 1
        assert "waiting" in (tmp_path / "run" / "federation.log").read_text()
        assert [row["ids"] for row in read_run(tmp_path / "run").rounds()] == [[0, 1, 2]] * 3

    def test_but_not_for_ever_and_the_same_command_goes_on(self, tmp_path):
        grid, clock, recipe = federation(tmp_path), FakeClock(), recipe_file(tmp_path)
        grid.nodes[102].online = False
        with pytest.raises(FederationError, match=r"2 of the 3 contributions .* the same\s+command again"):
            play(recipe, tmp_path / "run", grid, clock)
        assert 300 <= clock.now < 320
        grid.nodes[102].online = True
        assert play(recipe, tmp_path / "run", grid).status == "finished"

    def test_those_who_answered_are_not_asked_again(self, tmp_path):
        grid = federation(tmp_path)
        grid.nodes[102].online = False
        clock = FakeClock(on_sleep=lambda now: setattr(grid.nodes[102], "online", now > 30))
        play(recipe_file(tmp_path, run={"rounds": 1}), tmp_path / "run", grid, clock)
        assert grid.nodes[100].seen.count("train") == 1

    def test_a_round_goes_on_without_the_slow_when_a_fraction_is_enough(self, tmp_path):
        """The one that is left out takes part again with the state that counts."""
        grid, clock = federation(tmp_path), FakeClock()
        grid.nodes[102].answers = False
        recipe = recipe_file(tmp_path, "scaffold", engine={"minimum": 1, "fraction": 0.6, "deadline": 1000.0})

        def returns(text: str) -> None:
            grid.nodes[102].answers |= "round 2/3" in text
            grid.nodes[101].answers &= "round 2/3" not in text

        seats = [Seat(str(number), identity(node)) for number, node in enumerate(grid.nodes.values())]
        play(recipe, tmp_path / "run", grid, clock, returns, seats=lambda: seats)
        rows = list(read_run(tmp_path / "run").rounds())
        assert [row["ids"] for row in rows] == [[0, 1], [0, 1], [0, 2]]
        assert rows[0]["dropped"] == {"2": "it was not waited for: 2 answers were enough"}
        assert clock.now < 100, "neither a round nor the scoring after it waits for the slow"
        assert rows[2]["unscored"] == {"1": "it was not waited for: 2 answers were enough"}
        with pytest.raises(SpecError, match="fraction must be above 0"):
            Flower(fraction=0.0)

    def test_a_refusal_is_none_of_the_contributions_that_are_enough(self, tmp_path, monkeypatch):
        """A node that refuses does so at once, before others have trained."""
        grid, clock, begun = federation(tmp_path), FakeClock(), dict[str, float]()
        (tmp_path / "policy.toml").write_text("max_parameters = 1\n")
        grid.nodes[100].config["fedalloy-policy"] = str(tmp_path / "policy.toml")
        at_once = grid._reply

        def reply(message: Message) -> Message | None:
            begin = begun.setdefault(message.metadata.message_id, clock.now)
            trains = message.metadata.dst_node_id != 100 and message.metadata.message_type == "train"
            return None if trains and clock.now < begin + 20 else at_once(message)

        monkeypatch.setattr(grid, "_reply", reply)
        recipe = recipe_file(tmp_path, engine={"minimum": 1, "fraction": 0.3, "deadline": 1000.0}, run={"rounds": 1})
        play(recipe, tmp_path / "run", grid, clock)
        (row,) = read_run(tmp_path / "run").rounds()
        assert row["ids"] == [1, 2]
        assert "more parameters than the policy" in row["dropped"]["0"]


class TestIdentity:
    def test_a_node_that_does_not_say_who_it_is_holds_up_no_round(self, tmp_path):
        """It is waited for at the beginning; later a moment, and not in every round. It may come late."""
        grid, said, clock = federation(tmp_path), list[tuple[float, str]](), FakeClock()
        grid.nodes[102].answers = False
        clock.on_sleep = lambda now: setattr(grid.nodes[102], "answers", now > 1010)
        recipe = recipe_file(tmp_path, engine={"minimum": 1, "deadline": 1000.0}, run={"rounds": 2})
        play(recipe, tmp_path / "run", grid, clock, lambda text: said.append((clock.now, text)))
        assert clock.now <= 1030
        assert sum("did not say who it is: no answer within 1000 s" in text for _, text in said) == 1
        assert [row["ids"] for row in read_run(tmp_path / "run").rounds()] == [[0, 1]] * 2

    def test_a_second_claimant_is_refused_even_while_the_first_is_away(self, tmp_path):
        grid = federation(tmp_path)
        recipe = recipe_file(tmp_path, engine=TWO_ARE_ENOUGH, run={"rounds": 2})
        grid.nodes[200] = FakeNode("another key", grid.nodes[101].config, online=False)

        def swap(text: str) -> None:
            if "round 1/2" in text:
                grid.nodes[101].online, grid.nodes[200].online = False, True

        play(recipe, tmp_path / "run", grid, say=swap)
        rows = list(read_run(tmp_path / "run").rounds())
        assert [row["ids"] for row in rows] == [[0, 1, 2], [0, 2]]
        assert "the node of '1' is not connected" in rows[1]["dropped"]["1"]
        assert "says it is '1', but that is the node with key" in rows[1]["refused"][identity(grid.nodes[200])]
        assert grid.nodes[200].seen == ["query"], "it was asked once who it is, and never again"

    def test_a_node_keeps_its_client_over_restarts_and_new_numbers(self, tmp_path):
        grid, recipe = federation(tmp_path), recipe_file(tmp_path)
        play(recipe, tmp_path / "run", grid)
        moved = replace(grid, nodes={number + 50: node for number, node in grid.nodes.items()})
        again = recipe_file(tmp_path / "again", run={"rounds": 3})
        (tmp_path / "run-2").mkdir()
        (tmp_path / "run" / "bindings.json").rename(tmp_path / "run-2" / "bindings.json")
        play(again, tmp_path / "run-2", moved)
        assert all(node.seen.count("query") == 1 for node in grid.nodes.values())

    def test_an_unknown_client_is_refused_with_the_known_ones(self, tmp_path):
        grid = federation(tmp_path)
        grid.nodes[103] = FakeNode("key of 3", grid.nodes[100].config | {"fedalloy-client": "north"})
        play(recipe_file(tmp_path), tmp_path / "run", grid)
        row = next(read_run(tmp_path / "run").rounds())
        assert "it says it is 'north', which is not a client of this run; allowed: 0, 1, 2" in str(row["refused"])


class TestRefusals:
    def test_another_version_is_refused_with_both_named(self, tmp_path, monkeypatch):
        from fedalloy.flower.protocol import orders

        class Older:
            __version__ = "0.0.9"

        monkeypatch.setattr(orders, "fedalloy", Older)
        with pytest.raises(FederationError) as caught:
            play(recipe_file(tmp_path, engine={"wait": 5.0}), tmp_path / "run", federation(tmp_path))
        log = (tmp_path / "run" / "federation.log").read_text()
        assert f"the server runs fedalloy {fedalloy.__version__}" in log
        assert "this node fedalloy 0.0.9" in log
        assert "no node has connected" in str(caught.value)

    def test_a_node_one_version_behind_is_refused_by_name_with_what_to_do_and_the_others_go_on(
        self, tmp_path, monkeypatch
    ):
        grid = federation(tmp_path)
        seats = [Seat(name, identity_of(f"key of {number}".encode())) for number, name in enumerate(NAMES)]
        real = grid._reply

        def reply(message):
            with pytest.MonkeyPatch.context() as patch:
                if message.metadata.dst_node_id == 101:
                    patch.setattr("fedalloy.__version__", "0.0.9", raising=False)
                return real(message)

        monkeypatch.setattr(grid, "_reply", reply)
        recipe = recipe_file(tmp_path, engine={"minimum": 2}, run={"rounds": 1})
        play(recipe, tmp_path / "run", grid, seats=lambda: seats)
        (row,) = read_run(tmp_path / "run").rounds()
        assert row["ids"] == [0, 2]
        ours = fedalloy.__version__
        assert f"the server runs fedalloy {ours} (messages" in row["dropped"]["1"]
        assert f"this node fedalloy 0.0.9 (format {FORMAT})" in row["dropped"]["1"]
        assert f"pip install 'fedalloy[flower]=={ours}' at the node" in row["dropped"]["1"]
        assert "without south: refused: the server runs" in (tmp_path / "run" / "federation.log").read_text()

    def test_a_forbidden_statistic_that_is_needed_stops_the_run_with_a_clear_reason(self, tmp_path):
        policy = tmp_path / "policy.toml"
        policy.write_text('forbid = ["loss_before"]\n')
        grid = federation(tmp_path, **{"fedalloy-policy": str(policy)})
        with pytest.raises(FederationError, match=r"forbids loss_before, which weighting 'AaggffS' needs"):
            play(recipe_file(tmp_path, "aaggff_s"), tmp_path / "run", grid)

    def test_a_forbidden_statistic_that_nobody_needs_is_not_sent(self, tmp_path):
        policy = tmp_path / "policy.toml"
        policy.write_text('forbid = ["train_loss", "accuracy"]\n')
        grid = federation(tmp_path, **{"fedalloy-policy": str(policy)})
        play(recipe_file(tmp_path, run={"rounds": 1}), tmp_path / "run", grid)
        row = next(read_run(tmp_path / "run").rounds())
        assert row["train_loss"] is None
        assert set(row["sent"]["0"]) == {"delta", "num_examples", "num_steps", "bytes_up", "scores", "test_size"}
        assert row["evaluation"]["loss"]["mean"] > 0
        assert row["evaluation"]["accuracy"]["mean"] is None

    def test_a_model_of_some_package_needs_the_operators_word(self, tmp_path):
        model = "fedalloy.tasks.models.linear:logistic"
        recipe = recipe_file(tmp_path, task={"model": model}, run={"rounds": 1})
        with pytest.raises(FederationError, match=r"not in the list 'models' of this node's policy"):
            play(recipe, tmp_path / "run", federation(tmp_path))
        policy = tmp_path / "policy.toml"
        policy.write_text(f'models = ["{model}"]\n')
        allowed = federation(tmp_path, **{"fedalloy-policy": str(policy)})
        assert play(recipe, tmp_path / "run-2", allowed).status == "finished"

    def test_the_text_of_an_error_stays_on_the_node(self, tmp_path):
        grid = federation(tmp_path)
        grid.nodes[101].config["fedalloy-data"] = "tests.flower.hostile:patient_names"
        recipe = recipe_file(tmp_path, engine=TWO_ARE_ENOUGH, run={"rounds": 1})
        play(recipe, tmp_path / "run", grid)
        row = next(read_run(tmp_path / "run").rounds())
        assert row["dropped"]["1"] == "failed: RuntimeError (see the node's log)"

    def test_a_node_that_is_configured_wrongly_says_so(self, tmp_path):
        grid = federation(tmp_path)
        del grid.nodes[101].config["fedalloy-data"]
        play(recipe_file(tmp_path, engine=TWO_ARE_ENOUGH, run={"rounds": 1}), tmp_path / "run", grid)
        row = next(read_run(tmp_path / "run").rounds())
        assert "'fedalloy-data' is missing" in str(row["refused"])


def test_what_was_sent_is_listed_by_name_and_bytes_on_both_sides(tmp_path):
    play(recipe_file(tmp_path, "scaffold", evaluate={"every": 1}), tmp_path / "run", federation(tmp_path))
    row = next(read_run(tmp_path / "run").rounds())
    model = 4 * (64 * 10 + 10)
    numbers = {"num_examples": 8, "num_steps": 8, "train_loss": 8, "bytes_up": 8, "scores": 16, "test_size": 8}
    assert row["sent"]["2"] == {"delta": model, "control": model, **numbers}
    ledger = next((tmp_path / "node-2").rglob("sent.jsonl")).read_text().splitlines()
    first = json.loads(ledger[0])
    assert first["bytes"] == {"delta": model, "control": model}
    assert set(first["stats"]) == set(numbers) - {"scores", "test_size"}
    assert [json.loads(line)["kind"] for line in ledger] == ["train", "evaluate"] * 3


@pytest.mark.parametrize("numbers", [3, 100_000])
def test_a_letter_survives_the_journey(numbers):
    """Few bytes beside the header, many as an array, through Flower's records and between a node's processes."""
    parts = {
        "a": {"f": torch.randn(2, numbers), "h": torch.randn(5).to(torch.bfloat16), "none": torch.zeros(0, 3)},
        "b": {"i": torch.tensor(7), "t": torch.tensor([True, False]), "d": torch.randn(3, dtype=torch.float64)},
        "empty": {},
    }
    packed = pack(TensorMessage({"kind": "train", "x": [1, None]}, parts))
    assert len(packed.array_records) == (numbers > 3)
    here, there = socket.socketpair()
    with here, there:
        writer = threading.Thread(target=send_frame, args=(here, {"config": {"a": 1}}, packed))
        writer.start()
        said, content = receive_frame(there)
        writer.join()
    assert said == {"config": {"a": 1}}
    message = unpack(content)
    assert message.header == {"kind": "train", "x": [1, None]}
    assert {part: set(leaves) for part, leaves in message.parts.items()} == {p: set(v) for p, v in parts.items()}
    for part, leaves in parts.items():
        for name, leaf in leaves.items():
            assert torch.equal(message.parts[part][name], leaf)
            assert message.parts[part][name].dtype == leaf.dtype
    assert outline(packed).parts["a"]["f"].is_meta


def test_nothing_is_written_to_a_process_that_may_have_answered_already():
    written: list[bytes] = []
    link = Mock(sendall=written.append)
    send_frame(link, {}, RecordDict({"a": ConfigRecord({"none": b"", "some": b"12"})}))
    assert written[1:] == [b"12"]


def test_memory_is_asked_for_as_bytes_come_and_not_as_they_are_announced():
    here, there = socket.socketpair()
    with there:
        with here:
            here.sendall((1 << 62).to_bytes(8, "big") + b"{}")
        with pytest.raises(ConnectionError, match="is gone"):
            receive_frame(there)

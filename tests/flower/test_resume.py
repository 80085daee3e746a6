"""Kills and lags: the same command goes on, a replayed round starts from the state before it, states are kept."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

pytest.importorskip("flwr")

from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.records.checkpoint import load as load_state
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.node.store import NodeStore
from fedalloy.flower.protocol.header import Refused
from fedalloy.flower.protocol.tensor_messages import TensorMessage, outline, pack, unpack
from tests.flower.fake import FakeGrid, federation, play, recipe_file
from tests.flower.test_federation import assert_equal, simulated

pytestmark = pytest.mark.flower


class Killed(BaseException):
    """Not an error: nobody catches it."""


def dying(grid: FakeGrid, after: int) -> FakeGrid:
    """Ends the server once so many orders were answered."""
    answered = 0
    pull = grid.pull_messages

    def pull_messages(message_ids):
        nonlocal answered
        replies = []
        for one in message_ids:
            if answered == after:
                raise Killed
            found = pull([one])
            answered += len(found)
            replies += found
        return replies

    grid.pull_messages = pull_messages  # type: ignore[method-assign]
    return grid


@pytest.mark.parametrize(
    ("algorithm", "answered"),
    [("scaffold", 4), ("scaffold", 9), ("superfed_lm", 5), ("superfed_lm", 7), ("ditto", 8), ("ditto", 11)],
)
def test_a_killed_run_ends_as_if_nothing_had_happened(algorithm, answered, tmp_path):
    """Three introductions, then three answers a round: the kill comes before, within and after rounds."""
    recipe = recipe_file(tmp_path, algorithm)
    with pytest.raises(Killed):
        play(recipe, tmp_path / "run", dying(federation(tmp_path), answered))
    said: list[str] = []
    ending = play(recipe, tmp_path / "run", federation(tmp_path), say=said.append)
    assert "continues (session 2)" in said[0]
    expected, recorder = simulated(recipe)
    for part, leaves in expected.state["shared"].items():
        assert_equal(ending.state["shared"][part], leaves)
    last, wanted = list(read_run(tmp_path / "run").rounds())[-1], recorder.streams["rounds"][-1]
    assert last["evaluation"]["loss"]["mean"] == pytest.approx(wanted["evaluation"]["loss"]["mean"], abs=1e-5)


def test_a_client_that_did_not_count_starts_from_where_it_was(tmp_path):
    """A node trains in a round, but its answer is lost: the next round takes up the state before it."""
    recipe = recipe_file(tmp_path, "scaffold", engine={"minimum": 2, "deadline": 5.0})
    grid = federation(tmp_path)

    def lose(content):
        lost = len(grid.nodes[101].seen) == 3 and outline(content).parts  # introduction, round 1, round 2
        return broken(content) if lost else content

    grid.nodes[101].tamper = lose
    ending = play(recipe, tmp_path / "run", grid)
    rows = list(read_run(tmp_path / "run").rounds())
    assert [row["ids"] for row in rows] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert "lagging" not in rows[2]
    cohorts = {"kind": "list", "cohorts": [[0, 1, 2], [0, 2], [0, 1, 2]]}
    expected, _ = simulated(recipe_file(tmp_path / "same", "scaffold", sampling=cohorts))
    for part, leaves in expected.state["shared"].items():
        assert_equal(ending.state["shared"][part], leaves)


def broken(content):
    message = unpack(content)
    return pack(
        TensorMessage(message.header, {name: leaves for name, leaves in message.parts.items() if name != "delta"})
    )


def test_a_node_that_is_back_after_days_joins_the_next_round_with_its_state(tmp_path):
    """Everything that it has on disk is five days old; the others went on."""
    rounds, days = 5, 5 * 86_400
    recipe = recipe_file(tmp_path, "scaffold", engine={"minimum": 2, "deadline": 5.0}, run={"rounds": rounds})
    grid = federation(tmp_path)

    def leave_and_return(text: str) -> None:
        if "round 1/5" in text:
            grid.nodes[101].online = False
            for file in (tmp_path / "node-1").rglob("*"):
                os.utime(file, (file.stat().st_atime - days, file.stat().st_mtime - days))
        if "round 4/5" in text:
            grid.nodes[101].online, grid.nodes[101].since = True, "later"

    ending = play(recipe, tmp_path / "run", grid, say=leave_and_return)
    rows = list(read_run(tmp_path / "run").rounds())
    cohorts = [[0, 1, 2], [0, 2], [0, 2], [0, 2], [0, 1, 2]]
    assert [row["ids"] for row in rows] == cohorts
    assert not any(row.get("lagging") for row in rows), "its state of round 1 is still the one that counts"
    expected, _ = simulated(recipe, sampling={"kind": "list", "cohorts": cohorts})
    for part, leaves in expected.state["shared"].items():
        assert_equal(ending.state["shared"][part], leaves)


@pytest.mark.parametrize("on_lag", ["continue", "drop"])
def test_a_node_that_lost_its_states_is_noticed(on_lag, tmp_path):
    recipe = recipe_file(tmp_path, "scaffold", engine={"minimum": 2, "on_lag": on_lag})
    grid = federation(tmp_path)

    def wipe(text: str) -> None:
        if "round 2/3" in text:
            shutil.rmtree(tmp_path / "node-1")

    play(recipe, tmp_path / "run", grid, say=wipe)
    row = list(read_run(tmp_path / "run").rounds())[-1]
    said = row["lagging"]["1"] if on_lag == "continue" else row["dropped"]["1"]
    assert "the valid state is that of round 2, this node has none" in said
    assert row["ids"] == ([0, 1, 2] if on_lag == "continue" else [0, 2])


def test_another_experiment_in_the_folder_is_refused(tmp_path):
    play(recipe_file(tmp_path), tmp_path / "run", federation(tmp_path))
    with pytest.raises(CheckpointError, match="a run of 3 rounds, and 2 are requested"):
        play(recipe_file(tmp_path, run={"rounds": 2}), tmp_path / "run", federation(tmp_path))
    with pytest.raises(CheckpointError, match=r"run\.seeds is \[7\] there, \[5\] here"):
        play(recipe_file(tmp_path, run={"rounds": 3, "seeds": [5]}), tmp_path / "run", federation(tmp_path))


def test_a_run_over_a_federation_may_be_asked_for_more_rounds(tmp_path):
    for rounds in (3, 4):
        play(recipe_file(tmp_path, run={"rounds": rounds}), tmp_path / "run", federation(tmp_path))
    assert [row["round"] for row in read_run(tmp_path / "run").rounds()] == [1, 2, 3, 4]


def state(value: float) -> dict:
    return {"solver": {"w": torch.tensor([value])}, "wire": {}}


class TestStore:
    @pytest.fixture
    def store(self, tmp_path):
        with NodeStore.of(tmp_path, "ab12cd34", "north / west").lock() as store:
            yield store

    def test_it_holds_the_states_before_and_after_the_last_round(self, store):
        store.finish(3, 0, state(3), (1, 1))
        store.finish(4, 3, state(4), (1, 2))
        assert store.start(3).state["solver"]["w"] == 3
        assert store.start(4).state["solver"]["w"] == 4
        assert store.start(0).state is None
        assert len(list(store.folder.glob("state-*"))) == 2

    def test_a_replayed_round_replaces_the_one_it_replays(self, store):
        store.finish(3, 0, state(3), (1, 1))
        store.finish(5, 3, state(5), (1, 2))
        store.finish(5, 3, state(5.5), (2, 1))
        assert store.start(3).state["solver"]["w"] == 3
        assert store.start(5).state["solver"]["w"] == 5.5

    def test_a_lagging_node_continues_from_the_newest_older_state(self, store):
        store.finish(3, 0, state(3), (1, 1))
        store.finish(5, 3, state(5), (1, 2))
        found = store.start(7)
        assert (found.round, found.state["solver"]["w"]) == (5, 5)
        assert "the valid state is that of round 7, this node has that of round 5 and continues from it" in found.lag
        assert store.start(4).round == 3
        assert store.start(2) == type(found)(0, None, store.start(2).lag)
        with pytest.raises(Refused, match="on_lag = 'drop'"):
            store.start(7, "drop")

    def test_a_damaged_state_counts_as_lost(self, store):
        store.finish(3, 0, state(3), (1, 1))
        store.finish(5, 3, state(5), (1, 2))
        (store.folder / "state-000005.safetensors").write_bytes(b"nothing")
        assert store.start(5).round == 3
        assert "cannot be used" in store.start(5).lag

    def test_states_that_a_lagging_node_replaces_are_kept_aside(self, store):
        """As after a server was restored that is older than its nodes."""
        store.finish(5, 4, state(5), (1, 1))
        found = store.start(3)
        store.finish(5, found.round, state(5.5), (2, 1), bool(found.lag))
        (kept,) = (store.folder / "aside").iterdir()
        assert load_state(kept)["solver"]["w"] == 5
        assert store.start(5).state["solver"]["w"] == 5.5

    @pytest.mark.parametrize(
        "text", ['{"before": 3, "aft', "[]", '{"ticket": 5}', '{"before": null}', '{"format": "1"}']
    )
    def test_a_damaged_index_is_made_again_from_the_states(self, store, text):
        store.finish(3, 0, state(3), (1, 1))
        store.finish(5, 3, state(5), (1, 2))
        (store.folder / "index.json").write_text(text)
        assert (store.start(5).state["solver"]["w"], store.start(3).state["solver"]["w"]) == (5, 3)
        assert [one.name.partition("-")[2] for one in (store.folder / "aside").iterdir()] == ["index.json"]

    def test_a_folder_of_an_earlier_version_is_read_and_one_of_a_later_version_kept_aside(self, store):
        store.finish(3, 0, state(3), (1, 1))
        index = store.folder / "index.json"
        known = json.loads(index.read_text())
        assert known.pop("format") == 1
        index.write_text(json.dumps(known))
        assert store.start(3).state["solver"]["w"] == 3, "written before there was a format"
        index.write_text(json.dumps(known | {"format": 2}))
        assert store.start(3) == type(store.start(3))(0, None, store.start(3).lag)
        aside = sorted(one.name.partition("-")[2] for one in (store.folder / "aside").iterdir())
        assert aside == ["index.json", "state-000003.safetensors"]

    def test_an_order_that_was_overtaken_is_refused(self, store):
        store.finish(3, 0, None, (2, 4))
        store.accept((2, 4))
        store.accept((3, 1))
        with pytest.raises(Refused, match="overtaken"):
            store.accept((2, 3))

    def test_a_name_of_a_run_is_no_path(self, tmp_path):
        with pytest.raises(Refused, match="no valid name"):
            NodeStore.of(tmp_path, "../../etc", "north")

    def test_names_of_clients_stay_apart(self, tmp_path):
        places = {NodeStore.of(tmp_path, "ab12cd34", name).folder for name in ("a b", "a_b", "a/b", "..", ".")}
        assert len(places) == 5
        assert all(place.parent == tmp_path / "ab12cd34" for place in places)

"""A site decides which studies run on it, and can show what was asked of it and answered."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from typer.testing import CliRunner

from fedalloy.cli.app import app
from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.experiment.recipe import load
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.layout import NodePlace, ServerPlace
from fedalloy.flower.members import add, remove, replace_key
from fedalloy.flower.node.approval import Approvals
from fedalloy.flower.node.audit import START, Audit, verify
from fedalloy.flower.node.policy import Policy
from fedalloy.flower.node.store import NodeStore
from fedalloy.flower.pki import make_node_key, public_half
from fedalloy.flower.project_templates import FederationPlan, write_federation
from fedalloy.flower.review import Review
from tests.flower.fake import FakeGrid, federation, play, recipe_file

pytestmark = pytest.mark.flower
TWO = {"minimum": 2, "deadline": 20.0}


def store(grid: FakeGrid, number: int) -> Path:
    return Path(grid.nodes[number].config["fedalloy-store"])


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedevg", "superfed_lm"])
def test_what_is_reviewed_is_what_nodes_are_asked_to_do(algorithm, tmp_path):
    """The hash from the recipe is the one that a node computes from its orders, whatever the seed; but FedEvg's solver
    is described with the bounds of the data, which in a trial depend on how they are dealt."""
    recipe = recipe_file(tmp_path, algorithm, run={"rounds": 1})
    grid = federation(tmp_path)
    play(recipe, tmp_path / "run", grid)
    asked = [line for line in lines(store(grid, 100)) if line["asked"] != "hello"]
    assert {line["study"] for line in asked} == {Review.of(load(recipe)).study}
    assert (Review.of(load(recipe), seed=99).study == asked[0]["study"]) == (algorithm != "fedevg")
    other = recipe_file(tmp_path / "other", algorithm, run={"rounds": 1}, task={"test_fraction": 0.3})
    assert Review.of(load(other)).study != asked[0]["study"]


def test_a_study_that_is_not_approved_is_refused_and_one_that_is_runs_until_it_is_withdrawn(tmp_path):
    grid, recipe = federation(tmp_path), recipe_file(tmp_path, "scaffold", engine=TWO)
    strict = tmp_path / "strict.toml"
    strict.write_text("require_approval = true\n")
    grid.nodes[101].config["fedalloy-policy"] = str(strict)
    approvals, study = Approvals(store(grid, 101)), Review.of(load(recipe)).study

    def decide(text: str) -> None:
        if "round 1/3" in text:
            approvals.approve(study, "mine")
        if "round 2/3" in text:
            assert approvals.withdraw("mine") == study

    play(recipe, tmp_path / "run", grid, say=decide)
    rows = list(read_run(tmp_path / "run").rounds())
    assert [row["ids"] for row in rows] == [[0, 2], [0, 1, 2], [0, 2]]
    assert f"the study {study[:16]} is not approved at this site" in rows[0]["dropped"]["1"]
    told = lines(store(grid, 101))
    trained = [(line["round"], line["status"]) for line in told if line.get("asked") == "train"]
    assert trained == [(1, "refused"), (2, "ok"), (3, "refused")]
    assert [line["approved"] for line in told if "approved" in line] == [study]
    verify(store(grid, 101))
    (run,) = [path.parent for path in store(grid, 101).glob("*/study")]
    assert list(run.glob("*/state-*")), "it has a state of the study"
    assert approvals.forget(study) == [run]
    assert not run.exists()
    assert verify(store(grid, 101))[0] == len(told) + 1, "the log stays"
    with pytest.raises(SpecError, match="approved: none"):
        approvals.withdraw("mine")


def test_the_audit_log_names_what_was_sent_and_not_its_values(tmp_path):
    grid = federation(tmp_path)
    play(recipe_file(tmp_path, run={"rounds": 1}), tmp_path / "run", grid)
    told = lines(store(grid, 100))
    assert [line["asked"] for line in told] == ["hello", "train", "evaluate"]
    assert told[1]["bytes"] == {"delta": 2600}
    assert {"num_examples", "train_loss"} <= set(told[1]["numbers"])
    assert told[2]["numbers"] == ["scores", "test_size"]
    assert (store(grid, 100) / "audit.jsonl").stat().st_mode & 0o077 == 0


def test_a_node_that_cannot_write_its_audit_log_answers_nothing(tmp_path):
    grid = federation(tmp_path)
    (store(grid, 101) / "audit.jsonl").mkdir(parents=True)
    play(recipe_file(tmp_path, engine=TWO, run={"rounds": 1}), tmp_path / "run", grid)
    (row,) = read_run(tmp_path / "run").rounds()
    assert row["ids"] == [0, 2]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    audit = Audit(tmp_path, lambda: 7.0)
    for number in range(5):
        audit.note({"asked": number})
    return tmp_path / "audit.jsonl"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda rows: [*rows[:2], rows[2].replace('"asked":2', '"asked":9'), *rows[3:]], "line 3 was changed"),
        (lambda rows: [*rows[:2], *rows[3:]], "line 3 does not follow"),
        (lambda rows: [*rows[:2], rows[1], *rows[2:]], "line 3 does not follow"),
        (lambda rows: rows[1:], "line 1 does not follow"),
        (lambda rows: [rows[1], rows[0], *rows[2:]], "line 1 does not follow"),
        (lambda rows: [*rows[:4], "{}\n"], "line 5 is no entry"),
    ],
)
def test_every_change_of_the_audit_log_is_found(change, why, log):
    assert verify(log.parent)[0] == 5
    log.write_text("".join(change(log.read_text().splitlines(keepends=True))))
    with pytest.raises(CheckpointError, match=why):
        verify(log.parent)


def test_entries_cut_off_the_end_are_missed_by_a_hash_that_was_noted(log):
    _, last = verify(log.parent)
    kept = log.read_text().splitlines(keepends=True)
    log.write_text("".join(kept[:3]))
    assert verify(log.parent)[0] == 3
    with pytest.raises(CheckpointError, match="removed from its end"):
        verify(log.parent, last)
    assert verify(log.parent, json.loads(kept[1])["hash"])[0] == 3
    assert verify(log.parent / "nothing") == (0, START)


@pytest.mark.parametrize("torn", ['{"asked": 5, "bef', '{"asked": 5}'])
def test_half_an_entry_of_a_crash_is_no_change_and_is_replaced_by_the_next(log, torn):
    with log.open("a") as file:
        file.write(torn)
    assert verify(log.parent)[0] == 5, "nobody changed it: the disk was full, or the power failed"
    Audit(log.parent).note({"asked": 6})
    assert verify(log.parent)[0] == 6


@pytest.mark.parametrize("torn", ["", '{"asked": 5, "bef'])
def test_an_entry_of_any_length_is_followed_by_the_next(log, torn):
    """However long: the chain goes on, and nothing of an entry that is whole is cut off."""
    Audit(log.parent).note({"asked": "x" * 300_000})
    with log.open("a") as file:
        file.write(torn)
    Audit(log.parent).note({"asked": 7})
    assert verify(log.parent)[0] == 7


def test_a_study_is_forgotten_after_it_was_withdrawn_and_without_an_approval(tmp_path, north):
    """What a node keeps of a study is deleted, whatever was said about the study before."""
    node, approvals = str(north.folder), Approvals(north.config.store)
    for run, study in (("a" * 16, "1" * 64), ("b" * 16, "2" * 64), ("c" * 16, "2" * 64)):
        approvals.mark(run, study)
    approvals.approve("1" * 64, "first")
    approvals.withdraw("first")
    line = ["flower", "forget", node]
    unknown = CliRunner().invoke(app, [*line, "3" * 64])
    assert unknown.exit_code == 2
    assert "222222222222 (not approved)" in unknown.output
    told = CliRunner().invoke(app, [*line, "first"])
    assert "deleted 1 folders" in told.output
    assert "does not require approvals" in told.output, "it would come back"
    assert "deleted 2 folders" in CliRunner().invoke(app, [*line, "2222"]).output
    assert not list(north.config.store.glob("*/study"))
    approvals.approve("4" * 64, "first")
    assert approvals.find("first") == "4" * 64, "the one that is approved now"


def test_what_is_forgotten_is_not_deleted_in_the_middle_of_an_order(north):
    """An order that is being carried out is waited for."""
    approvals, store = Approvals(north.config.store), NodeStore.of(north.config.store, "a" * 16, "0")
    approvals.mark("a" * 16, "1" * 64)
    with ThreadPoolExecutor(1) as pool:
        with store.lock():
            gone = pool.submit(approvals.forget, "1" * 64)
            with pytest.raises(TimeoutError):
                gone.result(0.3)
            assert store.folder.is_dir()
        assert gone.result(30) == [store.folder.parent]
    assert not store.folder.exists()


def test_the_review_says_what_a_policy_refuses(tmp_path):
    found = Review.of(load(recipe_file(tmp_path, "aaggff_s")))
    text = found.text(Policy(forbid=("loss_before",), max_parameters=10))
    for words in ("650 parameters", "loss_before", "never examples", "in up to 3 rounds", found.study):
        assert words in text
    assert "REFUSED by this site's policy: the policy of this node forbids loss_before" in text
    assert "the most are 10" in text
    assert "REFUSED" not in found.text(Policy())


def test_the_commands_of_a_site(tmp_path):
    write_federation(tmp_path / "fed", FederationPlan(("north",)))
    node, recipe = str(tmp_path / "fed/nodes/north"), str(recipe_file(tmp_path))

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["flower", *words])
        assert done.exit_code == 0, done.output
        return done.output

    study = Review.of(load(Path(recipe))).study
    assert study in run("review", recipe, "--node", node)
    assert "does not require approvals" in run("approve", node, recipe)
    assert run("withdraw", node, study[:8]).strip() == f"withdrawn: {study}"
    assert "deleted 0 folders" in run("forget", node, study)
    assert "3 entries, none changed" in run("audit", node)
    told = CliRunner().invoke(app, ["flower", "logs", node, "south"])
    assert told.exit_code == 2
    assert "is the folder of the node 'north'" in told.output
    assert CliRunner().invoke(app, ["flower", "audit", node, "--known", "ff"]).exit_code != 0
    assert run("logs", node) == ""


@pytest.fixture
def north(tmp_path: Path) -> NodePlace:
    write_federation(tmp_path / "fed", FederationPlan(("north",)))
    return NodePlace.read(tmp_path / "fed" / "nodes" / "north", trial=True)


@pytest.fixture
def place(tmp_path: Path) -> ServerPlace:
    write_federation(tmp_path / "fed", FederationPlan(("north", "south")))
    for name in ("east.key", "new.key"):
        make_node_key(tmp_path / name)
    return ServerPlace.read(tmp_path / "fed" / "server")


def test_members_are_added_removed_and_given_new_keys(place, tmp_path):
    nodes, east, new = place.folder / "nodes", public_half(tmp_path / "east.key"), public_half(tmp_path / "new.key")
    add(place, "east", east)
    assert (nodes / "east.pub").read_text() == east.read_text()
    for name, key, why in (
        ("east", new, "has a key already"), ("west", east, "is the key of 'east'"), ("../x", new, "not a valid node"),
        ("west", tmp_path / "east.key", "is not a public key"),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=why):
            add(place, name, key)
    replace_key(place, "north", new)
    assert (nodes / "north.pub").read_text() == new.read_text()
    remove(place, "south")
    assert [file.stem for file in place.node_keys] == ["east", "north"]
    assert len(list((nodes / "former").glob("*.pub"))) == 2
    with pytest.raises(SpecError, match="no node 'south' is admitted"):
        remove(place, "south")


def test_changes_are_noted_for_a_server_that_does_not_run(place, tmp_path):
    line = ["flower", "rotate", str(place.folder), "north", str(public_half(tmp_path / "new.key"))]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    assert "the server is not running, and reads it when it starts" in done.output
    wrong = CliRunner().invoke(app, ["flower", "admit", str(place.folder), "east"])
    assert "or neither" in wrong.output

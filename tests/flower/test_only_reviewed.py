"""What a node sends is what ``review`` said, and an approval covers no more than that."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from fedalloy.experiment.mixing import LAMBDAS
from fedalloy.experiment.recipe import load
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.config import NodeConfig
from fedalloy.flower.dry_run import dry_run
from fedalloy.flower.node.approval import Approvals
from fedalloy.flower.node.store import NodeStore
from fedalloy.flower.protocol.header import Refused
from fedalloy.flower.protocol.tensor_messages import unpack
from fedalloy.flower.review import Review
from tests.flower.fake import FakeGrid, federation, play, recipe_file
from tests.flower.orders import answered, example, node_keys

pytestmark = pytest.mark.flower
STRICT = "require_approval = true\n"
SECRET = "hiv_status"


def store(grid: FakeGrid, number: int) -> Path:
    return Path(grid.nodes[number].config["fedalloy-store"])


def answers(grid: FakeGrid) -> list[dict[str, Any]]:
    """The headers of everything that nodes answer from now on, with the names of their parts."""
    found: list[dict[str, Any]] = []

    def watch(content: Any) -> Any:
        message = unpack(content)
        found.append({**message.header, "parts": sorted(message.parts)})
        return content

    for node in grid.nodes.values():
        node.tamper = watch
    return found


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "superfed_lm", "aaggff_s", "fedboosting", "fedevg"])
def test_nodes_send_what_the_review_says_and_nothing_else(algorithm, tmp_path):
    recipe, grid = recipe_file(tmp_path, algorithm, run={"rounds": 1}, evaluate={"every": 1}), federation(tmp_path)
    found, review = answers(grid), Review.of(load(recipe))
    play(recipe, tmp_path / "run", grid)
    trained = [one for one in found if "stats" in one]
    assert {name for one in trained for name in one["stats"]} <= set(review.sent)
    assert {part for one in trained for part in one["parts"]} == set(review.algorithm.templates(review.shared))
    models = {2 if "and this site's own" in review.text() else 1}
    models |= {len(LAMBDAS)} if "and mixtures of both" in review.text() else set()
    assert {len(one["scores"]) for one in found if "scores" in one} == {one * len(review.metrics) for one in models}
    assert any("cross_score" in one for one in found) == ("send their models here" in review.text())
    known = {"format", "fedalloy", "client", "status", "parts", "stats", "scores", "test_size", "cross_score"}
    assert {name for one in found for name in one} <= known


def test_the_list_of_what_was_sent_names_every_number(tmp_path):
    grid = federation(tmp_path)
    play(recipe_file(tmp_path, run={"rounds": 1}, evaluate={"every": 1}), tmp_path / "run", grid)
    (file,) = store(grid, 100).glob("*/*/sent.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [sorted(row) for row in rows] == [
        ["bytes", "kind", "round", "stats", "ticket"],
        ["bytes", "kind", "round", "scores", "test_size", "ticket"],
    ]


def test_an_approval_covers_the_rounds_and_the_metrics_of_the_recipe_alone(tmp_path):
    engine, two = {"minimum": 2, "deadline": 20.0}, {"rounds": 2}
    reviewed = recipe_file(tmp_path / "reviewed", engine=engine, run=two, evaluate={"metrics": ["accuracy"]})
    more: dict[str, Any] = {"run": {"rounds": 3}, "evaluate": {"metrics": ["accuracy", "loss"], "every": 1}}
    run, grid, review = recipe_file(tmp_path, engine=engine, **more), federation(tmp_path), Review.of(load(reviewed))
    assert Review.of(load(run)).study == review.study, "the hash is the same"
    (tmp_path / "strict.toml").write_text(STRICT)
    grid.nodes[101].config["fedalloy-policy"] = str(tmp_path / "strict.toml")
    Approvals(store(grid, 101)).approve(review.study, "mine", review.rounds, review.metrics)
    play(run, tmp_path / "run", grid)
    rows = list(read_run(tmp_path / "run").rounds())
    assert [row["ids"] for row in rows] == [[0, 1, 2], [0, 1, 2], [0, 2]]
    assert "has approved 2 rounds" in rows[2]["dropped"]["1"]
    assert "without the metrics loss" in rows[0]["unscored"]["1"]


def test_an_approval_of_an_earlier_version_has_no_such_limits(tmp_path):
    approvals = Approvals(tmp_path)
    approvals.file.write_text(json.dumps({"1" * 64: {"name": "mine", "approved": 7}}))
    approvals.check("1" * 64, True, 10**6, ("loss",))
    with pytest.raises(Refused, match="is not approved at this site"):
        approvals.check("2" * 64, True)


def test_nothing_is_approved_without_an_entry_in_the_log(tmp_path):
    (tmp_path / "audit.jsonl").mkdir()
    with pytest.raises(OSError, match="directory"):
        Approvals(tmp_path).approve("1" * 64, "mine")
    assert Approvals(tmp_path).read() == {}


def test_models_of_others_are_scored_only_where_the_study_needs_it(tmp_path):
    """Else any study that is approved would do to learn how any model does on a site's data."""
    header, parts = example("cross")
    assert answered(header, parts, node_keys(tmp_path))[0] == "ok"
    header["algorithm"]["requires"].remove("cross_score")
    status, reason = answered(header, parts, node_keys(tmp_path))
    assert (status, "does not need the models of others" in reason) == ("refused", True)


def own_data(folder: Path) -> Path:
    """A table whose schema is wrong: the error names a column of it."""
    folder.mkdir()
    (folder / "patients.csv").write_text(f"age,{SECRET},y\n40,1,0\n50,0,1\n")
    (folder / "schema.toml").write_text(f'features = ["age", "{SECRET}"]\nlabel = "{SECRET}"\n')
    return folder


def test_an_error_in_a_sites_own_data_is_not_told_to_the_server(tmp_path, caplog):
    header, parts = example()
    status, reason = answered(header, parts, node_keys(tmp_path / "node", str(own_data(tmp_path / "data"))))
    assert (status, SECRET in reason, str(tmp_path) in reason) == ("failed", False, False), reason
    assert "see the node's log" in reason
    assert SECRET in caplog.text, "the operator is told"


def test_a_policy_that_cannot_be_read_is_not_told_to_the_server(tmp_path, caplog):
    header, parts = example()
    status, reason = answered(header, parts, node_keys(tmp_path, policy="forbid = ["))
    assert (status, str(tmp_path) in reason) == ("refused", False), reason
    assert str(tmp_path) in caplog.text


def test_a_state_that_is_gone_is_named_to_the_server_without_its_place(tmp_path):
    grid, recipe = federation(tmp_path), recipe_file(tmp_path, "scaffold")

    def lose(text: str) -> None:
        if "round 2/3" in text:
            next(store(grid, 101).rglob("state-000002*")).unlink()

    play(recipe, tmp_path / "run", grid, say=lose)
    said = list(read_run(tmp_path / "run").rounds())[-1]["lagging"]["1"]
    assert "this node has that of round 1; that of round 2 cannot be used" in said
    assert str(tmp_path) not in said


def test_an_order_that_waited_for_forget_leaves_nothing_behind(tmp_path):
    """It was accepted before the operator decided, and is refused after it."""
    keys, (header, parts) = node_keys(tmp_path, policy=STRICT), example()
    approvals, waiting = Approvals(tmp_path / "store"), threading.Event()
    kept = NodeStore.of(tmp_path / "store", header["run"], "0")
    answered(header, parts, node_keys(tmp_path))
    study = next((tmp_path / "store").glob("*/study")).read_text().strip()
    node_keys(tmp_path, policy=STRICT)
    approvals.approve(study, "mine")
    with ThreadPoolExecutor(1) as pool:
        with kept.lock():
            check = Approvals.check

            def seen(*given: Any, **named: Any) -> None:
                check(*given, **named)
                waiting.set()

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Approvals, "check", seen)
                late = pool.submit(answered, header, parts, keys)
                assert waiting.wait(60)
            approvals.withdraw("mine")
            shutil.rmtree(kept.folder.parent)
        status, reason = late.result(60)
    assert (status, "is not approved" in reason) == ("refused", True)
    assert [file.name for file in kept.folder.parent.rglob("*") if file.is_file()] == ["study", "lock"]
    assert approvals.forget(study) == [kept.folder.parent], "it can be found"
    assert not kept.folder.parent.exists()


def test_what_a_crash_leaves_of_a_forgotten_study_is_found_again(tmp_path):
    """It is moved out of the way in one step and then deleted."""
    approvals = Approvals(tmp_path)
    approvals.mark("a" * 16, "1" * 64)
    (tmp_path / ("a" * 16)).rename(tmp_path / f".{'a' * 16}")
    approvals.mark("a" * 16, "1" * 64)
    assert len(approvals.forget("1" * 64)) == 2
    assert not list(tmp_path.glob("*/study"))


def test_data_that_changed_after_the_approval_are_noticed(tmp_path):
    """Approved is what is asked; but a node that has other examples than in its first answer is left out, by name."""
    x, y = np.random.default_rng(1).random((60, 64), dtype=np.float32), np.arange(60) % 10
    folder, grid = tmp_path / "data", federation(tmp_path)
    folder.mkdir()
    np.savez(folder / "all.npz", x=x, y=y)
    grid.nodes[101].config["fedalloy-data"] = str(folder)

    def change(text: str) -> None:
        if "round 1/3" in text:
            np.savez(folder / "all.npz", x=x[:40], y=y[:40])

    play(recipe_file(tmp_path, engine={"minimum": 2}), tmp_path / "run", grid, say=change)
    rows = list(read_run(tmp_path / "run").rounds())
    assert [row["ids"] for row in rows] == [[0, 1, 2], [0, 2], [0, 2]]
    assert "num_examples" in rows[1]["dropped"]["1"]


def test_a_dry_run_may_have_more_rounds_than_were_approved(tmp_path):
    """Nothing of it is sent."""
    recipe = recipe_file(tmp_path, run={"rounds": 1})
    keys = node_keys(tmp_path, policy=STRICT)
    review = Review.of(load(recipe))
    Approvals(tmp_path / "store").approve(review.study, "mine", review.rounds, review.metrics)
    assert [one.round for one in dry_run(NodeConfig.read(keys), load(recipe), 2)] == [1, 2]

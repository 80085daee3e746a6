"""The whole federation in one process: every algorithm gives what the loop gives, and every fault is named."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from flwr.cli.build import build_fab_from_disk

import fedalloy
from fedalloy.core.errors import CheckpointError, FedalloyError
from fedalloy.experiment.recipe import load, parse, reopen, resolve
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.bundle import bundle_files, write_bundle
from fedalloy.flower.engine import FederationError, Flower
from tests.flower import shares
from tests.flower.fake import federation, play, recipe_file
from tests.flower.watched import per_round, recorded, watched

pytestmark = pytest.mark.flower
BUNDLE = "922a4eb1764b36830b406b95995f3ea15e71ce654771184a2bdd2396240974c3"
"""Changes only when the bundle does: then its version changes too."""
# One line per algorithm that must give what the loop gives; test_real.py sends some of them to real nodes.
ALGORITHMS = ["fedavg", "scaffold", "superfed_lm", "aaggff_s", "fedlayerwise", "fedboosting", "ditto", "fedevg"]


def simulated(recipe: Path, **tables: dict):
    """The same recipe by the loop engine, in which tables may be exchanged."""
    found = load(recipe).model_dump(exclude_none=True) | {"engine": {"kind": "loop"}} | tables
    return _simulated(json.dumps(found))


@functools.cache
def _simulated(tables: str):
    return resolve(parse(json.loads(tables))).run()


def test_the_server_keeps_no_second_copy_of_the_model(tmp_path, monkeypatch):
    """A module is built for its structure; in rounds its values are those of the server's state."""
    seen, call = [], Flower.__call__

    def noted(engine, algorithm, task, *rest):
        outcome = call(engine, algorithm, task, *rest)
        seen.append([leaf.untyped_storage().nbytes() for leaf in task.objective.structure.parameters()])
        return outcome

    monkeypatch.setattr(Flower, "__call__", noted)
    play(recipe_file(tmp_path), tmp_path / "run", federation(tmp_path))
    assert seen == [[4, 4]] * 3


def assert_equal(one, other, tolerance=1e-5):
    assert one.keys() == other.keys()
    for name, leaf in one.items():
        assert torch.allclose(leaf, other[name], atol=tolerance), name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nodes_give_what_the_loop_gives(algorithm, tmp_path):
    recipe = recipe_file(tmp_path, algorithm)
    grid = watched(tmp_path)
    ending = play(recipe, tmp_path / "run", grid)
    expected, recorder = simulated(recipe)
    assert ending.status == "finished"
    for part, leaves in expected.state["shared"].items():
        assert_equal(ending.state["shared"][part], leaves)
    rows, wanted = list(read_run(tmp_path / "run").rounds()), recorder.streams["rounds"]
    assert [row["ids"] for row in rows] == [row["ids"] for row in wanted]
    assert recorded(tmp_path / "run") == [(row["bytes_down"], row["bytes_up"]) for row in wanted] == per_round(grid, 3)
    assert rows[-1]["evaluation"]["accuracy"]["mean"] == pytest.approx(wanted[-1]["evaluation"]["accuracy"]["mean"])


@pytest.mark.parametrize("standardise", ["none", "client"])
def test_folders_on_nodes_give_what_one_folder_gives_in_a_simulation(standardise, tmp_path):
    """A node splits and scales its own data as the client of its number would be."""
    tables = shares.tables(3)
    tables["task"]["standardise"] = standardise
    recipe = recipe_file(tmp_path, **tables)
    recipe.write_text(recipe.read_text().replace('kind = "dirichlet"\n', "").replace("alpha = 0.5\n", ""))
    grid = federation(tmp_path)
    for client, node in enumerate(grid.nodes.values()):
        shares.write_share(tmp_path / f"data-{client}", client)
        node.config["fedalloy-data"] = str(tmp_path / f"data-{client}")
    grid.nodes[101].config["fedalloy-data"] = "tests.flower.hostile:data"
    ending = play(recipe, tmp_path / "run", grid)
    same = shares.simulation(tmp_path / "all", 3)
    same["task"]["standardise"] = standardise
    expected, recorder = simulated(recipe, **same)
    assert_equal(ending.state["shared"]["params"], expected.state["shared"]["params"], 1e-7)
    rows, wanted = list(read_run(tmp_path / "run").rounds()), recorder.streams["rounds"]
    assert rows[-1]["evaluation"]["loss"]["mean"] == pytest.approx(wanted[-1]["evaluation"]["loss"]["mean"])


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # in Flower's own code
def test_the_bundle_is_the_same_for_every_run(tmp_path):
    """Whatever the recipe, byte for byte: no code travels."""
    built = {build_fab_from_disk(write_bundle(tmp_path / name)) for name in ("one", "two")}
    assert len(built) == 1
    code = [text for name, text in bundle_files().items() if name.endswith("_app.py")]
    imports = [line for text in code for line in text.splitlines() if "import" in line]
    assert imports == ["from fedalloy.flower import server", "from fedalloy.flower import client"]
    assert hashlib.sha256("".join(bundle_files().values()).encode()).hexdigest() == BUNDLE


def test_a_bundle_is_not_written_over_something_else(tmp_path):
    write_bundle(tmp_path)
    (tmp_path / "pyproject.toml").write_text("mine")
    with pytest.raises(FedalloyError, match="not what fedalloy would write"):
        write_bundle(tmp_path)


def test_the_engine_says_where_it_can_run(tmp_path):
    with pytest.raises(FederationError, match="runs inside a federation"):
        fedalloy.fit("fedavg", fedalloy.task("digits", clients=2), engine="flower", rounds=1)


def test_a_run_whose_states_are_on_nodes_cannot_be_opened_again(tmp_path):
    play(recipe_file(tmp_path, "scaffold", run={"rounds": 1}), tmp_path / "run", federation(tmp_path))
    with pytest.raises(CheckpointError, match="clients' states are on their nodes"):
        reopen(tmp_path / "run")

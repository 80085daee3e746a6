"""A node whose data are a query of PostgreSQL: checked before the first round, and silent about its password."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr")
pytest.importorskip("sqlalchemy", reason="needs the extra 'data'")

from fedalloy.cli.app import app
from fedalloy.experiment.recipe import load
from fedalloy.flower.layout import NodePlace
from fedalloy.flower.node.checking import check_node
from tests.tasks.postgres import Postgres, missing, postgres

pytestmark = [
    pytest.mark.flower,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing() or "there is one"),
]

TABLE = """
CREATE TABLE visits AS SELECT 40 + k AS age, 100.5 + k AS pressure, CASE WHEN k % 3 = 0 THEN 'yes' ELSE 'no' END
    AS outcome FROM generate_series(0, 59) AS k
"""
STUDY = """
[task]
dataset = { kind = "nodes", shape = [2], classes = 2 }
model = "logistic"
[partition]
clients = 1
[algorithm]
name = "fedavg"
lr = 0.001
[run]
rounds = 2
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres() as one:
        one.do(TABLE)
        yield one


@pytest.fixture
def node(server: Postgres, tmp_path: Path) -> Path:
    assert flower("init", tmp_path / "fed", "--names", "north")[0] == 0
    folder = tmp_path / "fed" / "nodes" / "north"
    settings = (folder / "node.toml").read_text().splitlines()
    kept = [line for line in settings if not line.startswith("data")]
    (folder / "node.toml").write_text("\n".join([*kept, 'data = "visits.sql"']) + "\n")
    (folder / "visits.sql").write_text("SELECT age, pressure, outcome AS y FROM visits")
    (folder / "schema.toml").write_text('classes = ["no", "yes"]\n')
    (folder / "database.toml").write_text(f'url = "{server.url()}"\n')
    (tmp_path / "study.toml").write_text(STUDY)
    return folder


def flower(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["flower", *map(str, words)])
    assert "Traceback" not in done.output
    return done.exit_code, " ".join(done.output.split())


def test_a_node_trains_on_a_query(node, tmp_path):
    code, said = flower("dry-run", node, tmp_path / "study.toml")
    assert code == 0, said
    made = check_node(NodePlace.read(node).config, load(tmp_path / "study.toml"))
    assert sum(made.examples.values()) == 60


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("visits.sql", "SELECT age, outcome AS y FROM visits", "shape (1,), the recipe's (2,)"),
        ("visits.sql", "SELECT age, pressure, weight, outcome AS y FROM visits", 'column "weight" does not exist'),
        ("visits.sql", "SELECT age, NULLIF(pressure, 101.5) AS p, outcome AS y FROM visits", "values are missing in"),
        ("visits.sql", "SELECT age, pressure, outcome AS y FROM visits WHERE age < 0", "no examples"),
        ("schema.toml", 'classes = ["no"]\n', "'yes'"),
        ("schema.toml", "", "must be declared"),
        ("database.toml", 'url = "postgresql+psycopg://owner:wrong-word@127.0.0.1:1/x"\n', "Connection refused"),
    ],
)
def test_doctor_says_before_the_first_round_what_does_not_fit(node, tmp_path, file, text, words):
    (node / file).write_text(text)
    code, said = flower("doctor", node, tmp_path / "study.toml")
    assert code == 1
    assert words in said.replace(" │ ", " "), said
    assert "wrong-word" not in said


def test_an_order_that_finds_no_database_tells_the_server_nothing_of_it(server, node, tmp_path, caplog):
    """The coordinator learns the type of the error; address and reason are in the node's own log, without password."""
    (node / "database.toml").write_text(server.url(password="wrong-word").join(('url = "', '"\n')))
    code, said = flower("dry-run", node, tmp_path / "study.toml")
    assert code != 0
    assert "DataError (see the node's log)" in said, said
    assert "password authentication failed" in caplog.text
    assert "wrong-word" not in said + caplog.text

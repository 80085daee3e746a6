"""A query of a real PostgreSQL server as a client's table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("sqlalchemy", reason="needs the extra 'data'")

from fedalloy.core.errors import DataError
from fedalloy.tasks.sources import sql
from fedalloy.tasks.sources.one_client import read_path
from tests.tasks.postgres import Postgres, missing, postgres

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "there is one")]

TABLE = """
CREATE TABLE visits (
    id bigint PRIMARY KEY, age smallint, pressure numeric(8, 3), weight real, born date, seen timestamptz,
    smoker boolean, scan bytea, sick numeric(1), outcome text
);
INSERT INTO visits SELECT 9007199254740992 + k, 40 + k, CASE WHEN k = 3 THEN NULL ELSE 100.5 + k END, 1.5 * k,
    DATE '1970-01-01' + k, TIMESTAMPTZ '2020-01-01 00:00+00' + k * INTERVAL '1 day', k % 2 = 0, decode('00', 'hex'),
    (k % 3 = 0)::int, CASE WHEN k % 3 = 0 THEN 'yes' ELSE 'no' END FROM generate_series(0, 11) AS k;
CREATE SEQUENCE numbers;
CREATE FUNCTION forget() RETURNS bigint LANGUAGE sql AS 'DELETE FROM visits RETURNING id';
"""
SCHEMA = 'classes = ["no", "yes"]\n'


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres() as one:
        one.do(TABLE)
        yield one


@pytest.fixture
def folder(server: Postgres, tmp_path: Path) -> Path:
    (tmp_path / "database.toml").write_text(f'url = "{server.url()}"\n')
    (tmp_path / "schema.toml").write_text(SCHEMA)
    return tmp_path


def read(folder: Path, query: str) -> tuple[list[list[float]], list[float]]:
    (folder / "visits.sql").write_text(query)
    x, y = read_path(folder / "visits.sql").parts[""]
    return torch.as_tensor(x).tolist(), torch.as_tensor(y).tolist()


def test_numbers_of_every_type_are_read(folder):
    columns = "age, weight, smoker, id - 9007199254740990 AS k, pressure, outcome AS y"
    x, y = read(folder, f"SELECT {columns} FROM visits WHERE outcome = 'yes' AND age % 2 = 0 ORDER BY id")
    assert x == [[40.0, 0.0, 1.0, 2.0, 100.5], [46.0, 9.0, 1.0, 8.0, 106.5]]
    assert y == [1, 1]


def test_a_label_that_is_a_decimal_without_a_fraction_is_a_class(folder):
    (folder / "schema.toml").write_text("classes = [0, 1]\n")
    _, y = read(folder, "SELECT age, sick AS y FROM visits ORDER BY id")
    assert y == [1, 0, 0] * 4
    (folder / "visits.sql").write_text("SELECT age, sick AS y FROM visits ORDER BY id")
    (folder / "schema.toml").unlink()
    assert read_path(folder / "visits.sql").parts[""][1].dtype == torch.int64
    (folder / "visits.sql").write_text("SELECT age, sick * 100000000000000000000 AS y FROM visits")
    assert read_path(folder / "visits.sql").parts[""][1].is_floating_point(), "too large for a whole number here"


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("pressure", "values are missing in 'pressure' .1 of 12"),
        ("born", "'born' holds date values"),
        ("seen", "'seen' holds datetime values"),
        ("'NaN'::numeric AS gap", "values are missing in 'gap'"),
        ("'infinity'::float8 AS far", "NaN or infinity"),
        ("age / 0 AS age", "refuses the query: division by zero"),
        ("height", 'column "height" does not exist'),
        ("pg_terminate_backend(pg_backend_pid())", "refuses the query: terminating connection"),
    ],
)
def test_what_is_not_a_number_is_named(folder, column, words):
    with pytest.raises(DataError, match=words):
        read(folder, f"SELECT {column}, outcome AS y FROM visits")


def test_gaps_are_filled_and_dates_counted_where_the_site_says_so(folder):
    (folder / "schema.toml").write_text(f'{SCHEMA}missing = "drop"\n')
    assert len(read(folder, "SELECT pressure, outcome AS y FROM visits")[0]) == 11
    x, _ = read(folder, "SELECT born - DATE '1970-01-01' AS days, outcome AS y FROM visits ORDER BY id")
    assert [row[0] for row in x] == [float(k) for k in range(12)]


def test_the_order_is_that_of_the_values_wherever_the_rows_lie(server, folder):
    query = "SELECT age, weight, scan, outcome AS y FROM visits"
    (folder / "schema.toml").write_text(f'{SCHEMA}ignore = ["scan"]\n')
    before = read(folder, query)
    server.do("BEGIN; UPDATE visits SET weight = weight WHERE age < 45; COMMIT")  # moves them to the end of the table
    assert server.do("SELECT age FROM visits LIMIT 1") == [(45,)]
    assert read(folder, query) == before


@pytest.mark.parametrize(
    "query",
    [
        r"SELECT E'\'' AS a, outcome AS y FROM visits ; COMMIT; DELETE FROM visits --'",
        "SELECT ARRAY[']'] AS a, outcome AS y FROM visits ; COMMIT; DELETE FROM visits --'",
        "SELECT age, outcome AS y FROM visits /* /* */ ' */ ; COMMIT; DELETE FROM visits --'",
    ],
)
def test_a_second_statement_is_refused_however_it_is_hidden(server, folder, query, monkeypatch):
    with pytest.raises(DataError, match=r"more than one statement|in different ways"):
        read(folder, query)
    monkeypatch.setattr(sql, "check_query", lambda query, *_: query)  # the session itself only reads
    with pytest.raises(DataError, match="read-only transaction"):
        read(folder, query)
    assert server.do("SELECT count(*) FROM visits") == [(12,)]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("nextval('numbers')", "nextval.. in a read-only transaction"),
        ("setval('numbers', 7)", "setval.. in a read-only transaction"),
        ("forget()", "DELETE in a read-only transaction"),
        ("set_config('transaction_read_only', 'off', false) AS b, forget()", "must be set before any query"),
    ],
)
def test_functions_of_the_database_write_nothing(server, folder, column, words):
    with pytest.raises(DataError, match=words):
        read(folder, f"SELECT {column} AS a, outcome AS y FROM visits")
    assert server.do("SELECT count(*) FROM visits") == [(12,)]
    assert server.do("SELECT is_called FROM numbers") == [(False,)]


def test_rows_are_not_locked(folder):
    with pytest.raises(DataError, match="FOR SHARE in a read-only transaction"):
        read(folder, "SELECT age, outcome AS y FROM visits FOR SHARE")


@pytest.mark.parametrize(
    "address",
    [
        "postgresql+psycopg://owner:wrong-word@127.0.0.1:{port}/postgres",
        "postgresql+psycopg://127.0.0.1:{port}/postgres?user=owner&password=wrong-word",
        "postgresql+psycopg://owner:wrong-word@127.0.0.1:{port}/postgres?nonsense=1",
        "postgresql+psycopg://owner:wrong-word@127.0.0.1:1/postgres",
    ],
)
def test_a_connection_that_fails_says_why_and_shows_no_password(server, folder, address, caplog):
    (folder / "database.toml").write_text(f'url = "{address.format(port=server.port)}"\n')
    with pytest.raises(DataError, match="no connection to postgresql") as refused:
        read(folder, "SELECT age, outcome AS y FROM visits")
    chain = [refused.value, refused.value.__cause__, refused.value.__context__ if refused.value.__cause__ else None]
    assert not any("wrong-word" in str(one) for one in chain)
    assert "wrong-word" not in caplog.text


def test_an_account_that_may_only_read_is_enough(server, folder):
    server.do("CREATE ROLE reader LOGIN PASSWORD 'reading'; GRANT SELECT ON visits TO reader")
    (folder / "database.toml").write_text(f'url = "{server.url("reader", "reading")}"\n')
    assert len(read(folder, "SELECT age, outcome AS y FROM visits")[1]) == 12


def test_a_server_that_went_away_and_came_back(server, folder):
    query = "SELECT age, outcome AS y FROM visits"
    before = read(folder, query)
    server.stop()
    with pytest.raises(DataError, match=r"no connection to .*Connection refused"):
        read(folder, query)
    server.start()
    assert read(folder, query) == before

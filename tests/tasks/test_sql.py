"""A query of a database as a client's table: read-only in fact, and refused in words where it is anything else."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch

pytest.importorskip("sqlalchemy", reason="needs the extra 'data'")

import fedalloy
from fedalloy.core.errors import DataError
from fedalloy.tasks.sources import sql
from fedalloy.tasks.sources.one_client import read_path
from fedalloy.tasks.sources.sql_text import check_query

QUERY = "-- all visits\nSELECT age, pressure * 1.0 AS pressure, sex, outcome AS y FROM visits ORDER BY id;\n"
SCHEMA = 'classes = ["no", "yes"]\ncategorical = { sex = ["f", "m"] }\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / "registry.db")) as database, database:
        database.execute("CREATE TABLE visits (id INTEGER, age INTEGER, pressure NUMERIC, sex TEXT, outcome TEXT)")
        rows = [(k, 40 + k, 100 + k, "fm"[k % 2], ("no", "yes")[k % 3 == 0]) for k in range(12)]
        database.executemany("INSERT INTO visits VALUES (?, ?, ?, ?, ?)", rows)
    (tmp_path / "database.toml").write_text('url = "sqlite:///registry.db"\n')
    (tmp_path / "schema.toml").write_text(SCHEMA)
    (tmp_path / "visits.sql").write_text(QUERY)
    return tmp_path


def test_a_query_is_read_as_the_same_table_in_a_file_would_be(folder, tmp_path):
    x, y = read_path(folder / "visits.sql").parts[""]
    table = tmp_path / "plain"
    table.mkdir()
    lines = [f"{40 + k},{100.0 + k},{'fm'[k % 2]},{('no', 'yes')[k % 3 == 0]}" for k in range(12)]
    (table / "visits.csv").write_text("\n".join(["age,pressure,sex,y", *lines]))
    (table / "schema.toml").write_text(SCHEMA)
    features, labels = read_path(table / "visits.csv").parts[""]
    assert torch.equal(x, features)
    assert torch.equal(y, labels)
    assert x.shape == (12, 4)


def test_a_folder_of_queries_is_a_federation(folder):
    for name, rows in {"north": "id < 5", "south": "id >= 5"}.items():
        (folder / f"{name}.sql").write_text(QUERY.replace("ORDER", f"WHERE {rows} ORDER"))
    (folder / "visits.sql").unlink()
    task = fedalloy.task(folder, test_fraction=0.2)
    assert task.names == ("north", "south")
    both = torch.tensor([0, 1])
    sizes = [[len(task.data(part, both).client(k).y) for k in (0, 1)] for part in ("train", "test")]
    assert [sum(one) for one in zip(*sizes, strict=True)] == [5, 7]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("DELETE FROM visits", "begins with 'delete'"),
        ("SELECT 1; DROP TABLE visits", "more than one statement"),
        ("WITH gone AS (DELETE FROM visits RETURNING *) SELECT * FROM gone", "has the word 'DELETE'"),
        ("SELECT * INTO copy FROM visits", "has the word 'INTO'"),
        ("SELECT * FROM visits FOR UPDATE", "has the word 'UPDATE'"),
        ("/* SELECT */ PRAGMA user_version", "begins with 'pragma'"),
        ("", "begins with ''"),
    ],
)
def test_anything_but_one_select_is_refused_before_a_connection_is_made(folder, text, words):
    (folder / "visits.sql").write_text(text)
    (folder / "database.toml").unlink()
    with pytest.raises(DataError, match=words):
        read_path(folder / "visits.sql")


def test_words_in_quotes_and_comments_are_no_statements():
    for text in (
        "SELECT \"update\", 'drop; it' FROM visits -- delete; nothing",
        "WITH old AS (SELECT * FROM visits) /* insert */ SELECT replace(sex, 'm', 'x') FROM old",
        "SELECT $tag$ drop; $tag$ AS note FROM visits",
    ):
        assert check_query(text, "here") == text


HIDDEN = "; COMMIT; DELETE FROM visits"


@pytest.mark.parametrize(
    ("database", "text", "words"),
    [
        ("postgresql", rf"SELECT E'\'' AS a FROM visits {HIDDEN} --'", "more than one statement"),
        ("postgresql", f"SELECT ARRAY[']'] AS a FROM visits {HIDDEN} --'", "more than one statement"),
        ("postgresql", f"SELECT a FROM visits /* /* */ ' */ {HIDDEN} --'", "in different ways"),
        ("mysql", "SELECT age FROM visits # '\nINTO OUTFILE '/tmp/all'", "has the word 'INTO'"),
        ("mysql", r"SELECT '\'' INTO OUTFILE '/tmp/all' FROM visits -- '", "has the word 'INTO'"),
        ("mysql", "SELECT age FROM visits /*! INTO OUTFILE '/tmp/all' */", "in different ways"),
        ("mariadb", "SELECT 5 --1 INTO OUTFILE '/tmp/all'", "has the word 'INTO'"),
        ("mssql", f"SELECT $a$ {HIDDEN} SELECT $a$", "more than one statement"),
    ],
)
def test_quotes_end_where_the_database_ends_them(database, text, words):
    """Each text hides a second statement from a reading with the quotes of another database."""
    with pytest.raises(DataError, match=words):
        check_query(text, "here", database)


def test_what_a_database_has_in_quotes_is_no_statement_to_it():
    for database, text in {
        "postgresql": r"SELECT E'it\'s; drop' AS note, tags[1] FROM visits",
        "mysql": r"SELECT 'it\'s; drop' AS note FROM visits # insert",
        "mssql": "SELECT [drop; it] FROM visits",
    }.items():
        assert check_query(text, "here", database) == text


@pytest.mark.parametrize("text", ["DELETE FROM visits", "CREATE TABLE mine (a)", "PRAGMA user_version = 7"])
def test_the_transaction_itself_writes_nothing(folder, text, monkeypatch):
    """Where the check of the text is passed, as by a function of the database with effects."""
    monkeypatch.setattr(sql, "check_query", lambda query, *_: query)
    (folder / "visits.sql").write_text(text)
    with pytest.raises(DataError, match="refuses the query"):
        read_path(folder / "visits.sql")
    with closing(sqlite3.connect(folder / "registry.db")) as database:
        assert database.execute("SELECT count(*) FROM visits").fetchone() == (12,)
        assert database.execute("SELECT count(*) FROM sqlite_master").fetchone() == (1,)
        assert database.execute("PRAGMA user_version").fetchone() == (0,)


def test_the_connection_may_be_in_the_environment_and_its_password_is_never_shown(folder, monkeypatch):
    (folder / "database.toml").write_text('variable = "REGISTRY_URL"\n')
    with pytest.raises(DataError, match="REGISTRY_URL is empty"):
        read_path(folder / "visits.sql")
    monkeypatch.setenv("REGISTRY_URL", "sqlite:///registry.db")
    assert len(read_path(folder / "visits.sql").parts[""][1]) == 12
    for url in (
        "postgresql+nodriver://reader:secret@db/registry",
        "secret",
        "mysql+nodriver://reader:secret@db/registry",
        "mysql+nodriver://db/registry?user=reader&password=secret&read_default_file=x",
        "postgresql://reader:geheim@secret@db:secret/registry",
        "mssql+nodriver:///?odbc_connect=DRIVER%3Dx%3BUID%3Dreader%3BPWD%3Dsecret",
        "snowflake+nodriver://reader@account/registry?private_key=secret",
        "sqlite:///registry.db?timeout=1&check_same_thread=secret-token",
    ):
        monkeypatch.setenv("REGISTRY_URL", url)
        with pytest.raises(DataError) as refused:
            read_path(folder / "visits.sql")
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("connection", "query", "words"),
    [
        ('url = "sqlite:///missing.db"', "SELECT 1 AS y", "missing.db does not exist"),
        ('url = "sqlite:///registry.db"', "SELECT age, age FROM visits", "two columns of the same name"),
        ('url = "sqlite:///registry.db"', "SELECT weight FROM visits", "no such column: weight"),
        ('url = "sqlite:///registry.db"', "SELECT age FROM visits WHERE sex <> ':m'", "has no column 'sex'"),
        ('adress = "x"', "SELECT 1 AS y", "unknown key 'adress'"),
        ('url = "a"\nvariable = "b"', "SELECT 1 AS y", "one of 'url' and 'variable'"),
        ("url = ", "SELECT 1 AS y", "cannot be read"),
        ('url = "sqlite:///registry.db?timeout=long"', "SELECT 1 AS y", "could not convert string to float"),
    ],
)
def test_what_is_wrong_is_said(folder, connection, query, words):
    (folder / "database.toml").write_text(connection)
    (folder / "visits.sql").write_text(query)
    with pytest.raises(DataError, match=words):
        read_path(folder / "visits.sql")
    assert not (folder / "missing.db").exists()


def test_a_query_of_another_encoding_is_refused_and_a_mark_of_utf_8_is_no_word(folder):
    (folder / "visits.sql").write_bytes(QUERY.replace("-- all", "-- für").encode("latin-1"))
    with pytest.raises(DataError, match=r"visits\.sql cannot be read: it must be UTF-8"):
        read_path(folder / "visits.sql")
    (folder / "visits.sql").write_text(QUERY, encoding="utf-8-sig")
    assert len(read_path(folder / "visits.sql").parts[""][1]) == 12


def test_the_examples_do_not_depend_on_the_order_in_which_a_database_has_them(folder):
    """They are split by their places: in another order, test examples would become training examples."""
    (folder / "visits.sql").write_text(QUERY.replace("ORDER BY id", ""))
    x, y = read_path(folder / "visits.sql").parts[""]
    with closing(sqlite3.connect(folder / "registry.db")) as database, database:
        rows = database.execute("SELECT * FROM visits").fetchall()
        database.execute("DELETE FROM visits")
        database.executemany("INSERT INTO visits VALUES (?, ?, ?, ?, ?)", rows[::-1])
    again, labels = read_path(folder / "visits.sql").parts[""]
    assert torch.equal(x, again)
    assert torch.equal(y, labels)
    (folder / "visits.sql").write_text(QUERY.replace("ORDER BY id", "ORDER BY age DESC"))
    assert read_path(folder / "visits.sql").parts[""][0][:, 0].tolist() == [float(51 - k) for k in range(12)]

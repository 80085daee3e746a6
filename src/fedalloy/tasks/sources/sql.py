"""A database as a table: one SELECT in a ``.sql`` file, and the connection in ``database.toml`` beside it.

    # database.toml
    url = "postgresql+psycopg://reader@db.hospital.example/registry"   # as SQLAlchemy writes it
    variable = "REGISTRY_URL"    # or the environment variable that holds the url, so that no password is in a file

Nothing is written. A file that holds anything but one SELECT is refused before a connection is made, and the query runs
in a read-only transaction where the database has one (PostgreSQL, MySQL, MariaDB, Oracle, SQLite), which is rolled
back. Functions that the database itself offers can still have effects: use an account that may do nothing but SELECT.
Rows are sorted by their values, unless the query says in which order they come (ORDER BY, by something unique).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

from fedalloy.core.errors import DataError, nearest
from fedalloy.tasks.datasets.base import third_party
from fedalloy.tasks.sources.columns import Table
from fedalloy.tasks.sources.frames import column_of

CONNECTION = "database.toml"
_KEYS = ("url", "variable")
# In the order in which they are tried: what is in quotes or in a comment is no word of the statement.
_QUOTED = re.compile(
    r"""--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|\$(\w*)\$.*?\$\1\$""", re.DOTALL
)
_WRITES = frozenset(
    ("insert", "update", "delete", "merge", "upsert", "drop", "alter", "create", "truncate", "grant", "revoke", "call",
     "exec", "execute", "into", "copy", "attach", "detach", "pragma", "vacuum", "load", "handler", "do")
)  # fmt: skip
_READ_ONLY = {
    "sqlite": "PRAGMA query_only = ON",
    "mysql": "SET SESSION TRANSACTION READ ONLY",
    "mariadb": "SET SESSION TRANSACTION READ ONLY",
    "oracle": "SET TRANSACTION READ ONLY",
    "postgresql": "SET TRANSACTION READ ONLY",
}
"""How each database is told that a transaction only reads."""


def read_query(path: Path) -> Table:
    """The columns that the query in a file returns, by name."""
    query = check_query(path.read_text(encoding="utf-8"), str(path))
    library = third_party("sqlalchemy", "sqlalchemy", "reading databases")
    with _connected(path.parent / CONNECTION, library) as connection:
        try:
            found = connection.execute(library.text(_literal(query)))
            names, rows = list(found.keys()), found.fetchall()
        except library.exc.SQLAlchemyError as error:
            raise DataError(f"{path}: the database refuses the query: {_plain(error)}") from None
    if len(set(names)) < len(names):
        raise DataError(f"{path}: the query returns two columns of the same name; rename one (AS)")
    if not is_ordered(query):
        rows = sorted(rows, key=lambda row: tuple(map(repr, row)))
    return {str(name): column_of([_number(row[place]) for row in rows]) for place, name in enumerate(names)}


def check_query(text: str, where: str) -> str:
    """The one SELECT of a text; anything else is refused.

    >>> check_query("SELECT age, y FROM visits WHERE note <> 'delete me';", "visits.sql")
    "SELECT age, y FROM visits WHERE note <> 'delete me'"
    """
    query = text.strip().removesuffix(";").strip()
    bare = _QUOTED.sub(" '' ", query)
    words = re.findall(r"[a-z_]\w*", bare.lower())
    if not words or words[0] not in ("select", "with"):
        raise DataError(f"{where} must hold one SELECT, and begins with '{words[0] if words else ''}'")
    if ";" in bare:
        raise DataError(f"{where} holds more than one statement; only one SELECT is allowed")
    writes = next((word for word in words if word in _WRITES), None)
    if writes:
        raise DataError(
            f"{where} has the word '{writes.upper()}', and a node only reads; a column of that name is put in quotes"
        )
    return query


def is_ordered(query: str) -> bool:
    """Whether a query says the order of its rows. Without that a database may return them in another one each time,
    and examples are split into parts by their places.

    >>> [is_ordered(f"SELECT a FROM t{end}") for end in (" ORDER BY a", "", " WHERE a IN (SELECT b FROM u ORDER BY b)")]
    [True, False, False]
    """
    bare, before = _QUOTED.sub(" '' ", query), None
    while bare != before:
        bare, before = re.sub(r"\([^()]*\)", " ", bare), bare
    return re.search(r"\border\s+by\b", bare, re.IGNORECASE) is not None


@contextmanager
def _connected(file: Path, library: Any) -> Iterator[Any]:
    """A connection in a transaction that only reads, and is rolled back."""
    url = _url(file, library)
    try:
        engine = library.create_engine(url, poolclass=library.pool.NullPool)
        with engine.connect() as connection:
            order = _READ_ONLY.get(engine.dialect.name, "")
            if order:
                connection.exec_driver_sql(order)
            if "SESSION" in order:  # it counts from the next transaction on
                connection.rollback()
            yield connection
            connection.rollback()
    except (library.exc.SQLAlchemyError, ImportError) as error:
        shown = url.render_as_string(hide_password=True)
        raise DataError(f"{file}: no connection to {shown}: {_plain(error)}") from None


def _url(file: Path, library: Any) -> Any:
    """The address of the database; a file of SQLite is looked for beside, and is not created."""
    told = _told(file)
    given = str(os.environ.get(str(told["variable"]), "") if "variable" in told else told["url"])
    if not given:
        raise DataError(f"{file}: the environment variable {told['variable']} is empty; it should hold the url")
    try:
        url = library.engine.make_url(given)
    except library.exc.ArgumentError:  # its text would show the password
        raise DataError(f"{file}: no url of a database, such as postgresql+psycopg://reader@host/name") from None
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return url
    place = file.parent / str(url.database)
    if not place.is_file():
        raise DataError(f"{file}: {place} does not exist")
    return url.set(database=str(place))


def _told(file: Path) -> Mapping[str, Any]:
    try:
        told = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{file} does not exist; it names the database: url = '...', or variable = '...'") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}") from None
    for key in told:
        if key not in _KEYS:
            raise DataError(f"{file}: unknown key '{key}'; {nearest(key, _KEYS)}")
    if len(told) != 1:
        raise DataError(f"{file} must have one of 'url' and 'variable'")
    return told


def _literal(query: str) -> str:
    """Colons belong to the query: nothing in it is a parameter."""
    return query.replace(":", r"\:")


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, Decimal) else value


def _plain(error: Exception) -> str:
    """The database's own words, without the query and the advice of SQLAlchemy."""
    return " ".join(str(getattr(error, "orig", None) or error).split())[:300]

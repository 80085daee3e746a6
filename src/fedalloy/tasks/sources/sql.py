"""A database as a table: one SELECT in a ``.sql`` file, and the connection in ``database.toml`` beside it.

    # database.toml
    url = "postgresql+psycopg://reader@db.hospital.example/registry"   # as SQLAlchemy writes it
    variable = "REGISTRY_URL"    # or the environment variable that holds the url, so that no password is in a file

Nothing is written. A file that holds anything but one SELECT is refused before a connection is made
(:mod:`fedalloy.tasks.sources.sql_text`), and the query runs in a read-only transaction where the database has one
(PostgreSQL, MySQL, MariaDB, Oracle, SQLite), which is rolled back. Functions that the database itself offers can still
have effects: use an account that may do nothing but SELECT.
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
from fedalloy.tasks.sources.sql_text import check_query, is_ordered

CONNECTION = "database.toml"
_KEYS = ("url", "variable")
_READ_ONLY = {
    "sqlite": "PRAGMA query_only = ON",
    "mysql": "SET SESSION TRANSACTION READ ONLY",
    "mariadb": "SET SESSION TRANSACTION READ ONLY",
    "oracle": "SET TRANSACTION READ ONLY",
    "postgresql": "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
}
"""How each database is told that a transaction only reads. For the whole session where that is possible: a further
transaction in it, which no check of the text has noticed, then only reads as well."""
_SECRET = re.compile(r"pass|pwd|secret|token|key", re.IGNORECASE)
_WHOLE = 2**63


def read_query(path: Path) -> Table:
    """The columns that the query in a file returns, by name."""
    query, file = check_query(_text(path), str(path)), path.parent / CONNECTION
    library = third_party("sqlalchemy", "sqlalchemy", "reading databases")
    url = _url(file, library)
    check_query(query, str(path), url.get_backend_name())
    with _connected(url, file, library) as connection:
        try:
            found = connection.execute(library.text(_literal(query)))
            names, rows = list(found.keys()), found.fetchall()
        except library.exc.SQLAlchemyError as error:
            raise DataError(f"{path}: the database refuses the query: {_plain(error, url)}") from None
    if len(set(names)) < len(names):
        raise DataError(f"{path}: the query returns two columns of the same name; rename one (AS)")
    rows = [tuple(map(_value, row)) for row in rows]
    if not is_ordered(query):
        rows = sorted(rows, key=lambda row: tuple(map(repr, row)))
    return {str(name): column_of([row[place] for row in rows]) for place, name in enumerate(names)}


@contextmanager
def _connected(url: Any, file: Path, library: Any) -> Iterator[Any]:
    """A connection in a transaction that only reads, and is rolled back."""
    try:
        engine = library.create_engine(url, poolclass=library.pool.NullPool)
        with engine.connect() as connection:
            order = _READ_ONLY.get(engine.dialect.name, "")
            if order:
                connection.exec_driver_sql(order)
            if "SESSION" in order:  # it counts from the next transaction on, and PostgreSQL forgets it with this one
                connection.commit()
            yield connection
            connection.rollback()
    except (library.exc.SQLAlchemyError, ImportError, ValueError) as error:  # the last: of an option of the url
        raise DataError(f"{file}: no connection to {_shown(url)}: {_plain(error, url)}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} cannot be read: it must be UTF-8 ({error.reason} at byte {error.start})") from None


def _url(file: Path, library: Any) -> Any:
    """The address of the database; a file of SQLite is looked for beside, and is not created."""
    told = _told(file)
    given = str(os.environ.get(str(told["variable"]), "") if "variable" in told else told["url"])
    if not given:
        raise DataError(f"{file}: the environment variable {told['variable']} is empty; it should hold the url")
    try:
        url = library.engine.make_url(given)
    except (library.exc.ArgumentError, ValueError):  # its text would show the password
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


def _shown(url: Any) -> str:
    """An address without its password and its options: any of these may hold one, under any name (``odbc_connect``)."""
    return str(url.set(query={}).render_as_string(hide_password=True))


def _value(value: Any) -> Any:
    """A value as it is sorted and read. Decimals without a fraction are whole numbers, as in the database: a label of
    the type numeric(1) is a class. Bytes are compared by their content, not by their place in memory."""
    if isinstance(value, memoryview):
        return bytes(value)
    if not isinstance(value, Decimal):
        return value
    return int(value) if value.as_tuple().exponent == 0 and abs(value) < _WHOLE else float(value)


def _plain(error: Exception, url: Any) -> str:
    """The database's own words, without the query, the advice of SQLAlchemy and what may be a secret of the url."""
    words = " ".join(str(getattr(error, "orig", None) or error).split())
    options = [
        (name, one) for name, found in url.query.items() for one in ((found,) if isinstance(found, str) else found)
    ]
    secrets = [one for name, one in options if _SECRET.search(name) or _SECRET.search(one)]
    for secret in filter(None, (url.password, *secrets)):
        words = words.replace(str(secret), "***")
    return words[:300]

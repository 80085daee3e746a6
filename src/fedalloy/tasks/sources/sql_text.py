"""Whether a text is one SELECT, and in which order its rows come: read as the database reads it, without connecting.

Databases differ in where a quote or a comment ends, so a statement that looks harmless to one can end in another's
middle. In PostgreSQL ``E'\\''`` is one string; elsewhere its last quote begins a string, in which the rest of the text
would be hidden.
"""

from __future__ import annotations

import re

from fedalloy.core.errors import DataError

_STANDARD = r"""--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]"""
_DOLLARS = r"\$(\w*)\$.*?\$\1\$"
_POSTGRESQL = rf"""--[^\n]*|/\*.*?\*/|\be'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|"(?:[^"]|"")*"|{_DOLLARS}"""
_MYSQL = r"""--(?=\s|$)[^\n]*|\#[^\n]*|/\*.*?\*/|'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*"|`[^`]*`"""
# In the order in which they are tried: what is in quotes or in a comment is no word of the statement.
_QUOTED = {
    database: re.compile(pattern, re.DOTALL | re.IGNORECASE)
    for database, pattern in (
        ("", f"{_STANDARD}|{_DOLLARS}"),
        ("sqlite", _STANDARD),
        ("mssql", _STANDARD),
        ("postgresql", _POSTGRESQL),
        ("mysql", _MYSQL),
        ("mariadb", _MYSQL),
    )
}
_WRITES = frozenset(
    ("insert", "update", "delete", "merge", "upsert", "drop", "alter", "create", "truncate", "grant", "revoke", "call",
     "exec", "execute", "into", "copy", "attach", "detach", "pragma", "vacuum", "load", "handler", "do")
)  # fmt: skip


def check_query(text: str, where: str, database: str = "") -> str:
    """The one SELECT of a text; anything else is refused. ``database`` is SQLAlchemy's name of it, as in the url.

    >>> check_query("SELECT age, y FROM visits WHERE note <> 'delete me';", "visits.sql")
    "SELECT age, y FROM visits WHERE note <> 'delete me'"
    """
    query = text.strip().removesuffix(";").strip()
    _check_comments(query, where, database)
    bare = _bare(query, database)
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


def _check_comments(query: str, where: str, database: str) -> None:
    """Refuse comments that some databases end elsewhere (nested ones) or execute (MySQL: ``/*! ... */``)."""
    for found in _quoted(database).finditer(query):
        comment = found.group()
        if comment.startswith("/*") and ("/*" in comment[2:] or re.match(r"/\*M?!", comment)):
            raise DataError(f"{where} has a comment that databases read in different ways: {comment[:40]}; remove it")


def is_ordered(query: str) -> bool:
    """Whether a query says the order of its rows. Without that a database may return them in another one each time,
    and examples are split into parts by their places.

    >>> [is_ordered(f"SELECT a FROM t{end}") for end in (" ORDER BY a", "", " WHERE a IN (SELECT b FROM u ORDER BY b)")]
    [True, False, False]
    """
    bare, before = _bare(query), None
    while bare != before:
        bare, before = re.sub(r"\([^()]*\)", " ", bare), bare
    return re.search(r"\border\s+by\b", bare, re.IGNORECASE) is not None


def _bare(query: str, database: str = "") -> str:
    """A query without what is in quotes or in comments."""
    return _quoted(database).sub(" '' ", query)


def _quoted(database: str) -> re.Pattern[str]:
    return _QUOTED.get(database, _QUOTED[""])

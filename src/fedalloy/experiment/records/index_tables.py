"""The tables of an index: checked, rebuilt if damaged, in memory if they cannot be written."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np

Connection = sqlite3.Connection
Floats = np.ndarray[Any, np.dtype[np.float64]]
FILE = "index.sqlite"
FORMAT = 1
_TABLES = """
CREATE TABLE streams(name TEXT PRIMARY KEY, done INTEGER NOT NULL, mark BLOB NOT NULL);
INSERT INTO streams VALUES ('rounds', 0, x''), ('clients', 0, x''), ('timings', 0, x'');
CREATE TABLE columns(name TEXT PRIMARY KEY, id INTEGER NOT NULL);
CREATE TABLE rounds(n INTEGER PRIMARY KEY, round INTEGER, start INTEGER, length INTEGER, numbers BLOB);
CREATE TABLE clients(n INTEGER PRIMARY KEY, round INTEGER, model TEXT, mix REAL, start INTEGER, length INTEGER);
CREATE INDEX clients_by_round ON clients(round);
CREATE TABLE timings(n INTEGER PRIMARY KEY, round INTEGER, seconds REAL);
CREATE TABLE events(n INTEGER PRIMARY KEY AUTOINCREMENT, round INTEGER, client INTEGER, text TEXT);
CREATE TABLE reasons(text TEXT PRIMARY KEY, times INTEGER);
CREATE TABLE blobs(name TEXT PRIMARY KEY, data BLOB);
"""


def open_tables(path: Path) -> Connection:
    """The tables in a file that is locked for this process, or in memory."""
    if not path.is_symlink():  # a symlink could make us write anywhere
        for _ in range(2):
            try:
                return _usable(path)
            except sqlite3.OperationalError:  # read-only, or another process has it
                break
            except sqlite3.DatabaseError:  # damaged, or of another version
                with contextlib.suppress(OSError):
                    path.unlink()
    return _prepared(sqlite3.connect(":memory:", check_same_thread=False))


def _usable(path: Path) -> Connection:
    """Open and check; every problem raises an sqlite3 error."""
    tables = sqlite3.connect(path, timeout=0.2, check_same_thread=False)
    try:
        # One writer, because its memory must match the file. No syncing: after a power failure the check below finds a
        # damaged file, and it is rebuilt.
        tables.execute("PRAGMA locking_mode = EXCLUSIVE")
        tables.execute("PRAGMA synchronous = OFF")
        if tables.execute("PRAGMA quick_check").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("damaged")
        tables.execute("BEGIN EXCLUSIVE")
        tables.rollback()
        version = tables.execute("PRAGMA user_version").fetchone()[0]
        if version == FORMAT:
            return tables
        if version or tables.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
            raise sqlite3.DatabaseError("another version, or not an index at all")
        return _prepared(tables)
    except BaseException:
        tables.close()
        raise


def _prepared(tables: Connection) -> Connection:
    tables.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {FORMAT}; COMMIT;")
    return tables

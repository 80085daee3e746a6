"""A PostgreSQL server for tests: in a folder of its own, on loopback, ended and forgotten afterwards."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedalloy.flower.programs import free_port

OWNER, PASSWORD = "owner", "owner-secret"
_PLACES = "/usr/lib/postgresql/*/bin/initdb"  # Debian's, which is not on the path


def missing() -> str:
    """What is missing to run one here; empty if nothing is."""
    if not _programs():
        return "needs PostgreSQL's programs (Debian: postgresql)"
    if importlib.util.find_spec("psycopg") is None:
        return "needs the driver psycopg (pip install 'psycopg[binary]')"
    return "" if os.geteuid() or _user() else "runs as root, and there is no user 'postgres': the server refuses root"


def _programs() -> Path | None:
    found = shutil.which("initdb")
    places = [Path(found)] if found else sorted(Path("/").glob(_PLACES.removeprefix("/")))
    return places[-1].resolve().parent if places else None


def _user() -> str | None:
    import pwd

    names = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in ("postgres", "nobody") if name in names), None)


@dataclass
class Postgres:
    """A running server."""

    folder: Path
    port: int

    def url(self, user: str = OWNER, password: str = PASSWORD, driver: str = "+psycopg") -> str:
        """The address of its database, as SQLAlchemy writes it."""
        return f"postgresql{driver}://{user}:{password}@127.0.0.1:{self.port}/postgres"

    def do(self, text: str) -> list[Any]:
        """Execute statements as the owner; the rows of a query."""
        import psycopg

        with psycopg.connect(self.url(driver=""), autocommit=True) as connection:
            found = connection.execute(text.encode())
            return found.fetchall() if found.description else []

    def start(self) -> None:
        options = f"-c listen_addresses=127.0.0.1 -p {self.port} -c unix_socket_directories='' -c fsync=off"
        self._run("pg_ctl", "-w", "-o", options, "-l", str(self.folder / "log"), "-D", str(self.data), "start")

    def stop(self) -> None:
        """Like a power failure: connections are cut."""
        self._run("pg_ctl", "-m", "immediate", "-D", str(self.data), "stop")

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def make(self) -> None:
        secret = self.folder / "secret"
        secret.write_text(PASSWORD)
        self._run("initdb", "-U", OWNER, "-A", "scram-sha-256", "--pwfile", str(secret), "--no-sync", "-E", "UTF8",
                  "--locale=C", "-D", str(self.data))  # fmt: skip

    def _run(self, program: str, *words: str) -> None:
        places = _programs()
        assert places is not None
        user = None if os.geteuid() else _user()
        with (self.folder / "said").open("ab") as said:
            done = subprocess.run(
                [places / program, *words], user=user, cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=said, stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
        assert done.returncode == 0, (self.folder / "said").read_text(errors="replace")


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A server with an empty database."""
    with tempfile.TemporaryDirectory(prefix="postgres-", ignore_cleanup_errors=True) as place:
        os.chmod(place, 0o755 if os.geteuid() else 0o777)
        server = Postgres(Path(place), free_port())
        server.make()
        server.start()
        try:
            yield server
        finally:
            if (server.data / "postmaster.pid").exists():
                server.stop()

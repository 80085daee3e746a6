"""The status of a federation: programs, registered nodes, the progress of a run, and drop-outs with their reasons."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from fedalloy.core.errors import SpecError
from fedalloy.experiment.records.reading import is_run, read_run
from fedalloy.flower.admission import entries
from fedalloy.flower.flwr_cli import FlwrCli
from fedalloy.flower.layout import SERVER_FILE, ServerPlace
from fedalloy.flower.operations import answers, found, front_answers
from fedalloy.flower.pki import expires

_TROUBLES = 10
"""How many problems of the latest rounds are shown."""


@dataclass(frozen=True)
class Known:
    """A registered node."""

    name: str
    number: str
    status: str
    since: str


@dataclass(frozen=True)
class Server:
    """A server: its address for nodes, and whether SuperLink and front answer."""

    address: str
    answers: bool
    open: bool
    certificate_ends: datetime | None
    nodes: tuple[Known, ...] = ()
    runs: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Progress:
    """The progress of a run, from its folder."""

    folder: Path
    state: str
    round: int
    reason: str
    troubles: tuple[tuple[int, str, str], ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        troubles = [{"round": round, "client": client, "reason": why} for round, client, why in self.troubles]
        return {"folder": str(self.folder), "state": self.state, "round": self.round, "troubles": troubles}


def look(folder: Path) -> tuple[Server | None, Progress | None]:
    """The server and the run that belong to a folder: a server's folder, a federation, or a run on a federation."""
    server = _server_folder(folder)
    run = folder if is_run(folder) else folder.parent if is_run(folder.parent) and server else None
    if server is None and run is None:
        raise SpecError(
            f"{folder} is not a folder of a federation: name one that 'fedalloy flower init' or 'up' wrote, a server's "
            "folder, or a run folder"
        )
    return (_look_at(server) if server else None), (progress(run) if run else None)


def progress(folder: Path) -> Progress:
    """The progress of a run and its problems, latest rounds last."""
    record = read_run(folder)
    troubles: list[tuple[int, str, str]] = []
    for row in record.rounds():
        reasons = {**row.get("dropped", {}), **row.get("failures", {})}
        silent = [str(client) for client in row.get("absent", []) if str(client) not in reasons]
        troubles += [(row["round"], client, why) for client, why in reasons.items()]
        troubles += [(row["round"], client, "was not connected, or sent nothing") for client in silent]
    status = record.status
    state, reason = str(status.get("state", "unknown")), str(status.get("reason", ""))
    return Progress(folder, state, record.last_round, reason, tuple(troubles[-_TROUBLES:]))


def _server_folder(folder: Path) -> Path | None:
    places = (folder, folder / "server", folder / "federation" / "server")
    return next((place for place in places if (place / SERVER_FILE).is_file()), None)


def _look_at(folder: Path) -> Server:
    place = found(folder)
    certificate = place.files.certificate
    ends = expires(certificate) if place.secure and certificate.exists() else None
    if not answers(place):
        return Server(place.door, False, False, ends)
    cli, reached = FlwrCli(place), not place.secure or front_answers(place)
    try:
        return Server(place.door, True, reached, ends, _nodes(place, cli), tuple(cli.runs()))
    finally:
        cli.close()


def _nodes(place: ServerPlace, cli: FlwrCli) -> tuple[Known, ...]:
    """The admitted nodes; without keys nodes have no names."""
    names = {one.number: one.name or "?" for one in entries(place)}
    known = [
        Known(names.get(number, "?"), number, str(one["status"]), str(one["online-at"]))
        for number, one in cli.nodes().items()
    ]
    return tuple(sorted(known, key=lambda one: (one.name, one.number)))

"""The status of a federation: what is known about its server, its nodes and its runs, and since when.

Everything is read: from Flower's database, the front's list of contacts, the folders of runs. Nothing is asked of
Flower, and nothing is written, so a look at a federation costs little and cannot disturb it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedalloy.core.errors import FedalloyError, SpecError
from fedalloy.experiment.records.reading import is_run, read_status
from fedalloy.flower.contacts import Contact, in_words, read_contacts
from fedalloy.flower.database import GONE, RunEntry, entries, run_entries
from fedalloy.flower.layout import RUNNING, SERVER_FILE, ServerPlace
from fedalloy.flower.members import former_names
from fedalloy.flower.node_registry import identity_of
from fedalloy.flower.operations import answers, found, front_answers
from fedalloy.flower.pki import expires
from fedalloy.flower.programs import alive
from fedalloy.flower.progress import WAITING, Progress, is_paused, progress

SILENT = 30.0
"""Seconds without a request after which a node that Flower counts as connected is called silent: it asks for work every
few seconds, and reports every 25 s while it works."""
_SOON = 60.0
"""Days before the end of a certificate from which it is a warning."""
_SHORT_OF_DISK = 1.0
"""Gigabytes of free disk below which it is a warning."""
UNREADABLE = "unreadable"
"""The state of a run whose files are damaged."""
BROKEN = ("failed", "interrupted")
"""The states of a run that broke off."""
_LATELY = 300.0
"""Seconds for which a key that is not admitted, and two processes with one key, are a warning."""
OK, WARNING, CRITICAL = 0, 1, 2
"""Exit codes, as monitoring systems read them."""


@dataclass(frozen=True)
class Known:
    """A node: ``state`` is connected, silent, not connected or never connected, ``since`` when (seconds since 1970).
    A node that was refused has the ``refusal`` and when that was; one without a name is not admitted, and ``former`` is
    the node whose key it had before. ``twice`` is when two processes last used its key at the same time. ``version`` is
    its version of fedalloy, as it said when it joined."""

    name: str
    number: str
    state: str
    since: float | None = None
    last_contact: float | None = None
    refusal: str = ""
    refused: float | None = None
    address: str = ""
    version: str = ""
    former: str = ""
    twice: float | None = None

    @property
    def title(self) -> str:
        """What it is called."""
        return self.name or (f"{self.former} (a former key)" if self.former else self.number)


@dataclass(frozen=True)
class Server:
    """A server: its address for nodes, whether SuperLink and front answer, its nodes and runs, its certificates by the
    day they end, and its free disk in gigabytes. ``starter`` is the process of an ``up`` that is gone, ``trouble`` why
    not everything could be read."""

    folder: Path
    address: str
    answers: bool
    open: bool
    nodes: tuple[Known, ...] = ()
    runs: tuple[RunEntry, ...] = ()
    certificates: Mapping[str, datetime] | None = None
    free: float = 0.0
    versions: Mapping[str, str] | None = None
    starter: int | None = None
    trouble: str = ""

    @property
    def certificate_ends(self) -> datetime | None:
        """When the first certificate ends."""
        return min((self.certificates or {}).values(), default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values; times are seconds since 1970."""
        ends = self.certificate_ends
        return {
            "folder": str(self.folder), "address": self.address, "running": self.answers, "open": self.open,
            "nodes": [asdict(one) for one in self.nodes],
            "runs": [{"id": one.number, "state": one.state, "since": one.since,
                      "folder": str(one.folder) if one.folder else None} for one in self.runs],
            "certificate_ends": ends.isoformat() if ends else None, "free_gigabytes": self.free,
            "versions": dict(self.versions or {}),
        }  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """Something that an operator should know: a warning, or critical."""

    level: int
    text: str


@dataclass(frozen=True)
class Overview:
    """What is known about a federation at a moment; ``of_run`` if it was asked about a run, not about a server."""

    server: Server | None
    runs: tuple[Progress, ...]
    at: float
    of_run: bool = False

    def findings(self) -> list[Finding]:
        """What is wrong, the worst first. A run that is finished needs no server."""
        over = self.of_run and self.runs[0].state == "finished"
        found = _about_server(self.server, self.at) if self.server and not over else []
        return sorted([*found, *_about_runs(self.runs)], key=lambda one: -one.level)

    @property
    def code(self) -> int:
        """The exit code for monitoring."""
        return max((one.level for one in self.findings()), default=OK)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        words = {WARNING: "warning", CRITICAL: "critical"}
        return {
            "server": self.server.to_json() if self.server else None,
            "run": self.runs[0].to_json() if self.runs else None,
            "runs": [run.to_json() for run in self.runs],
            "findings": [{"level": words[one.level], "text": one.text} for one in self.findings()],
            "at": self.at,
        }


def unknown(why: str) -> dict[str, Any]:
    """The plain values of an overview where nothing is known."""
    findings = [{"level": "critical", "text": why}]
    return {"server": None, "run": None, "runs": [], "findings": findings, "at": time.time()}


def look(folder: Path, now: float | None = None) -> Overview:
    """The server and the runs that belong to a folder: a server's folder, a federation, or a run on a federation. For a
    server these are the unfinished and the paused runs, or the newest one if there are none, and those beside them that
    broke off."""
    at = time.time() if now is None else now
    place = _server_folder(folder)
    run = folder if is_run(folder) else folder.parent if is_run(folder.parent) and place else None
    if place is None and run is None:
        raise SpecError(
            f"{folder} is not a folder of a federation: name one that 'fedalloy flower init' or 'up' wrote, a server's "
            "folder, or a run folder"
        )
    server = _look_at(place, at) if place else None
    folders = [run] if run else _run_folders(server) if server else []
    return Overview(server, tuple(_progress(one, at) for one in folders), at, run is not None)


def _progress(folder: Path, now: float) -> Progress:
    """The progress of a run; one whose files cannot be read does not hide the others."""
    try:
        return progress(folder, now)
    except (FedalloyError, OSError) as error:
        return Progress(folder, UNREADABLE, 0, None, str(error))


def _server_folder(folder: Path) -> Path | None:
    places = (folder, folder / "server", folder / "federation" / "server")
    return next((place for place in places if (place / SERVER_FILE).is_file()), None)


def _run_folders(server: Server) -> list[Path]:
    """The folders of the unfinished and the paused runs, which may be older than one that has ended; else of the newest
    one. And of runs that broke off beside these: a study that goes on must not hide that another one does not."""
    sessions: dict[Path, list[RunEntry]] = {}
    for one in server.runs:
        if one.folder and is_run(one.folder):
            sessions.setdefault(one.folder, []).append(one)
    states = {folder: _state(folder) for folder in sessions}
    going = [run for run in sessions if states[run] == "paused" or not all(one.over for one in sessions[run])]
    shown = going or list(sessions)[:1]
    begun = min((one.begun or 0.0 for run in shown for one in sessions[run]), default=0.0)
    broken = (run for run in sessions if states[run] in BROKEN and (sessions[run][0].since or 0.0) >= begun)
    return list(dict.fromkeys((*shown, *broken)))


def _state(folder: Path) -> str:
    """The state of a run; it is :func:`progress` that says why one cannot be read."""
    try:
        state = str(read_status(folder)["state"])
    except (FedalloyError, OSError):
        return UNREADABLE
    return "paused" if is_paused(folder, state) else state


def _look_at(folder: Path, now: float) -> Server:
    place = found(folder)
    running = answers(place)
    server = Server(
        place.folder, place.door, running, running and (not place.secure or front_answers(place)),
        free=shutil.disk_usage(place.folder).free / 1e9, versions=_versions(), starter=_gone_starter(place),
    )  # fmt: skip
    try:
        if place.secure:
            files = (place.files.certificate, place.files.ca_certificate)
            server = replace(server, certificates={file.name: expires(file) for file in files if file.is_file()})
        return replace(server, nodes=_nodes(place, running, now), runs=tuple(run_entries(place)))
    except (FedalloyError, OSError, ValueError) as error:
        return replace(server, trouble=str(error))


def _nodes(place: ServerPlace, running: bool, now: float) -> tuple[Known, ...]:
    """The admitted nodes, and then those that were refused because they are not."""
    contacts = read_contacts(place.folder)
    known = [one for one in entries(place, now) if one.status != GONE]
    nodes = []
    for one in sorted(known, key=lambda one: (one.name, one.number)):
        contact = contacts.pop(identity_of(one.key), None) or Contact("")
        online = running and one.status == "online"
        silent = contact.last_contact is not None and now - contact.last_contact > SILENT
        state = "silent" if online and silent else "connected" if online else "not connected"
        since = contact.last_contact if state == "silent" else one.since
        if one.status == "registered":
            state, since = "never connected", None
        nodes.append(_known(one.name or "?", one.number, state, since, contact))
    strangers = [one for one in contacts.values() if one.reason and not one.name]
    former = former_names(place)
    unnamed = (
        replace(_known("", one.key, "not admitted", None, one), former=former.get(one.key, "")) for one in strangers
    )
    return (*nodes, *unnamed)


def _known(name: str, number: str, state: str, since: float | None, contact: Contact) -> Known:
    refusal = in_words(contact.reason) if contact.reason else ""
    when = contact.refused if refusal else None
    return Known(name, number, state, since, contact.last_contact, refusal, when, contact.address, contact.version,
                 twice=contact.twice)  # fmt: skip


def _gone_starter(place: ServerPlace) -> int | None:
    """The process of an ``up`` that ended without cleaning up."""
    try:
        known = json.loads((place.folder / RUNNING).read_text(encoding="utf-8"))
        pid = int(known["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if alive(pid, known.get("born", "")) else pid


def _versions() -> dict[str, str]:
    versions = {}
    for package in ("fedalloy", "flwr"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return versions


def _about_server(server: Server, now: float) -> list[Finding]:
    found = []
    if not server.answers:
        gone = f"; the command that started it (process {server.starter}) is gone" if server.starter else ""
        found.append(Finding(CRITICAL, f"the server is not running{gone}"))
    elif not server.open:
        found.append(Finding(CRITICAL, "nodes cannot reach the server: its front does not answer"))
    if server.trouble:
        found.append(Finding(CRITICAL, f"not everything about the server can be read: {server.trouble}"))
    admitted = [node for node in server.nodes if node.name]
    there = [node for node in admitted if node.state == "connected"]
    if server.answers and admitted and not there:
        found.append(Finding(CRITICAL, "no node is connected"))
    elif server.answers and len(there) < len(admitted):
        absent = ", ".join(f"{node.name} ({node.state})" for node in admitted if node not in there)
        found.append(Finding(WARNING, f"{len(admitted) - len(there)} of {len(admitted)} nodes are missing: {absent}"))
    found += [Finding(WARNING, f"{node.title} was refused: {node.refusal}")
              for node in server.nodes if _is_out(node, now)]  # fmt: skip
    found += [Finding(WARNING, f"two processes use the key of {node.name} at the same time, the last time "
                      f"{now - node.twice:.0f} s ago: its folder was copied and started twice; end one of them")
              for node in admitted if node.twice is not None and now - node.twice < _LATELY]  # fmt: skip
    ours = (server.versions or {}).get("fedalloy", "")
    found += [Finding(WARNING, f"{node.name} has fedalloy {node.version}, the server {ours}: runs refuse it until both "
                      "have the same version")
              for node in admitted if node.version not in ("", ours)]  # fmt: skip
    for name, end in (server.certificates or {}).items():
        days = (end - datetime.fromtimestamp(now, UTC)).total_seconds() / 86_400
        if days < _SOON:
            level = CRITICAL if days <= 0 else WARNING
            what = f"expired on {end:%Y-%m-%d}" if days <= 0 else f"expires in {days:.0f} days, on {end:%Y-%m-%d}"
            found.append(Finding(level, f"the certificate {name} {what}; new ones: fedalloy flower renew"))
    if server.free < _SHORT_OF_DISK:
        found.append(Finding(WARNING, f"only {server.free:.1f} GB of disk are free in {server.folder}"))
    return found


def _is_out(node: Known, now: float) -> bool:
    """Whether a node was refused and is not in. A key that is not admitted and asks no more is no node's: it was
    replaced."""
    asks = bool(node.name) or now - (node.refused or 0.0) < _LATELY
    return bool(node.refusal) and node.state != "connected" and asks


def _about_runs(runs: tuple[Progress, ...]) -> list[Finding]:
    found = []
    for run in runs:
        if run.state == UNREADABLE:
            found.append(Finding(CRITICAL, f"the run in {run.folder} cannot be read: {run.reason}"))
        elif run.state in BROKEN:
            why = f": {run.reason}" if run.reason else ""
            found.append(Finding(CRITICAL, f"the run in {run.folder} is {run.state} after round {run.round}{why}"))
        elif run.state == "running" and run.missing:
            absent = ", ".join(f"{one.name} ({one.reason})" for one in run.missing)
            found.append(Finding(WARNING, f"round {run.round} of the run in {run.folder} went on without {absent}"))
        if run.state == "running" and run.news.startswith(WAITING):
            found.append(Finding(WARNING, f"the run in {run.folder} has no next round yet: {run.news}"))
    return found

"""The metrics of a server: what ``fedalloy flower status`` says about it, its nodes and its runs, as numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedalloy.flower.prometheus import EXPIRY, Measurement, Restarts, common, plain

if TYPE_CHECKING:
    from fedalloy.flower.progress import Progress
    from fedalloy.flower.status import Overview, Server


def server_metrics(folder: Path, restarts: Restarts = dict, now: float | None = None) -> Iterator[Measurement]:
    """What is known about a server, its nodes and its runs."""
    from fedalloy.flower.status import look  # with torch, which a service without metrics does not need

    seen = look(folder, now)
    yield plain("fedalloy_status", "0 all is well, 1 a warning, 2 critical: the exit code of 'status'", seen.code)
    yield from common(restarts)
    if seen.server:
        yield from _of_server(seen.server)
    yield from _of_runs(seen)


def _of_server(server: Server) -> Iterator[Measurement]:
    nodes = [node for node in server.nodes if node.name]
    yield plain("fedalloy_server_up", "whether the SuperLink answers", server.answers)
    yield plain("fedalloy_front_up", "whether nodes can reach the server", server.open)
    connected = {(node.name,): float(node.state == "connected") for node in nodes}
    yield Measurement("fedalloy_node_connected", "whether a node is connected, and not silent", ("node",), connected)
    contacts = {(node.name,): node.last_contact for node in nodes if node.last_contact is not None}
    yield Measurement(
        "fedalloy_node_last_contact_timestamp_seconds", "the last contact with a node", ("node",), contacts
    )
    refused = {(node.name or node.number, node.refusal): 1.0 for node in server.nodes if node.refusal}
    yield Measurement("fedalloy_node_refused", "a node that is refused, and why", ("node", "reason"), refused)
    versions = {(node.name, node.version): 1.0 for node in nodes if node.version}
    yield Measurement("fedalloy_node_version_info", "the version of fedalloy at a node", ("node", "fedalloy"), versions)
    ends = {(name,): end.timestamp() for name, end in (server.certificates or {}).items()}
    yield Measurement(EXPIRY, "when a certificate expires", ("certificate",), ends)
    yield plain("fedalloy_disk_free_bytes", "free disk in the server's folder", server.free * 1e9)


def _of_runs(seen: Overview) -> Iterator[Measurement]:
    names = _names([run.folder for run in seen.runs])

    def each(name: str, text: str, value: Callable[[Progress], float | None]) -> Measurement:
        found = {(names[run.folder],): value(run) for run in seen.runs}
        return Measurement(name, text, ("run",), {labels: one for labels, one in found.items() if one is not None})

    yield each("fedalloy_run_running", "whether a run is going on", lambda run: float(run.state == "running"))
    yield each("fedalloy_run_round", "the last finished round", lambda run: run.round)
    yield each("fedalloy_run_rounds", "the rounds of the run", lambda run: run.rounds)
    yield each("fedalloy_run_round_seconds", "the time of a recent round", lambda run: run.seconds)
    yield each("fedalloy_run_quiet_seconds", "the time since anything was recorded", lambda run: run.quiet)
    parts = {
        (names[run.folder], one.name): float(one.state == "in")
        for run in seen.runs
        for one in run.clients
        if one.state != "not asked"
    }
    text = "whether a site that was asked contributed to the last round"
    yield Measurement("fedalloy_run_contributed", text, ("run", "node"), parts)


def _names(folders: Sequence[Path]) -> dict[Path, str]:
    """Runs by the names of their folders, and by whole paths where two have the same name.

    >>> _names([Path("one/study"), Path("two/study"), Path("two/other")])
    {PosixPath('one/study'): 'one/study', PosixPath('two/study'): 'two/study', PosixPath('two/other'): 'other'}
    """
    common = Counter(folder.name for folder in folders)
    return {folder: folder.name if common[folder.name] == 1 else str(folder) for folder in folders}

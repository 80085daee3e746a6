"""What is logged about a site: by the server in the folders of its runs, by the front, and by the node itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

from fedalloy.core.errors import SpecError, nearest
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.layout import NODE_FILE, NodePlace, ServerPlace
from fedalloy.flower.prefork.worker import LOG
from fedalloy.flower.status import Overview, look
from fedalloy.results.clients import client_name


def site_log(folder: Path, site: str = "") -> list[str]:
    """The log of a node's folder; or what a server knows about a site, or without one about all."""
    if (folder / NODE_FILE).is_file():
        return _of_node(NodePlace.read(folder, trial=True), site)
    seen = look(folder)
    _check(seen, site)
    found = [line for run in seen.runs for line in _of_run(run.folder, site)]
    for place in _beside(folder, site):
        found += [f"{place.name}: {line}" for line in _lines(place)]
    return [*found, *_refusals(seen, site)]


def _of_node(place: NodePlace, site: str) -> list[str]:
    """A node's own log; it knows nothing about others."""
    if site not in ("", place.name):
        raise SpecError(
            f"{place.folder} is the folder of the node '{place.name}', which knows nothing about '{site}'; name a "
            "server's folder or a run"
        )
    return _lines(place.config.store / LOG)


def _check(seen: Overview, site: str) -> None:
    known = {node.name for node in seen.server.nodes if node.name} if seen.server else set[str]()
    known |= {file.stem for file in ServerPlace.read(seen.server.folder).node_keys} if seen.server else set()
    known |= {node.former for node in seen.server.nodes if node.former} if seen.server else set()
    known |= {client.name for run in seen.runs for client in run.clients}
    if site and site not in known:
        raise SpecError(f"there is no site '{site}'; {nearest(site, sorted(known))}")


def _of_run(folder: Path, site: str) -> Iterator[str]:
    """The lines of a run's log about a site, and the rounds that it missed."""
    # A name is a whole word: 'north' is not in a line about 'northwest'.
    named = re.compile(rf"(?<![\w.-]){re.escape(site)}(?![\w-]|\.\w)")
    yield from (line for line in _lines(folder / "federation.log") if not site or named.search(line))
    record = read_run(folder)
    for row in record.rounds():
        for client, why in row["dropped"].items():
            name = client_name(record.manifest or {}, int(client))
            if site in ("", name):
                yield f"round {row['round']}: {name} was dropped: {why}"


def _beside(folder: Path, site: str) -> list[Path]:
    """The logs of the nodes themselves, in a trial on one machine."""
    places = (folder / "federation" / "logs", folder / "logs", folder.parent / "logs")
    return [place / f"{site}.log" for place in places if site and (place / f"{site}.log").is_file()]


def _refusals(seen: Overview, site: str) -> Iterable[str]:
    nodes = seen.server.nodes if seen.server else ()
    for node in nodes:
        if node.refused and site in ("", node.name, node.former):
            yield f"{datetime.fromtimestamp(node.refused):%Y-%m-%d %H:%M:%S} {node.title} was refused: {node.refusal}"


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []

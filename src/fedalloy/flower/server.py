"""The ServerApp, the same for every run: the ordinary driver, with the engine for nodes."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedalloy.core.arguments import build
from fedalloy.core.errors import FedalloyError, RunLocked, SpecError
from fedalloy.experiment.driver import Ending, RoundEvent, run
from fedalloy.experiment.interrupt import BY_SIGNAL
from fedalloy.experiment.recipe import Experiment, load, parse, resolve
from fedalloy.experiment.records import atomic
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.lock import in_turn
from fedalloy.experiment.records.reading import read_json
from fedalloy.flower.admission import read_seats
from fedalloy.flower.config import ServerConfig
from fedalloy.flower.connection import Connection
from fedalloy.flower.engine import FederationError, Flower
from fedalloy.flower.node_registry import NodeRegistry, Seat, site_names
from fedalloy.flower.protocol.header import signed
from fedalloy.flower.remote_task import RemoteTask, remote_task
from fedalloy.flower.session import ServerSession
from fedalloy.flower.submission import with_engine
from fedalloy.flower.transport import Transport

app = ServerApp()
log = logging.getLogger("flwr")
Say = Callable[[str], None]
SERVER_GONE = "the server ended while the run was going on, or ended the run"
"""The reason in the status of such a run; a stop on request has another one."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the recipe that the run's keys name; the same command again continues where it stopped."""
    config = ServerConfig.read(context.run_config)
    seats = (lambda: read_seats() or ()) if read_seats() is not None else None
    ending = run_federation(config, grid, say=lambda text: log.info("%s", text), seats=seats)
    if ending.status == "interrupted":
        signal.raise_signal(signal.SIGINT)  # to Flower, which counts the run as failed and ends this process
    if ending.status not in ("finished", "stopped"):
        raise FederationError(f"the run is {ending.status}: {ending.reason}")


def run_federation(
    config: ServerConfig, grid: Grid, *, say: Say = print, transport: Transport | None = None,
    seats: Callable[[], Sequence[Seat]] | None = None,
) -> Ending:  # fmt: skip
    """A run over the nodes of ``grid``, from its beginning or from the last checkpoint in its folder; ``seats`` map
    keys to clients, otherwise the first node that claims to be a client is bound to it. If another process still writes
    the run, this waits for it and then continues."""
    config.folder.mkdir(parents=True, exist_ok=True)
    tell = _told(config.folder, say)
    try:
        return in_turn(config.folder, lambda: _sit(config, transport or Transport(grid), tell, seats), tell)
    except FedalloyError as error:
        tell(f"ended with an error: {error}")
        raise


def _sit(config: ServerConfig, transport: Transport, tell: Say, seats: Callable[[], Sequence[Seat]] | None) -> Ending:
    """One session of a run."""
    experiment = _experiment(config)
    task = remote_task(parse(experiment.resolved))
    if seats is not None:
        task = replace(task, sites=site_names(task.clients, seats()))
        _rename(config.folder, task.names)
    session = ServerSession.open(config.folder)
    engine: Flower = build(Flower, experiment.config.engine_options, "engine 'flower'")
    keeper = Bindings(config.bindings or config.folder / "bindings.json")
    registry = NodeRegistry(task.clients, keeper.read(), keeper.write, seats=seats)
    engine.attach(Connection(transport, registry, _header(experiment, task, session), tell))
    # A node keeps the states before and after its last round: the server must not go back further than that.
    settings = replace(experiment.config, engine=engine, engine_options={}, checkpoint_every=0.0)
    verb = "begins" if session.number == 1 else f"continues (session {session.number})"
    tell(f"run {session.run} {verb} in {config.folder.resolve()} with the clients {', '.join(task.names)}")

    def follow(event: RoundEvent) -> None:
        names = registry.sites or task.names  # a site may have been admitted since the session began
        _rename(config.folder, names)
        tell(_line(event, names))

    ending, _ = run(
        experiment.algorithm,
        task,
        settings,
        folder=config.folder,
        resume=True,
        recipe=experiment.resolved,
        watcher=follow,
    )
    if ending.status == "stopped" and ending.reason.startswith(BY_SIGNAL):
        ending = _interrupted(config.folder, ending)
    tell(f"{ending.status} after round {ending.progress.round}{f': {ending.reason}' if ending.reason else ''}")
    return ending


def _interrupted(folder: Path, ending: Ending) -> Ending:
    """The ending by a signal, which is no operator's request: Flower sends one when its server is gone."""
    made = RunFolder.open(folder)
    with contextlib.suppress(RunLocked), made.lock():  # locked: another session continues it already
        made.set_status("interrupted", ending.progress.round, SERVER_GONE)
    return replace(ending, status="interrupted", reason=SERVER_GONE)


@dataclass(frozen=True)
class Bindings:
    """The file that records which node is which client; an operator may remove lines from it."""

    path: Path

    def read(self) -> dict[str, str]:
        """All bindings, client by client."""
        if not self.path.exists():
            return {}
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return {str(client): str(node) for client, node in found.items()}
        except (ValueError, AttributeError) as error:
            raise SpecError(f"{self.path} is not a JSON object of clients and nodes: {error}") from None

    def write(self, bound: Mapping[str, str]) -> None:
        """Write the bindings; those that another run has added are kept."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(self.path, json.dumps({**self.read(), **bound}, indent=2, sort_keys=True) + "\n")


def _rename(folder: Path, names: Sequence[str]) -> None:
    """Put the names of today into the records of a run that was begun before: a site may have been admitted since."""
    file = folder / "manifest.json"
    if not file.exists():
        return
    kept = read_json(file) or {}
    if kept.get("names") not in (None, list(names)):
        atomic.write_text(file, json.dumps({**kept, "names": list(names)}, indent=2) + "\n")


def _experiment(config: ServerConfig) -> Experiment:
    """The recipe with its engine filled in; the driver refuses a folder that holds another run."""
    return resolve(with_engine(load(config.recipe)), config.seed)


def _header(experiment: Experiment, task: RemoteTask, session: ServerSession) -> dict[str, Any]:
    """The common header of a run's orders."""
    return signed(
        run=session.run,
        sitting=session.number,
        seed=experiment.config.seed,
        population=task.population,
        task=task.spec,
    )


def _told(folder: Path, say: Say) -> Say:
    """Report texts, and append them to the log in the run folder."""

    def tell(text: str) -> None:
        say(f"fedalloy: {text}")
        with (folder / "federation.log").open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    return tell


def _line(event: RoundEvent, names: Sequence[str]) -> str:
    """A round in a line."""
    row = event.row
    who = ", ".join(names[client] for client in row["ids"])
    lost = "; ".join(f"{names[int(client)]}: {why}" for client, why in row["dropped"].items())
    loss = f", training loss {row['train_loss']:.4g}" if row["train_loss"] is not None else ""
    return f"round {row['round']}/{event.rounds}: {who}{loss}{f' (without {lost})' if lost else ''}"

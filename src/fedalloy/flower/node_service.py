"""``fedalloy flower node``: a node that is looked after until the operator ends it.

The node's program asks until the server lets it in (:mod:`fedalloy.flower.knock`) and is started again whenever it
ends: Flower's node gives up, without an error, when its server refuses it. A lock ensures that there is one node per
folder, so that what an earlier one has left can be ended before its successor is signed on.
"""

from __future__ import annotations

import hashlib
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from fedalloy.core.errors import RunLocked, SpecError
from fedalloy.experiment.records.lock import holder, locked
from fedalloy.flower import prefork
from fedalloy.flower.config import FROM_RECIPE
from fedalloy.flower.layout import NodePlace
from fedalloy.flower.prefork import SUPEREXEC
from fedalloy.flower.programs import TOKEN, Program, end_all, environment, supernode
from fedalloy.flower.prometheus import NodeMetrics, serving
from fedalloy.flower.service_log import ServiceLog
from fedalloy.flower.signals import EndRequest
from fedalloy.flower.supervision import HelperWatch, Lost, of_this_service

_LOOK = 1.0
"""Seconds between two looks at the processes."""
_PAUSES = (1.0, 30.0)
"""Seconds before the node is started again: at first, and at most."""
_LASTED = 60.0
"""A node that ran for so long did not fail to start."""
_TRIES = 5
"""Starts in a row that may fail before the server was asked."""


def keep_running(folder: Path, log: ServiceLog, metrics: int | None = None) -> int:
    """Run the node of a folder until a signal; the exit code. Refused while another process runs it."""
    place = NodePlace.read(folder)
    check_startable(place)
    place.config.store.mkdir(parents=True, exist_ok=True)
    lock = place.config.store / "node.lock"
    try:
        with locked(lock), EndRequest() as request:
            node = NodeProcesses(place, log, request)
            with serving(metrics, NodeMetrics(place, node.is_running, node.restarts)):
                return node.run()
    except RunLocked:
        raise SpecError(
            f"the node in {folder} is running already (process {holder(lock)}); end that one first, or leave it"
        ) from None
    finally:
        log.close()


def check_startable(place: NodePlace) -> None:
    """Refuse what cannot work before anything is started."""
    for file in (place.authority, place.key) if place.secure else ():
        if not file.is_file():
            raise SpecError(f"{file} does not exist; see README.md in the node's folder")
    data = place.config.data
    if data != FROM_RECIPE and ":" not in data and not Path(data).exists():
        raise SpecError(f"{data} does not exist; 'data' in node.toml names this site's folder, file or function")


@dataclass
class NodeProcesses:
    """The processes of a node, and the log to which they write."""

    place: NodePlace
    log: ServiceLog
    request: EndRequest
    launcher: prefork.Launcher = field(default_factory=prefork.launcher)
    _failed: int = 0
    _program: Program | None = None
    _restarts: dict[str, int] = field(default_factory=lambda: {"node": 0, SUPEREXEC: 0})

    def run(self) -> int:
        """Start the node, and start it again when it ends, until the operator ends it; the exit code."""
        end_all(self.token)  # what a killed predecessor has left
        config = self.place.config
        self.log.say(f"node {self.place.name}: client {config.client}, server {self.place.server}, data {config.data}")
        pause = _PAUSES[0]
        try:
            while not self.request:
                begun = time.time()
                why = self._once()
                if not self.request:
                    self._restarts["node"] += 1
                    pause = min(_PAUSES[1], 2 * pause) if self._count(begun, why) else _PAUSES[0]
                    self.log.say(f"{why}; starting again in {pause:.0f} s")
                    self.request.wait(pause)
        except Lost as error:
            self.log.say(f"the node ends: {error}")
            return 1
        return self.request.code

    def is_running(self) -> bool:
        """Whether the node's program runs now."""
        return self._program is not None and self._program.running

    def restarts(self) -> dict[str, int]:
        """How often each process was started again."""
        return dict(self._restarts)

    @property
    def token(self) -> str:
        """Marks the processes of this node, to find them all: some are in sessions of their own."""
        return f"node-{hashlib.sha256(str(self.place.folder.resolve()).encode()).hexdigest()[:16]}"

    def _once(self) -> str:
        """Run the node until it ends or is to end; why it ended. Nothing of it is left."""
        folder = self.place.home / "processes"
        marks = {TOKEN: self.token, **of_this_service(), **HelperWatch.variables(folder)}
        variables = environment(self.launcher, self.place.home, marks)
        out = self.log.stream("supernode")
        watch = HelperWatch(folder, f"node {self.place.name}", variables, self.log.say, out=out)
        command = supernode(self.launcher, self.place, patient=True)
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, start_new_session=True, stdout=out, stderr=out
        )
        node = self._program = Program("node", process, Path())
        try:
            while node.running and not self.request.wait(_LOOK):
                watch.look()
            return f"the node's program ended with exit code {process.returncode}"
        except Lost as error:
            return str(error)
        finally:
            node.stop()
            # What is left has nothing to finish: what a node stores is written atomically.
            end_all(self.token, at_once=True)
            watch.stop()
            self._restarts[SUPEREXEC] += watch.deaths.total

    def _count(self, begun: float, why: str) -> int:
        """How many times in a row the program ended before the server let it in; :class:`Lost` after several."""
        file = self.place.number_file
        let_in = file.exists() and file.stat().st_mtime >= begun
        self._failed = 0 if let_in or time.time() - begun > _LASTED else self._failed + 1
        if self._failed >= _TRIES:
            raise Lost(f"it failed {self._failed} times to start ({why}; its output is above)")
        return self._failed

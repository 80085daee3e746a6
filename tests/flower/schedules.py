"""Faults on the transport in memory, drawn from a seed: messages and answers that are lost, delayed, delivered twice or
after newer ones, nodes that are away, a server that is killed at any of its requests, and servers and nodes that are
killed before or after anything they write.

``python -m tests.flower.schedules --count 1000`` plays so many schedules and says how long that took. What a schedule
costs is the reading of data, the training and the waiting for disks: here the data are a few examples, a round is one
step, clocks are not real ones, and nothing is synced.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import json
import logging
import multiprocessing
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from flwr.app import Message

from fedalloy.experiment.recipe import load, parse, resolve
from fedalloy.experiment.records import atomic, checkpoint
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.node.answer import respond
from fedalloy.testing.replay import replay
from tests.flower import fake, shares
from tests.flower.fake import FakeClock, FakeGrid, federation, play, recipe_file

ALGORITHMS = ("scaffold", "fedavg", "superfed_lm", "aaggff_s")
ROUNDS, SESSIONS = 4, 60
_REPLAYED = ("round", "ids", "dropped", "absent")
HANGS = 60.0
"""Seconds after which a schedule that has not ended says where it is, and is over."""


class Killed(KeyboardInterrupt):
    """The server's process ends here."""


class NodeKilled(KeyboardInterrupt):
    """The node's process ends here."""


@dataclass
class FaultyGrid(FakeGrid):
    """A grid on which everything goes wrong that can, with these chances at every step."""

    random: Random = field(default_factory=lambda: Random(0))
    lost: float = 0.08
    slow: float = 0.3
    twice: float = 0.1
    away: float = 0.04
    killed: float = 0.02
    killed_writing: float = 0.01
    node_killed: float = 0.02
    calm: bool = False
    in_node: bool = False
    only: int = 0
    points: int = 0
    ready: dict[str, Message] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)

    def get_nodes(self) -> list[Any]:
        self._step()
        for node in self.nodes.values():
            node.online = node.online or self.random.random() < 0.5
            if self._happens("away"):
                node.online, node.since = False, str(self.random.random())
        return super().get_nodes()

    def push_messages(self, messages: Any) -> list[str]:
        self._step()
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Any) -> list[Message]:
        """Deliver some of all messages under way, those of earlier orders too; return some of the answers asked for."""
        self._step()
        waiting = list(self.waiting.items())
        self.random.shuffle(waiting)
        for number, message in waiting:
            if self._happens("slow"):
                continue
            if not self._happens("twice"):
                del self.waiting[number]
            if not self._happens("lost"):
                self._deliver(number, message)
        there = [number for number in message_ids if number in self.ready and not self._happens("slow")]
        self.random.shuffle(there)
        return [self.ready.pop(number) for number in there]

    def _deliver(self, number: str, message: Message) -> None:
        node = self.nodes[message.metadata.dst_node_id]
        self.in_node = True
        try:
            content = respond(message.content, node.config, fake._make_task)
        except NodeKilled:
            node.since = str(self.random.random())
            return
        finally:
            self.in_node = False
        if not self._happens("lost"):
            self.ready[number] = Message(content, reply_to=message)

    def write(self, path: Path, fill: Callable[[Path], None]) -> None:
        """A file is written, by the server or by a node, which may be killed before it or after it."""
        kind, ends = ("node_killed", NodeKilled) if self.in_node else ("killed_writing", Killed)
        if self._happens(kind):
            raise ends
        draft = path.with_name(f".{path.name}.draft")
        fill(draft)
        draft.replace(path)
        if self._happens(kind):
            raise ends

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Everything that is written atomically passes here; nothing waits for a disk."""
        places: list[tuple[Any, str, Any]]
        places = [(atomic, "write_atomically", self.write), (checkpoint, "write_atomically", self.write)]
        places.append((atomic, "sync", lambda path: None))
        kept = [getattr(module, name) for module, name, _ in places]
        try:
            for module, name, instead in places:
                setattr(module, name, instead)
            yield
        finally:
            for (module, name, _), own in zip(places, kept, strict=True):
                setattr(module, name, own)

    def _step(self) -> None:
        if self._happens("killed"):
            raise Killed

    def _happens(self, what: str) -> bool:
        """By chance; or, where ``only`` one thing is to happen, whether this is the point at which a process ends."""
        if self.only:
            self.points += "killed" in what
            happened = "killed" in what and self.points == self.only
        else:
            happened = not self.calm and self.random.random() < getattr(self, what)
        self.faults[what] += happened
        return happened


@dataclass(frozen=True)
class Played:
    """A study that was played to its end: how its rounds went, and how far it is from the simulation."""

    rows: list[dict[str, Any]]
    sessions: int
    distance: float
    faults: Counter[str]


def play_schedule(place: Path, seed: int) -> Played:
    """Run a study under the faults of a seed; a server that is killed is started again, by the same command."""
    random = Random(seed)
    engine = {"minimum": random.choice((1, 2, 3)), "fraction": random.choice((0.5, 1.0))}
    grid = FaultyGrid(federation(place).nodes, random=random)
    return _studied(place, ALGORITHMS[seed % len(ALGORITHMS)], engine, grid)


def play_point(place: Path, algorithm: str, point: int) -> Played | None:
    """Run a study in which one process is killed once: at its ``point``-th request or write, before it or after it;
    None if there are fewer."""
    grid = FaultyGrid(federation(place).nodes, only=point)
    played = _studied(place, algorithm, {"minimum": 3}, grid)
    return played if grid.points >= point else None


def _studied(place: Path, algorithm: str, engine: dict[str, Any], grid: FaultyGrid) -> Played:
    """A study over a grid, and the same recomputed from its records."""
    engine = {"deadline": 3.0, "wait": 1e6, **engine}
    tables: dict[str, dict[str, Any]] = shares.tables(3) | {
        "run": {"rounds": ROUNDS, "seeds": [7]},
        "evaluate": {"every": 1000, "clients": 1},
    }
    tables["task"]["model"] = "logistic"
    # One local step in a round: what matters is which state it starts from.
    recipe = recipe_file(place, algorithm, engine=engine, algorithm={"batch_size": 2000}, **tables)
    recipe.write_text(recipe.read_text().replace('kind = "dirichlet"\n', "").replace("alpha = 0.5\n", ""))
    for client, node in enumerate(grid.nodes.values()):
        node.config["fedalloy-data"] = str(data() / f"node-{client}")
    with grid.writing():
        ending, sessions = _play(recipe, place, grid)
    rows = list(read_run(place / "run").rounds())
    task = {**tables["task"], "dataset": {"kind": "folder", "path": str(data() / "all")}}
    wanted = _recomputed(recipe, task, json.dumps([{name: row[name] for name in _REPLAYED} for row in rows]))
    return Played(rows, sessions, _distance(ending.state["shared"], wanted), grid.faults)


def _recomputed(recipe: Path, task: dict[str, Any], rows: str) -> Any:
    """The shared parts at the end of the recorded rounds, in a simulation."""
    told = load(recipe).model_dump(exclude_none=True) | {"engine": {"kind": "loop"}, "task": task, "partition": {}}
    return _replayed(json.dumps(told), rows)


@functools.lru_cache(maxsize=1000)
def _replayed(recipe: str, rows: str) -> Any:
    return replay(resolve(parse(json.loads(recipe))), json.loads(rows)).state["shared"]


def _play(recipe: Path, place: Path, grid: FaultyGrid) -> tuple[Any, int]:
    """The study from its beginning to its end, and how many sessions that took."""
    sessions = 0
    while True:
        sessions += 1
        grid.calm = sessions > SESSIONS  # whatever happened, it must be able to end
        with contextlib.suppress(Killed):
            return play(recipe, place / "run", grid, FakeClock()), sessions


@functools.cache
def data() -> Path:
    """The examples of the clients, and of all of them together, as long as this process lives."""
    folder = Path(tempfile.mkdtemp(dir=_memory()))
    for client in range(3):
        shares.write_share(folder / f"node-{client}", client)
        shares.write_share(folder / "all", client)
    multiprocessing.util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=0)
    return folder


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def check(played: Played, seed: int) -> None:
    """Every round is there once, nobody is in and out at the same time, and the models are those of the rounds that
    counted: recomputed in a simulation from the records."""
    assert [row["round"] for row in played.rows] == list(range(1, ROUNDS + 1)), seed
    for row in played.rows:
        assert row["ids"], seed
        assert not {str(client) for client in row["ids"]} & row["dropped"].keys(), seed
        assert len(row["ids"]) + len(row["dropped"]) == 3, seed
        assert not row.get("lagging"), (seed, row["lagging"])
    assert played.distance < 1e-5, (seed, played.distance)


def _distance(found: Any, wanted: Any) -> float:
    leaves = [(part, name) for part in wanted for name in wanted[part]]
    apart = [(found[part][name].double() - wanted[part][name].double()).abs().max() for part, name in leaves]
    return float(torch.stack(apart).max())


def play_checked(seed: int) -> tuple[int, Counter[str]]:
    """Play a schedule in a folder of its own, and check it: the sessions it took and its faults."""
    logging.disable(logging.CRITICAL)
    faulthandler.dump_traceback_later(HANGS, exit=True)
    with tempfile.TemporaryDirectory(dir=_memory()) as place:
        played = play_schedule(Path(place), seed)
    faulthandler.cancel_dump_traceback_later()
    check(played, seed)
    return played.sessions, played.faults


def main() -> None:
    """Play many schedules."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=1000)
    options.add_argument("--first", type=int, default=0)
    options.add_argument("--workers", type=int, default=2)
    chosen = options.parse_args()
    begun, faults, sessions = time.monotonic(), Counter[str](), 0
    seeds = range(chosen.first, chosen.first + chosen.count)
    with ProcessPoolExecutor(chosen.workers, multiprocessing.get_context("spawn")) as pool:
        for some, found in pool.map(play_checked, seeds, chunksize=10):
            faults, sessions = faults + found, sessions + some
    spent = time.monotonic() - begun
    print(f"{chosen.count} schedules in {spent:.0f} s, {sessions} sessions, faults: {dict(faults)}")


if __name__ == "__main__":
    main()

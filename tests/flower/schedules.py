"""Faults on the transport in memory, drawn from a seed: messages and answers that are lost, delayed, delivered twice or
after newer ones, nodes that are away, and a server that is killed at any of its requests.

``python -m tests.flower.schedules --count 1000`` plays so many schedules and says how long that took.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from flwr.app import Message

from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.node.answer import respond
from tests.flower import fake
from tests.flower.fake import FakeClock, FakeGrid, federation, play, recipe_file
from tests.flower.test_federation import simulated

ALGORITHMS = ("scaffold", "fedavg", "superfed_lm")
ROUNDS, SESSIONS = 4, 60


class Killed(KeyboardInterrupt):
    """The server's process ends here."""


@dataclass
class FaultyGrid(FakeGrid):
    """A grid on which everything goes wrong that can, with these chances at every step."""

    random: Random = field(default_factory=lambda: Random(0))
    lost: float = 0.08
    slow: float = 0.3
    twice: float = 0.1
    away: float = 0.04
    killed: float = 0.02
    calm: bool = False
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
        content = respond(message.content, node.config, fake._make_task)
        if not self._happens("lost"):
            self.ready[number] = Message(content, reply_to=message)

    def _step(self) -> None:
        if self._happens("killed"):
            raise Killed

    def _happens(self, what: str) -> bool:
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
    algorithm = ALGORITHMS[seed % len(ALGORITHMS)]
    engine: dict[str, Any] = {"deadline": 3.0, "minimum": random.choice((1, 2, 3)), "wait": 1e6}
    engine["fraction"] = random.choice((0.5, 1.0))
    tables: dict[str, dict[str, Any]] = {
        "run": {"rounds": ROUNDS, "seeds": [7]},
        "evaluate": {"every": 1000, "clients": 1},
    }
    # One local step in a round: what matters is which state it starts from.
    recipe = recipe_file(place, algorithm, engine=engine, algorithm={"batch_size": 2000}, **tables)
    grid = FaultyGrid(federation(place).nodes, random=random)
    sessions = 0
    while True:
        sessions += 1
        grid.calm = sessions > SESSIONS  # whatever happened, it must be able to end
        try:
            ending = play(recipe, place / "run", grid, FakeClock())
            break
        except Killed:
            continue
    rows = list(read_run(place / "run").rounds())
    cohorts = {"kind": "list", "cohorts": [row["ids"] for row in rows]}
    wanted = simulated(recipe, sampling=cohorts)[0].state["shared"]
    return Played(rows, sessions, _distance(ending.state["shared"], wanted), grid.faults)


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


def main() -> None:
    """Play many schedules."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--count", type=int, default=1000)
    options.add_argument("--first", type=int, default=0)
    chosen = options.parse_args()
    begun, faults, sessions = time.monotonic(), Counter[str](), 0
    for seed in range(chosen.first, chosen.first + chosen.count):
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
            played = play_schedule(Path(place), seed)
        check(played, seed)
        faults, sessions = faults + played.faults, sessions + played.sessions
    spent = time.monotonic() - begun
    print(f"{chosen.count} schedules in {spent:.0f} s, {sessions} sessions, faults: {dict(faults)}")


if __name__ == "__main__":
    main()

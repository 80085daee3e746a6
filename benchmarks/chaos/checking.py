"""What must hold at the end: every round is recorded once, and model and states are those that the records make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.chaos.services import NODES
from fedalloy.experiment.recipe import load, parse, resolve
from fedalloy.experiment.records import checkpoint
from fedalloy.experiment.records.reading import read_json, read_run
from fedalloy.testing.replay import replay

TOLERANCE = 1e-5


@dataclass
class Verdict:
    """What was found about a study; ``problems`` is empty if everything holds."""

    name: str
    rounds: int = 0
    sessions: int = 0
    missing: int = 0
    distance: float = float("nan")
    states: int = 0
    state_distance: float = 0.0
    problems: list[str] = field(default_factory=list)


class Folders(Protocol):
    """What is read of a federation: where it is, and the folders of its nodes."""

    @property
    def place(self) -> Path:
        """Its folder."""
        ...

    def folder(self, node: int) -> Path:
        """The folder of a node."""
        ...


def judge(federation: Folders, name: str, recipe: Path, folder: Path) -> Verdict:
    """Check one study."""
    found = Verdict(name)
    record = read_run(folder)
    rows, status = list(record.rounds()), record.status
    found.rounds, found.missing = len(rows), sum(NODES - len(row["ids"]) for row in rows)
    found.sessions = 1 + (folder / "federation.log").read_text(encoding="utf-8").count(" continues (session ")
    if status["state"] != "finished":
        found.problems.append(f"the study is {status['state']}: {status.get('reason', '')}")
    _check_rows(rows, int(record.recipe["run"]["rounds"]), found)
    if found.problems:
        return found
    again = folder.with_name(f"{name}-replayed")
    tables = load(recipe).model_dump(exclude_none=True)
    tables["task"]["dataset"] = {"kind": "folder", "path": str(federation.place / "all")}
    tables |= {"engine": {"kind": "loop"}, "partition": {}}
    experiment = resolve(parse(tables))
    ending = replay(experiment, rows, folder=again)
    kept = _newest(folder)
    found.distance = _distance(kept["server"]["shared"], ending.state["shared"])
    if not found.distance <= TOLERANCE:
        found.problems.append(f"the model is {found.distance:.3g} from that of the records")
    if experiment.algorithm.stateful:
        run = str((read_json(folder / "federation.json") or {})["run"])
        stores = {client: federation.folder(client) / "store" / run / str(client) for client in range(NODES)}
        check_states(stores, rows, ending.trained.states(torch.arange(NODES)), found)
    return found


def _check_rows(rows: list[dict[str, Any]], rounds: int, found: Verdict) -> None:
    if [row["round"] for row in rows] != list(range(1, rounds + 1)):
        found.problems.append(f"{len(rows)} rounds are recorded instead of 1 to {rounds}")
    for row in rows:
        both = {str(client) for client in row["ids"]} & row["dropped"].keys()
        out = {*map(int, row["dropped"]), *row["absent"]}
        if both or {*row["ids"], *out} != set(range(NODES)):
            found.problems.append(f"round {row['round']}: ids {row['ids']}, dropped {row['dropped']}")
        if row.get("lagging"):
            found.problems.append(f"round {row['round']}: a node had lost its state: {row['lagging']}")


def check_states(
    stores: Mapping[int, Path], rows: list[dict[str, Any]], wanted: Mapping[int, Any], found: Verdict
) -> None:
    """A node's state after the last round in which it counted is that of the simulation."""
    for client, store in stores.items():
        last = max((row["round"] for row in rows if client in row["ids"]), default=0)
        if not last:
            continue  # it never counted, and may keep nothing
        file, state = store / f"state-{last:06d}.safetensors", wanted[client]
        if not file.exists():
            found.problems.append(f"node-{client} does not have its state of round {last}")
            continue
        distance = _distance(checkpoint.load(file), state)
        found.states, found.state_distance = found.states + 1, max(found.state_distance, distance)
        if not distance <= TOLERANCE:
            found.problems.append(f"the state of node-{client} is {distance:.3g} from that of the records")


def _newest(folder: Path) -> dict[str, Any]:
    return dict(checkpoint.load(max((folder / "checkpoints").glob("*.safetensors"))))


def _distance(one: Any, other: Any) -> float:
    """The largest difference of any number; infinite if the names differ."""
    if isinstance(one, Mapping) or isinstance(other, Mapping):
        if not isinstance(one, Mapping) or not isinstance(other, Mapping) or one.keys() != other.keys():
            return float("inf")
        return max((_distance(one[name], other[name]) for name in one), default=0.0)
    return float((torch.as_tensor(one).double() - torch.as_tensor(other).double()).abs().max())

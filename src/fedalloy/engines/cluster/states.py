"""States of clients in a folder that all machines of a cluster reach.

A worker writes the new state of a client as a file of its own, named by client and round, before it answers; files are
never changed. A checkpoint holds the round of every client's valid state. What a round wrote therefore counts with the
checkpoint that names it: a run killed at any moment continues from exactly the states of its checkpoint. Files that no
kept checkpoint names are removed after the next one.
"""

from __future__ import annotations

import errno
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.core.types import State, Tree

_OWNER = "run.json"
_NAME = re.compile(r"(\d+)-(\d+)\.state")
_PER_FOLDER = 1000
_PART = ".part"
_NOT_THIS_FOLDER = (FileExistsError, NotADirectoryError, FileNotFoundError, PermissionError)
HELD = 3
"""Checkpoints whose states are kept: the two that a run keeps, and one that may be half written."""


@dataclass(frozen=True)
class StateFiles:
    """The files of a folder; every worker has one of these."""

    folder: Path

    def path(self, client: int, round: int) -> Path:
        """The file of one state; a thousand clients share a folder."""
        return self.folder / f"{client // _PER_FOLDER:04d}" / f"{client}-{round}.state"

    def write(self, client: int, round: int, state: State) -> None:
        """Write a state durably, under its name only when it is whole."""
        path = self.path(client, round)
        path.parent.mkdir(parents=True, exist_ok=True)
        leaves: Tree = {}
        structure = json.dumps(_without_tensors(state, leaves))
        # Not named by the process: those of several machines may have the same number.
        temporary = path.with_suffix(f".{uuid.uuid4().hex}{_PART}")
        try:
            with temporary.open("wb") as file:
                file.write(safetensors.torch.save(leaves, {"structure": structure}))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)  # on a full disk it would take what is left
            raise

    def read(self, client: int, round: int) -> State:
        """A state as it was written."""
        path = self.path(client, round)
        try:
            with safetensors.safe_open(path, "pt") as file:
                leaves = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
                state: State = _with_tensors(json.loads(file.metadata()["structure"]), leaves)
        except (OSError, ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"the state of client {client} from round {round} cannot be read ({path}: {error}): the folder "
                "'states' must be the one that the run began with, and every machine must reach it"
            ) from error
        return state

    def owner(self) -> str:
        """What the folder says about its run, which shows that it is the same folder; empty if it is not there."""
        try:
            return (self.folder / _OWNER).read_text()
        except OSError:
            return ""

    def present(self) -> Iterator[tuple[int, int]]:
        """Client and round of every state in the folder."""
        for name in self.folder.glob("*/*.state"):
            if match := _NAME.fullmatch(name.name):
                yield int(match[1]), int(match[2])

    def remove(self, client: int, round: int) -> None:
        """Delete a state that nothing names."""
        self.path(client, round).unlink(missing_ok=True)


@dataclass
class OwnedStates:
    """The folder as the driver sees it: it belongs to one run, and what no checkpoint names is removed."""

    files: StateFiles
    claimed: bool = False
    _named: list[dict[int, int]] = field(default_factory=list)
    _there: set[tuple[int, int]] = field(default_factory=set)

    def check_place(self) -> None:
        """Refuse a folder in which nothing can be written, before anything else is: a file is made and removed."""
        folder = self.files.folder
        trial = folder / f".{uuid.uuid4().hex}{_PART}"
        with _in_words(folder):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                trial.write_bytes(b"{}")
            finally:
                trial.unlink(missing_ok=True)

    def claim(self, run: str) -> None:
        """Refuse a folder with the states of another run."""
        folder, owner = self.files.folder, self.files.folder / _OWNER
        with _in_words(folder):
            self._mark(run, owner)
        found = _run_of(owner)
        if found != run:
            raise SpecError(
                f"engine 'ray': the folder states = '{folder}' holds the states of another run ({found}; this one is "
                f"{run}): give every run its own. If that run is gone, empty the folder; if it is this one and was "
                f"moved, write its new place into {owner.name}"
            )
        for left in folder.glob(f"*/*{_PART}"):  # of workers that were killed while they wrote
            left.unlink(missing_ok=True)
        self._there, self._named, self.claimed = set(self.files.present()), [], True

    def _mark(self, run: str, owner: Path) -> None:
        """Make the folder, if it is not there, and the file that says whose it is."""
        folder = owner.parent
        folder.mkdir(parents=True, exist_ok=True)
        if not owner.exists() and any(one.suffix != _PART for one in folder.iterdir()):
            raise SpecError(f"engine 'ray': the folder states = '{folder}' holds other files: choose an empty one")
        with suppress(FileExistsError), owner.open("x") as file:  # of two runs that begin together, one makes it
            try:
                file.write(json.dumps({"run": run, "id": uuid.uuid4().hex}))
                file.flush()
            except OSError:
                owner.unlink()  # on a full disk it would be nobody's
                raise

    def wrote(self, markers: Mapping[int, State]) -> None:
        """Remember what the workers wrote in a round."""
        self._there |= {(client, int(marker["round"])) for client, marker in markers.items()}

    def checkpointed(self, round: int, markers: Mapping[int, State]) -> None:
        """Remove what neither this checkpoint nor those before it name."""
        self._named = [*self._named, {client: int(one["round"]) for client, one in markers.items()}][-HELD:]
        if len(self._named) < HELD:  # a checkpoint of an earlier session may name older states
            return
        for client, written in list(self._there):
            if written <= round and not any(named.get(client) == written for named in self._named):
                self.files.remove(client, written)
                self._there.discard((client, written))

    def check(self, kept: Mapping[int, State]) -> None:
        """Refuse markers of states that are not in the folder; a state that is no marker was sent with its order."""
        markers = {(client, int(one["round"])) for client, one in kept.items() if one.keys() == {"round"}}
        if missing := sorted(markers - self._there):
            raise CheckpointError(
                f"the states of {len(missing)} clients are missing in states = '{self.files.folder}' (the first is "
                f"that of client {missing[0][0]} from round {missing[0][1]}): name the folder that the run began with, "
                "or restore its files"
            )

    def read(self, markers: Mapping[int, State]) -> dict[int, State]:
        """The states that markers stand for."""
        return {client: self.files.read(client, int(one["round"])) for client, one in markers.items()}


@contextmanager
def _in_words(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, _NOT_THIS_FOLDER) or error.errno == errno.EROFS:
            raise SpecError(
                f"engine 'ray': states = '{folder}' cannot be used ({error.strerror}): name a folder in which this "
                "machine and those of the workers may write"
            ) from error
        raise


def _run_of(owner: Path) -> str:
    try:
        return str(json.loads(owner.read_text())["run"])
    except (ValueError, TypeError, KeyError):  # another run is writing it, or was killed then
        return f"{owner.name} cannot be read: remove it if no run uses the folder"


def _without_tensors(value: Any, leaves: Tree) -> Any:
    """A nested state as JSON, in which ``{"leaf": n}`` stands for tensor ``n``."""
    if isinstance(value, Mapping):
        return {"table": {name: _without_tensors(item, leaves) for name, item in value.items()}}
    if isinstance(value, Tensor):
        leaves[str(len(leaves))] = value.detach().cpu().contiguous()
        return {"leaf": str(len(leaves) - 1)}
    if value is None or isinstance(value, bool | int | float):
        return value
    raise SpecError(f"a state holds a {type(value).__name__}: states hold tensors and plain numbers")


def _with_tensors(told: Any, leaves: Tree) -> Any:
    if not isinstance(told, dict):
        return told
    if "leaf" in told:
        return leaves[told["leaf"]]
    return {name: _with_tensors(item, leaves) for name, item in told["table"].items()}

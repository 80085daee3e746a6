"""Client states on disk, one file per client and generation; only those in use are in memory.

A *generation* is the round in which a client's state was written. Files are never changed: a new state is a new
file, and a checkpoint holds only the generation of every client. A round that was not committed has left
files that no checkpoint names; ``restore`` removes them, so that a run killed at any moment continues from
exactly the state of its checkpoint.

| moment of a kill | what is on disk | after ``restore`` |
|---|---|---|
| while a state is written | a part of a file of a later round | removed |
| between rounds, before a checkpoint | files of later rounds | removed |
| while the checkpoint is written | everything it would have named | the previous checkpoint is used |
| while old generations are deleted | some that no checkpoint names | removed once no checkpoint can need them |
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedalloy.core.errors import CheckpointError
from fedalloy.core.types import State
from fedalloy.experiment.records import atomic, checkpoint
from fedalloy.experiment.records.folder import KEPT

Generation = tuple[int, int]
"""A client and the round in which its state was written."""
_NAME = re.compile(r"(\d+)-(\d+)\.safetensors")
# A round is committed before its checkpoint is written: until then earlier checkpoints may be needed.
_HELD = KEPT + 1
_OLDER = -1


class DiskStore:
    """States in files of a folder (:class:`fedalloy.core.protocols.ClientStore`); without one, of a temporary folder
    that is removed with the store.

    States are returned on ``device``. What the last checkpoints name is never deleted. A checksum is verified when a
    file is read for the first time, unless this process wrote it.
    """

    def __init__(self, folder: Path | None = None, device: str = "cpu") -> None:
        self._folder, self._device = folder or _temporary(self), device
        self._current: dict[int, int] = {}
        self._committed: dict[int, set[Generation]] = {}
        self._unsynced: set[Generation] = set()
        self._verified: set[Generation] = set()

    def __len__(self) -> int:
        return len(self._current)

    def get(self, ids: Sequence[int]) -> dict[int, State]:
        """The known states of ``ids``, read from disk at every call."""
        known = [(client, self._current[client]) for client in ids if client in self._current]
        return {generation[0]: self._read(generation) for generation in known}

    def put(self, round: int, states: Mapping[int, State]) -> None:
        """Write the states of a round; those they replace are deleted, unless a checkpoint names them."""
        atomic.make_folder(self._folder)
        for client, state in states.items():
            checkpoint.write(self._path((client, round)), state)
            before, self._current[client] = self._current.get(client, round), round
            self._unsynced.add((client, round))
            self._verified.add((client, round))
            if before != round:
                self._forget({(client, before)})

    def commit(self, round: int) -> dict[int, State]:
        """Sync every state to disk; returns the generations, which a checkpoint holds."""
        for generation in self._unsynced:
            atomic.sync(self._path(generation))
        if self._unsynced:
            atomic.sync(self._folder)
        self._unsynced.clear()
        self._committed[round] = set(self._current.items())
        while len(self._committed) > _HELD:
            self._forget(self._committed.pop(min(self._committed)))
        return {client: {"generation": written} for client, written in sorted(self._current.items())}

    def check(self, kept: Mapping[int, State]) -> None:
        """Refuse a checkpoint that does not name generations, or whose files are missing."""
        if not all(map(is_place, kept.values())):
            raise CheckpointError(
                "this run keeps the states of its clients in memory: resume it with the client_memory_mb it began with"
            )
        missing = sorted(_places(kept) - set(self._present()))
        if missing:
            raise CheckpointError(
                f"the states of {len(missing)} clients are missing in {self._folder} (the first is "
                f"{self._path(missing[0]).name}): restore the files"
            )

    def restore(self, round: int, kept: Mapping[int, State]) -> None:
        """Go back to a committed round; files of later rounds are removed."""
        self.look(kept)
        wanted, older = _places(kept), set()
        for generation in list(self._present()):
            if generation[1] > round:
                self._path(generation).unlink()
            elif generation not in wanted:
                older.add(generation)
        for leftover in atomic.leftovers(self._folder):
            leftover.unlink()
        # The previous checkpoint may name older generations: keep them until it can no longer be needed.
        self._committed, self._unsynced, self._verified = {_OLDER: older, round: wanted}, set(), set()

    def look(self, kept: Mapping[int, State]) -> None:
        """Read what a checkpoint names and remove nothing: for readers other than the run itself."""
        self.check(kept)
        self._current = {client: place["generation"] for client, place in kept.items()}

    def _read(self, generation: Generation) -> State:
        path = self._path(generation)
        try:
            state = checkpoint.load(path, verify=generation not in self._verified)
        except CheckpointError as error:
            raise CheckpointError(
                f"the state of client {generation[0]} cannot be read ({path.name}: {error.__cause__}); restore the "
                "file, or delete the newest checkpoint and resume from the one before"
            ) from error
        self._verified.add(generation)
        found: State = placed(state, self._device)
        return found

    def _forget(self, generations: set[Generation]) -> None:
        """Delete the generations that are neither current nor named by a checkpoint."""
        for client, written in generations:
            named = any((client, written) in committed for committed in self._committed.values())
            if self._current.get(client) != written and not named:
                self._unsynced.discard((client, written))
                self._verified.discard((client, written))
                self._path((client, written)).unlink(missing_ok=True)

    def _present(self) -> Iterator[Generation]:
        names = (_NAME.fullmatch(name) for name in os.listdir(self._folder)) if self._folder.is_dir() else ()
        return ((int(match[1]), int(match[2])) for match in names if match)

    def _path(self, generation: Generation) -> Path:
        client, written = generation
        return self._folder / f"{client:07d}-{written:06d}.safetensors"


def is_place(kept: State) -> bool:
    """Whether a checkpoint holds a client's generation instead of its state."""
    return kept.keys() == {"generation"}


def placed(state: Any, device: str) -> Any:
    """A nested state with its tensors on a device."""
    if isinstance(state, dict):
        return {name: placed(value, device) for name, value in state.items()}
    return state.to(device) if isinstance(state, Tensor) else state


def _places(kept: Mapping[int, State]) -> set[Generation]:
    return {(client, place["generation"]) for client, place in kept.items() if is_place(place)}


def _temporary(owner: object) -> Path:
    """A folder that is removed with its owner, but not when the owner's copy in a forked worker is deleted."""
    folder = Path(tempfile.mkdtemp(prefix="fedalloy-clients-"))
    weakref.finalize(owner, _remove, folder, os.getpid())
    return folder


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)

"""Client states as earlier versions kept them on disk: one file per client and generation (the round in which it was
written). Only read: a run that is resumed copies them into segments (:mod:`.disk_store`)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedalloy.core.errors import CheckpointError
from fedalloy.core.types import State
from fedalloy.experiment.records import checkpoint

Generation = tuple[int, int]
"""A client and the round in which its state was written."""
_NAME = re.compile(r"(\d+)-(\d+)\.safetensors")


class OldClientFiles:
    """The files of a folder that a checkpoint names."""

    def __init__(self, folder: Path, kept: Mapping[int, State]) -> None:
        self._folder = folder
        self._current = {client: place["generation"] for client, place in kept.items() if is_place(place)}

    def get(self, ids: Sequence[int]) -> Iterator[tuple[int, int, State]]:
        """Client, round and state of those that have one."""
        for client in ids:
            if client in self._current:
                yield client, self._current[client], self._read((client, self._current[client]))

    def check(self) -> None:
        """Refuse a checkpoint whose files are missing."""
        missing = sorted(set(self._current.items()) - set(self.present()))
        if missing:
            raise CheckpointError(
                f"the states of {len(missing)} clients are missing in {self._folder} (the first is "
                f"{self.path(missing[0]).name}): restore the files"
            )

    def clients(self) -> list[int]:
        """Those that have a state."""
        return sorted(self._current)

    def present(self) -> Iterator[Generation]:
        """The files in the folder."""
        names = (_NAME.fullmatch(name) for name in os.listdir(self._folder)) if self._folder.is_dir() else ()
        return ((int(match[1]), int(match[2])) for match in names if match)

    def path(self, generation: Generation) -> Path:
        """The file of a generation."""
        client, written = generation
        return self._folder / f"{client:07d}-{written:06d}.safetensors"

    def remove(self) -> None:
        """Delete all files of this layout."""
        for generation in list(self.present()):
            self.path(generation).unlink()

    def _read(self, generation: Generation) -> State:
        path = self.path(generation)
        try:
            return checkpoint.load(path)
        except CheckpointError as error:
            raise CheckpointError(
                f"the state of client {generation[0]} cannot be read ({path.name}: {error.__cause__}); restore the "
                "file, or delete the newest checkpoint and resume from the one before"
            ) from error


def is_place(kept: State) -> bool:
    """Whether a checkpoint holds a client's generation instead of its state."""
    return kept.keys() == {"generation"}

"""A run on disk: written by one process at a time, resumable wherever it was stopped.

| file | content |
|---|---|
| ``recipe.toml`` | the resolved recipe |
| ``identity.json`` | settings, fingerprints of data and model, which a resumed run must match |
| ``environment.json`` | versions, threads, device, which way each metric is better, what was unusual about the data |
| ``manifest.json`` | the partition: sizes, class counts, digest (where one was given) |
| ``status.json`` | ``state`` (:data:`RunState`), ``round``, ``reason`` |
| ``rounds.jsonl``, ``clients.jsonl`` | one per round, per evaluation (:mod:`fedalloy.experiment.records.reading`) |
| ``evaluations/round-000010-global.parquet`` | an evaluation of many clients (:mod:`.client_tables`) |
| ``timings.jsonl`` | everything that depends on the clock; every row names its ``round`` |
| ``checkpoints/round-000123.safetensors`` | the last two (:mod:`fedalloy.experiment.records.checkpoint`) |
| ``clients/0000007.states``, ``.index`` | large states of clients, in segments (:mod:`.disk_store`) |
| ``synthetic/round-000050.safetensors`` | synthetic samples of a round (:mod:`fedalloy.experiment.records.snapshots`) |
| ``lock`` | held by the writer, names its process id and its session (:mod:`.lock`) |
| ``stop`` | asks the writer to end after its round (:mod:`.stop`); gone afterwards |
| ``index.sqlite`` | what the live page has read so far (:mod:`.index`); may be deleted at any time |

Only ``timings.jsonl``, ``environment.json`` and ``lock`` may differ between two runs of one seed. A checkpoint
therefore keeps the byte lengths of the two other streams, and timings are cut by their round.
"""

from __future__ import annotations

import errno
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, Literal, get_args

from fedalloy.core.errors import CheckpointError, SpecError, nearest
from fedalloy.core.store import Kept, StoredStates
from fedalloy.core.types import State
from fedalloy.experiment.records import atomic, checkpoint, stacked_states, toml
from fedalloy.experiment.records.client_tables import ClientTables, file_rows
from fedalloy.experiment.records.lock import locked
from fedalloy.experiment.records.reading import read_recipe, read_status, tables_of
from fedalloy.experiment.records.shapes import SAVED, any_value, fault
from fedalloy.experiment.records.stream import Stream, encode, length_through

RunState = Literal["running", "finished", "failed", "stopped", "interrupted"]
"""``failed`` would fail again; ``stopped`` was asked to end; ``interrupted`` had a cause outside the run."""
StreamName = Literal["rounds", "clients", "timings"]
KEPT = 2
_MEASURED = ("rounds", "clients")
_START_OVER = (
    "Restore what is missing and resume; or start over and lose what was done (start_over=True in Python, "
    "'fedalloy run FOLDER --resume --start-over')"
)
_STORED = {"round": int, "clients": int, "sum": str}
_NAME = re.compile(r"round-(\d+)\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to continue after ``round``, and the length of its records then."""

    round: int
    server: State
    clients: Kept
    extra: State
    lengths: dict[str, int]


def _short(path: str | Path) -> str:
    text = str(path)
    return text if len(text) <= 120 else f"{text[:60]}...{text[-40:]}"


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


class RunFolder:
    """The files of one run; all writes happen inside ``with folder.lock():``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._streams: dict[str, Stream] = {}
        self._tables = ClientTables(path)

    @staticmethod
    def create(
        path: str | Path, recipe: Mapping[str, Any], environment: Mapping[str, Any],
        manifest: Mapping[str, Any] | None = None, identity: Mapping[str, Any] | None = None,
    ) -> RunFolder:  # fmt: skip
        """Start a run in a folder that holds none; if killed half-way, it can be called again."""
        folder = RunFolder(Path(path))
        try:
            atomic.make_folder(folder._checkpoints)
        except (OSError, ValueError) as error:  # ValueError: a path with a null character
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):  # temporary
                raise
            why = getattr(error, "strerror", None) or str(error)
            raise CheckpointError(f"the run folder {_short(path)} cannot be made: {why}; choose another one") from error
        with locked(folder.path / "lock"):
            if folder._recipe.exists():
                raise CheckpointError(f"{path} holds a run already; resume it, or choose another folder")
            _write_json(folder.path / "environment.json", environment)
            if manifest is not None:
                _write_json(folder.path / "manifest.json", manifest)
            if identity is not None:
                _write_json(folder._identity, identity)
            folder._write_status("running", 0, "")
            for name in get_args(StreamName):
                (folder.path / f"{name}.jsonl").touch()
            # Last: a folder with a recipe is complete.
            atomic.write_text(folder._recipe, toml.dumps(recipe))
        return folder

    @staticmethod
    def open(path: str | Path) -> RunFolder:
        """The run that a folder holds."""
        folder = RunFolder(Path(path))
        if not folder._recipe.is_file():
            raise CheckpointError(f"{path} holds no run (no recipe.toml); start one there, or name another folder")
        return folder

    def recipe(self) -> dict[str, Any]:
        """The recipe of the run."""
        return read_recipe(self._recipe)

    def identity(self) -> dict[str, Any] | None:
        """The run's identity; None in a folder of an earlier version."""
        if not self._identity.exists():
            return None
        try:
            found = json.loads(self._identity.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        whole = isinstance(found, dict) and all(isinstance(found.get(name), dict) for name in ("run", "engine"))
        if not whole:
            raise CheckpointError(
                f"{self._identity} is damaged: restore it, or delete it to identify the run by its recipe alone"
            )
        return dict(found)

    def renew(self, recipe: Mapping[str, Any], identity: Mapping[str, Any], round: int) -> None:
        """Replace recipe and identity of a run that continues after ``round``: longer, or with another engine."""
        self._stream("rounds")
        self._write_status("running", round, "")  # first: if interrupted here, the run must not look finished
        _write_json(self._identity, identity)
        atomic.write_text(self._recipe, toml.dumps(recipe))

    @contextmanager
    def lock(self) -> Iterator[RunFolder]:
        """Be the only writer; records are always flushed at the end."""
        with ExitStack() as stack:
            stack.enter_context(locked(self.path / "lock"))
            self._tables = tables_of(self.path)
            left = (*atomic.leftovers(self.path), *atomic.leftovers(self._checkpoints), *self._tables.leftovers())
            for leftover in left:
                leftover.unlink(missing_ok=True)
            stack.callback(self._streams.clear)
            for name in get_args(StreamName):
                self._streams[name] = Stream(self.path / f"{name}.jsonl")
                stack.callback(self._streams[name].close)
            yield self

    def append(self, stream: StreamName, row: Mapping[str, Any]) -> None:
        """Add one row to ``rounds``, ``clients`` or ``timings``; it is synced by the next checkpoint."""
        to = self._stream(stream)
        to.append(self._tables.write(row) if stream == "clients" else row)

    def client_line(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """What ``clients.jsonl`` holds for a row, which may be in a file of its own."""
        return self._tables.line(row)

    def flush(self) -> None:
        """Let readers see the rows appended so far."""
        for name in get_args(StreamName):
            self._stream(name).flush()

    def set_status(self, state: RunState, round: int, reason: str = "") -> None:
        """Set the status of the run."""
        if state not in get_args(RunState):
            raise SpecError(f"unknown status '{state}'; {nearest(state, get_args(RunState))}")
        self._stream("rounds")
        self._write_status(state, round, reason)

    def checkpoint(
        self, round: int, server_state: State, client_states: Kept,
        extra: Mapping[str, Any] | None = None,
    ) -> Path:  # fmt: skip
        """Save everything up to ``round``; records first, so that a checkpoint never refers to missing rows."""
        lengths = {name: self._stream(name).sync() for name in get_args(StreamName)}
        path = self._checkpoints / f"round-{round:06d}.safetensors"
        checkpoint.save(path, {
            "round": round, "lengths": {name: lengths[name] for name in _MEASURED}, "server": server_state,
            "clients": {}, **_told(client_states), "extra": dict(extra or {}),
        })  # fmt: skip
        for _, old in self._saved()[KEPT:]:
            old.unlink()
        return path

    def latest(
        self, report: Callable[[str], None] = _warn, accept: Callable[[Checkpoint], None] = lambda _: None
    ) -> Checkpoint | None:
        """The newest intact checkpoint; ``report`` is called for every damaged one that was skipped.

        ``accept`` may refuse a checkpoint for what it refers to, by a ``CheckpointError``. Returns None for a run that
        has no checkpoint yet; if there are some, or must have been, and none can be used, that is an error.
        """
        refused = []
        for _, path in self._saved():
            try:
                found = _checkpoint(checkpoint.load(path))
                accept(found)
            except CheckpointError as error:
                refused.append(str(error))
            else:
                for message in refused:
                    report(message)
                return found
        if refused:
            raise CheckpointError(
                f"none of the {len(refused)} checkpoints in {self._checkpoints} can be used, and nothing was changed. "
                f"{_START_OVER}. Tried: {'; '.join(refused)}"
            )
        self._check_beginning()
        return None

    def _check_beginning(self) -> None:
        """Refuse to begin again without a checkpoint where there must have been one."""
        status = read_status(self.path)
        gone = not self._checkpoints.is_dir()
        if gone or (status["round"] and status["state"] in ("finished", "stopped")):
            raise CheckpointError(
                f"{self.path} has no checkpoint{'s folder' if gone else ''}, although the run reached round "
                f"{status['round']} or further; nothing was changed. {_START_OVER}"
            )

    def rewind(self, to: Checkpoint | None, instead: Mapping[str, bytes] | None = None) -> None:
        """Cut the records back to a checkpoint (to nothing for None) and delete later checkpoints.

        ``instead`` are lines that replace those of the checkpoint's round: call ``checkpoint`` afterwards.
        """
        lengths = {name: self._length_at(name, to, name in (instead or {})) for name in get_args(StreamName)}
        # First the checkpoints: if this is interrupted, none is left that refers to missing records.
        for round, path in self._saved():
            if to is None or round > to.round:
                path.unlink()
        atomic.make_folder(self._checkpoints)
        atomic.sync(self._checkpoints)
        for name, length in lengths.items():
            self._streams[name].cut(length)
            self._streams[name].write((instead or {}).get(name, b""))
        # Last: a line without its file would be damage, a file without a line is deleted by the next attempt.
        last = (instead or {}).get("clients", b"").splitlines(keepends=True)
        self._tables.forget((to.round if to else 0) - (instead is not None), but=file_rows(last))

    def check_records(self, at: Checkpoint) -> None:
        """Refuse records that are shorter than they were at a checkpoint, before anything is changed."""
        for name in _MEASURED:
            self._length_at(name, at)
        self.check_tables(at.round)

    def check_tables(self, through: int, more: bytes = b"") -> None:
        """Refuse to go on where scores of clients up to a round are missing, or those of ``more`` lines."""
        with (self.path / "clients.jsonl").open("rb") as lines:
            known = takewhile(lambda row: row["round"] <= through, file_rows(lines))
            self._tables.check(chain(known, file_rows(more.splitlines(keepends=True))))

    @property
    def clients(self) -> Path:
        """The folder of client states that are too large for a checkpoint."""
        return self.path / "clients"

    @property
    def _recipe(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def _identity(self) -> Path:
        return self.path / "identity.json"

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def _saved(self) -> list[tuple[int, Path]]:
        """The checkpoints on disk with their rounds, newest first."""
        there = self._checkpoints.iterdir() if self._checkpoints.is_dir() else ()
        named = [(_NAME.fullmatch(path.name), path) for path in there]
        return sorted(((int(match[1]), path) for match, path in named if match), reverse=True)

    def _stream(self, name: str) -> Stream:
        stream = self._streams.get(name)
        if stream is not None:
            return stream
        if name not in get_args(StreamName):
            raise SpecError(f"unknown stream '{name}'; {nearest(name, get_args(StreamName))}")
        raise CheckpointError(f"{self.path} is not open for writing; do this inside 'with folder.lock():'")

    def _length_at(self, name: str, to: Checkpoint | None, before: bool = False) -> int:
        """The length of a stream at a checkpoint, or before the rows of its round."""
        size = self._stream(name).sync()
        if to is None:
            return 0
        path = self.path / f"{name}.jsonl"
        if before:
            return length_through(path, to.round - 1)
        length = to.lengths[name] if name in _MEASURED else length_through(path, to.round)
        if length > size:
            raise CheckpointError(
                f"{path} has {size} bytes, the checkpoint of round {to.round} expects {length}: the file was "
                "changed from outside. Restore it, or start a new run in another folder"
            )
        return length

    def _write_status(self, state: RunState, round: int, reason: str) -> None:
        _write_json(self.path / "status.json", {"state": state, "round": round, "reason": reason})

    def note_interruption(self, round: int, reason: str) -> None:
        """Set the status to interrupted, on a full disk by overwriting the old status in place. If even that fails,
        readers conclude it from the free lock."""
        told = {"state": "interrupted", "round": round, "reason": reason}
        try:
            _write_json(self.path / "status.json", told)
        except OSError:
            with suppress(OSError):
                atomic.overwrite_text(self.path / "status.json", json.dumps(told) + "\n")


def _checkpoint(state: State) -> Checkpoint:
    wrong = fault(state, SAVED, any_value) or next((name for name in SAVED if name not in state), None)
    if wrong:
        raise CheckpointError(f"a checkpoint does not belong to a run: {wrong} is missing or invalid")
    clients: Kept = {int(client): mine for client, mine in state["clients"].items()}  # of an earlier version
    try:
        if "stacked" in state:
            clients = stacked_states.unpack(state["stacked"])
        if "stored" in state:
            clients = StoredStates({name: kind(state["stored"][name]) for name, kind in _STORED.items()})
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, StopIteration) as error:
        raise CheckpointError(f"a checkpoint's states of clients are invalid: {error}") from None
    return Checkpoint(state["round"], state["server"], clients, state["extra"], state["lengths"])


def _told(clients: Kept) -> State:
    """What a checkpoint says about the clients' states."""
    if isinstance(clients, StoredStates):
        return {"stored": clients.where}
    return {"stacked": stacked_states.pack(clients)} if clients else {}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    atomic.write_text(path, json.dumps(json.loads(encode(value)), indent=2) + "\n")

"""Giving a recipe to a server: the same command starts a study, follows the one that is running, or continues it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import lock_descriptor

from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.recipe import Recipe, parse, resolve
from fedalloy.experiment.records import atomic, toml
from fedalloy.experiment.records.reading import is_run, read_status
from fedalloy.flower.bundle import write_bundle
from fedalloy.flower.config import ServerConfig
from fedalloy.flower.database import run_entries
from fedalloy.flower.flwr_cli import FlwrCli, SubmittedRun
from fedalloy.flower.layout import PAUSED

Say = Callable[[str], None]
COMPLETED, ENDED = "finished:completed", "finished:stopped"
"""How a run ends by itself, and by an operator who does not wait for the round in progress."""
FOREVER = 10 * 365 * 86_400.0
WANTED = "wanted.toml"
"""The recipe in the run folder, as it was given."""
_SUBMITTING = ".submitting"
"""The lock file of a command that starts a session."""


def with_engine(recipe: Recipe) -> Recipe:
    """The recipe for a federation: its engine is the one for nodes."""
    if recipe.engine.kind == "flower":
        return recipe
    engine = {"kind": "flower", "device": recipe.engine.device}
    return parse({**recipe.model_dump(exclude_none=True), "engine": engine})


@dataclass
class Study:
    """A recipe, its run folder on the server's machine, and the server."""

    cli: FlwrCli
    recipe: Recipe
    folder: Path
    seed: int | None = None
    run: SubmittedRun | None = None

    def run_to_end(self, say: Say, look_after: Callable[[], None] = lambda: None) -> str:
        """Start the study, or follow it if it is running, and print its log until it ends; returns how it ended. A
        session that is lost while it is followed, as when the server was restarted, is followed by another."""
        resolve(with_engine(self.recipe), self.seed)  # what a run would refuse is refused here, before it is sent
        over: set[str] = set()
        while True:
            self.run, new = self.begin(say, over)
            ended = follow(self.run, self.folder, say, look_after)
            if new or ended in (COMPLETED, ENDED) or state_of(self.folder) in ("finished", "failed", "stopped"):
                return ended
            say(f"that session ended as {ended}; the run is continued")
            over.add(self.run.id)

    def begin(self, say: Say, over: Collection[str] = ()) -> tuple[SubmittedRun, bool]:
        """The unfinished session of this study on the server, not one that is ``over``, or a new one; and whether it is
        new. Of several commands at once, one starts it."""
        with self._alone():
            found = self._running(say, over)
            if found:
                return found, False
            started = self.start()
            say(f"run {started.id} was started")
            return started, True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One command after the other; a lock that ends with its process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / _SUBMITTING).open("w") as file:
            lock_descriptor(file.fileno())
            yield

    def _running(self, say: Say, over: Collection[str]) -> SubmittedRun | None:
        """The unfinished session of this study on the server."""
        place = self.folder.absolute()
        known = [one for one in run_entries(self.cli.place) if one.folder == place and one.number not in over]
        active = next((one for one in known if not one.over and not one.restored), None)
        if active is None:
            return None
        kept = place / WANTED
        if kept.exists() and kept.read_text(encoding="utf-8") != self._text:
            raise CheckpointError(
                f"another recipe is running in {self.folder} (run {active.number}); choose another folder with -o, "
                "or stop it first"
            )
        say(f"run {active.number} of this study is {active.state}; following it")
        return SubmittedRun(self.cli, active.number)

    def start(self) -> SubmittedRun:
        """Give the recipe to the server; a run that was begun before is continued."""
        place = self.folder.absolute()
        place.mkdir(parents=True, exist_ok=True)
        atomic.write_text(place / WANTED, self._text)
        bundle = write_bundle(place / "bundle")
        run = self.cli.start_run(bundle, ServerConfig(place / WANTED, place, self.seed).to_keys())
        (place / PAUSED).unlink(missing_ok=True)  # or a later 'resume' would start it again
        return run

    @property
    def _text(self) -> str:
        return toml.dumps(self.recipe.model_dump(exclude_none=True, exclude={"compare", "grid"}))


def state_of(folder: Path) -> str:
    """The state of the run in a folder; empty where there is none yet."""
    return str(read_status(folder)["state"]) if is_run(folder) else ""


def follow(run: SubmittedRun, folder: Path, say: Say, look_after: Callable[[], None] = lambda: None) -> str:
    """Print the run's log until it ends; returns how it ended. ``look_after`` is called between checks."""
    news = NewLines(folder / "federation.log")

    def meanwhile() -> None:
        news.tell(say)
        look_after()

    ended = run.wait(FOREVER, meanwhile=meanwhile)
    news.tell(say)
    return ended


@dataclass
class NewLines:
    """The lines that are added to a file from now on."""

    path: Path
    _read: int = field(init=False)

    def __post_init__(self) -> None:
        self._read = self.path.stat().st_size if self.path.exists() else 0

    def tell(self, say: Say) -> None:
        """Print every new complete line."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if line.endswith(b"\n"):
                    self._read += len(line)
                    say(line.decode("utf-8", "replace").rstrip())

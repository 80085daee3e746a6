"""``fedalloy flower up``: runs a recipe on a temporary federation on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.experiment.recipe import Recipe, parse, resolve
from fedalloy.experiment.records import atomic, toml
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.bundle import write_bundle
from fedalloy.flower.config import ServerConfig
from fedalloy.flower.flwr_cli import FlwrCli, SubmittedRun
from fedalloy.flower.local import LocalFederation
from fedalloy.flower.project_templates import FederationPlan, numbered, write_federation

Say = Callable[[str], None]
MOST_NODES = 32
"""Each node is three processes; for more nodes use a simulation."""
FOREVER = 10 * 365 * 86_400.0


@dataclass(frozen=True)
class Trial:
    """A recipe, the folder of its run, and the federation beside it: ``folder/federation`` unless another is named."""

    recipe: Recipe
    folder: Path
    nodes: tuple[str, ...]
    federation: Path
    seed: int | None = None
    secure: bool = True

    def prepare(self) -> None:
        """Write what is missing; what a run was begun with is not changed."""
        if not self.federation.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_federation(self.federation, FederationPlan(self.nodes, secure=self.secure))
        there = sorted(path.parent.name for path in (self.federation / "nodes").glob("*/node.toml"))
        if len(there) != len(self.nodes):
            raise CheckpointError(
                f"{self.federation} has {len(there)} nodes ({', '.join(there)}), and {len(self.nodes)} are wanted; "
                "choose another folder with -o, or the same number of nodes"
            )

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        if not (self.folder / "recipe.toml").exists():
            return False
        return bool(read_run(self.folder).status.get("state") == "finished")

    def run(self, say: Say) -> str:
        """Start the federation, run the recipe to its end, stop the federation; returns how the run ended."""
        self.prepare()
        say(f"starting a server and {len(self.nodes)} nodes (logs in {self.federation / 'logs'})")
        with LocalFederation.of(self.federation) as federation:
            say(f"all nodes are online at {federation.server.door}")
            run = submit(federation.cli, self.recipe, self.folder, self.seed)
            return follow(run, self.folder, say, lambda: federation.look_after(say))


def trial_of(
    recipe: Recipe, folder: Path, nodes: int | None, federation: Path | None = None, seed: int | None = None,
    secure: bool = True,
) -> Trial:  # fmt: skip
    """A trial with as many nodes as the recipe has clients, or a recipe with as many clients as there are nodes."""
    clients = recipe.partition.clients
    if nodes is None:
        nodes = clients or resolve(recipe, seed).task().population
    elif clients is not None and clients != nodes:
        recipe = _with_clients(recipe, nodes)
    if nodes > MOST_NODES:
        raise SpecError(
            f"{nodes} nodes are {3 * nodes} processes on one machine; up to {MOST_NODES} are started here. Use "
            "--nodes 3 for a trial with three clients, or simulate all of them with 'fedalloy run'"
        )
    return Trial(
        recipe, folder.absolute(), numbered(nodes), federation or folder.absolute() / "federation", seed, secure
    )


def submit(cli: FlwrCli, recipe: Recipe, folder: Path, seed: int | None) -> SubmittedRun:
    """Give a recipe to a server; its run folder is on the server's machine. The same call again continues the run."""
    place = folder.absolute()
    place.mkdir(parents=True, exist_ok=True)
    written = place / "wanted.toml"
    atomic.write_text(written, toml.dumps(recipe.model_dump(exclude_none=True, exclude={"compare", "grid"})))
    bundle = write_bundle(place / "bundle")
    return cli.start_run(bundle, ServerConfig(written, place, seed).to_keys())


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


def _with_clients(recipe: Recipe, nodes: int) -> Recipe:
    """The recipe for as many clients as there are nodes; a cohort cannot be larger than that."""
    data = recipe.model_dump(exclude_none=True)
    data["partition"]["clients"] = nodes
    cohort = recipe.sampling.cohort
    if isinstance(cohort, int) and not isinstance(cohort, bool) and cohort > nodes:
        data["sampling"]["cohort"] = nodes
    return parse(data)

"""``fedalloy flower up``: runs a recipe on a temporary federation on this machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.experiment.recipe import Recipe, parse, resolve
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.layout import RUNNING
from fedalloy.flower.local import LocalFederation
from fedalloy.flower.programs import POLL, alive
from fedalloy.flower.project_templates import FederationPlan, numbered, write_federation
from fedalloy.flower.submission import COMPLETED, NewLines, Study, state_of

Say = Callable[[str], None]
MOST_NODES = 32
"""Each node is three processes; for more nodes use a simulation."""


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
        """Start the federation, run the recipe to its end, stop the federation; returns how the run ended. If another
        process does this already, that one is followed."""
        self.prepare()
        other = running_process(self.federation / "server")
        if other is not None:
            say(f"process {other} is running this already; following it")
            return self._follow(other, say)
        say(f"starting a server and {len(self.nodes)} nodes (logs in {self.federation / 'logs'})")
        with LocalFederation.of(self.federation, mortal=True) as federation:
            say(f"all nodes are online at {federation.server.door}")
            study = Study(federation.cli, self.recipe, self.folder, self.seed)
            return study.run_to_end(say, lambda: federation.look_after(say))

    def _follow(self, process: int, say: Say) -> str:
        """Print what another process does until it ends; how its run ended."""
        news = NewLines(self.folder / "federation.log")
        while alive(process):
            news.tell(say)
            time.sleep(POLL)
        news.tell(say)
        return COMPLETED if self.finished else f"finished:{state_of(self.folder) or 'not begun'}"


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


def running_process(server: Path) -> int | None:
    """The process that runs the local federation of a server's folder."""
    try:
        known = json.loads((server / RUNNING).read_text(encoding="utf-8"))
        pid = int(known["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pid if alive(pid, known.get("born", "")) and pid != os.getpid() else None


def _with_clients(recipe: Recipe, nodes: int) -> Recipe:
    """The recipe for as many clients as there are nodes; a cohort cannot be larger than that."""
    data = recipe.model_dump(exclude_none=True)
    data["partition"]["clients"] = nodes
    cohort = recipe.sampling.cohort
    if isinstance(cohort, int) and not isinstance(cohort, bool) and cohort > nodes:
        data["sampling"]["cohort"] = nodes
    return parse(data)

"""The folder of a run: a new one, or the one that holds this very run and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import CheckpointError
from fedalloy.core.fingerprint import Plain
from fedalloy.core.protocols import Task
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.identity import disagreements
from fedalloy.experiment.lengthening import check_length
from fedalloy.experiment.records.environment import describe
from fedalloy.experiment.records.folder import RunFolder

CHANGES = "engine_changes"
"""Where a folder says after which round it continued with another engine."""
Recipe = Mapping[str, Any]


@dataclass(frozen=True)
class ClaimedRun:
    """What somebody says the run in a folder is: its identity (``short``: without defaults) and its recipe."""

    algorithm: Algorithm
    identity: Plain
    short: Plain
    recipe: Recipe


@dataclass(frozen=True)
class Consent:
    """What is allowed when a run is resumed: to lose what was done, to continue with another engine or device."""

    start_over: bool = False
    engine_change: bool = False


@dataclass(frozen=True)
class Agreement:
    """That a folder holds the run that is meant: how long it was, and what its folder says from now on."""

    there: int
    recipe: Recipe
    identity: Plain
    renewed: bool
    before: Plain | None = None

    def record_agreement(self, folder: RunFolder, round: int) -> None:
        """Write what has changed, after the checks of everything else; another engine is told with its round."""
        identity = self.identity
        if self.before is not None:
            change = {"after_round": round, "from": self.before, "to": identity["engine"]}
            identity = {**identity, CHANGES: [*identity.get(CHANGES, []), change]}
        if self.renewed:
            folder.renew(self.recipe, identity, round)


def open_folder(
    folder: str | Path, resume: bool, claim: ClaimedRun, task: Task, config: RunConfig, notices: tuple[str, ...]
) -> RunFolder:
    """The run folder: the one that is there when resuming, otherwise a new one."""
    if resume and (Path(folder) / "recipe.toml").exists():
        return RunFolder.open(folder)
    described = describe(config.device) | ({"threads": config.threads} if config.threads else {})
    described |= {"notices": list(notices)} if notices else {}
    described |= {"higher_is_better": config.directions}
    return RunFolder.create(folder, claim.recipe, described, _manifest(task), claim.identity)


def agree(folder: RunFolder, claim: ClaimedRun, consent: Consent) -> Agreement:
    """Compare what a folder holds with what is meant; whatever differs and may not is refused by its name."""
    stored, found = folder.recipe(), folder.identity()
    changes = (found or {}).pop(CHANGES, [])
    different = _different(stored, found, claim, consent.engine_change)
    if different:
        raise CheckpointError(_refusal(folder.path, stored, found, claim, different))
    here = claim.identity["run"]["rounds"]
    there = (found or stored).get("run", {}).get("rounds", here)
    if not isinstance(there, int):
        raise CheckpointError(f"{folder.path} does not say how many rounds its run has: restore its recipe.toml")
    check_length(folder.path, claim.algorithm, there, here)
    moved = found is not None and found["engine"] != claim.identity["engine"]
    identity = {**claim.identity, **({CHANGES: changes} if changes else {})}
    before = found["engine"] if found is not None and moved else None
    recipe = _renewed(stored, claim, here, engine=moved)
    return Agreement(there, recipe, identity, found is None or moved or here != there, before)


def _different(stored: Recipe, found: Plain | None, claim: ClaimedRun, engine: bool) -> list[str]:
    """Where they differ: in the recipe's words where it tells, else in those of the identity; a folder of an earlier
    version has nothing but its recipe."""
    from fedalloy.experiment.recipe.matching import ENGINE, FREE, mismatches  # which builds on runs

    named = mismatches(stored, claim.recipe, (*FREE, *(ENGINE if engine else ()))) if claim.recipe and stored else []
    if found is None:
        return named
    told = disagreements(found, claim.identity, claim.short, engine)
    # A shortened run is marked for good, whatever else is equal.
    return (named or told) if told else [one for one in named if one.startswith("run.quick ")]


def _refusal(path: Path, stored: Recipe, found: Plain | None, claim: ClaimedRun, different: list[str]) -> str:
    said = f"{path} holds another experiment ({', '.join(different)}); "
    if not _different(stored, found, claim, engine=True):
        return said + (
            "to continue with another engine or device all the same, say so (allow_engine_change=True in Python, "
            "--allow-engine-change): what it computes may differ in the last digits, and the folder will tell"
        )
    known = f" ('fedalloy run {path} --resume')" if "task" in stored else ""  # which runs begun in Python do not tell
    return said + f"resume it with what it was begun with{known}, or choose another folder"


def _renewed(stored: Recipe, claim: ClaimedRun, rounds: int, engine: bool) -> Recipe:
    """The stored recipe with what may have changed on purpose."""
    recipe = copy.deepcopy(dict(stored))
    if "run" in recipe:
        recipe["run"]["rounds"] = rounds
    if engine and "engine" in claim.recipe:
        recipe["engine"] = claim.recipe["engine"]
    if engine:
        told = claim.recipe.get("run", {})
        recipe.get("run", {}).update({name: told[name] for name in ("engine", "device") if name in told})
    return recipe


def _manifest(task: Task) -> dict[str, Any] | None:
    """The partition as a record, with the clients' names where they have some."""
    manifest, names = task.manifest, task.names
    described = manifest.to_json() if manifest else {}
    return {**described, **({"names": list(names)} if names else {})} or None

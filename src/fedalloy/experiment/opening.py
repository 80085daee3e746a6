"""The folder of a run: a new one, or one that holds exactly this run."""

from __future__ import annotations

import copy
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import CheckpointError
from fedalloy.core.fingerprint import Plain
from fedalloy.core.protocols import Task
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.describing import Described
from fedalloy.experiment.identity import disagreements
from fedalloy.experiment.lengthening import check_length
from fedalloy.experiment.records.client_tables import check_able, least_clients
from fedalloy.experiment.records.environment import describe
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.reading import GIVEN, tables_of

CHANGES = "engine_changes"
"""The entry of ``identity.json`` with the rounds after which a run continued with another engine."""
RUN_ID = "run_id"
"""The entry of ``environment.json`` that no other run has, not even one in a folder of the same name elsewhere."""
Recipe = Mapping[str, Any]


@dataclass(frozen=True)
class ClaimedRun:
    """The run that a caller wants to resume: its identity (``short``: without defaults) and its recipe."""

    algorithm: Algorithm
    identity: Plain
    short: Plain
    recipe: Recipe


@dataclass(frozen=True)
class Consent:
    """What is allowed on resuming: to lose what was done, to continue with another engine or device."""

    start_over: bool = False
    engine_change: bool = False


@dataclass(frozen=True)
class Agreement:
    """A folder that holds the requested run: how long the run was, and the new contents of the folder's files."""

    there: int
    recipe: Recipe
    identity: Plain
    renewed: bool
    before: Plain | None = None

    def record_agreement(self, folder: RunFolder, round: int) -> None:
        """Write what has changed, after all checks; another engine is recorded with its round."""
        identity = self.identity
        if self.before is not None:
            change = {"after_round": round, "from": self.before, "to": identity["engine"]}
            identity = {**identity, CHANGES: [*identity.get(CHANGES, []), change]}
        if self.renewed:
            folder.renew(self.recipe, identity, round)


def open_folder(
    folder: str | Path, resume: bool, claim: ClaimedRun, task: Task, config: RunConfig, notices: tuple[str, ...]
) -> RunFolder:
    """The run folder: the existing one when resuming, otherwise a new one."""
    scored = min(task.population, config.evaluate_clients or task.population)
    if resume and (Path(folder) / "recipe.toml").exists():
        check_able(Path(folder), tables_of(Path(folder)).least, scored)
        return RunFolder.open(folder)
    least, told = least_clients(config.parquet_from, scored)
    if told:
        warnings.warn(told, RuntimeWarning, stacklevel=2)
        notices = (*notices, told)
    described = describe(config.device) | ({"threads": config.threads} if config.threads else {})
    described |= {"notices": list(notices)} if notices else {}
    described |= {RUN_ID: uuid.uuid4().hex[:12]}
    described |= {"higher_is_better": config.directions} | ({"parquet_from": least} if least else {})
    return RunFolder.create(folder, claim.recipe, described, _manifest(task), claim.identity)


def agree(folder: RunFolder, claim: ClaimedRun, consent: Consent) -> Agreement:
    """Compare what a folder holds with the requested run; a difference that is not allowed is refused by name."""
    stored, found = folder.recipe(), folder.identity()
    changes = (found or {}).pop(CHANGES, [])
    different = _different(stored, found, claim, consent.engine_change)
    if different:
        raise CheckpointError(_refusal(folder.path, stored, found, claim, different))
    here = claim.identity["run"]["rounds"]
    there = (found or stored).get("run", {}).get("rounds", here)
    if not isinstance(there, int):
        raise CheckpointError(f"{folder.path} does not state how many rounds its run has: restore its recipe.toml")
    check_length(folder.path, claim.algorithm, there, here)
    moved = found is not None and found["engine"] != claim.identity["engine"]
    identity = {**claim.identity, **({CHANGES: changes} if changes else {})}
    before = found["engine"] if found is not None and moved else None
    recipe = _renewed(stored, claim, here, engine=moved)
    return Agreement(there, recipe, identity, found is None or moved or here != there, before)


def _different(stored: Recipe, found: Plain | None, claim: ClaimedRun, engine: bool) -> list[str]:
    """The differences, named by recipe fields where possible, else by entries of the identity; a folder of an earlier
    version has only its recipe. Recipes are read with pydantic, which ``fit`` does without."""
    if find_spec("pydantic") is None and found is not None and not stored.get("run", {}).get("quick"):
        return disagreements(found, claim.identity, claim.short, engine)
    from fedalloy.experiment.recipe.matching import ENGINE, FREE, mismatches  # imported here: it builds on runs

    free = (*FREE, *(ENGINE if engine else ()))
    named = mismatches(stored, claim.recipe, free) if claim.recipe and stored else []
    if found is None:
        return named
    told = disagreements(found, claim.identity, claim.short, engine)
    # A shortened run stays marked, even if everything else is equal.
    if told and isinstance(claim.recipe, Described):
        return told
    return (named or told) if told else [one for one in named if one.startswith("run.quick ")]


def _refusal(path: Path, stored: Recipe, found: Plain | None, claim: ClaimedRun, different: list[str]) -> str:
    said = f"{path} holds another experiment ({', '.join(different)}); "
    if not _different(stored, found, claim, engine=True):
        return said + (
            "to continue with another engine or device anyway, use allow_engine_change=True in Python or "
            "--allow-engine-change: results may differ in the last digits, and the folder records the change"
        )
    begun = stored.get("task", {}).get("dataset", GIVEN)
    known = "" if begun == GIVEN else f" ('fedalloy run {path} --resume')"
    return said + f"resume it with its original settings{known}, or choose another folder"


def _renewed(stored: Recipe, claim: ClaimedRun, rounds: int, engine: bool) -> Recipe:
    """The stored recipe with the intended changes."""
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

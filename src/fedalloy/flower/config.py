"""The configuration keys of a federation: those of a node, and those of a run.

A node's keys are in the ``--node-config`` of its SuperNode (or in a ``.toml`` file named there):

| key | meaning |
|---|---|
| ``fedalloy-client`` | which client of the recipe this node is: its name, or its number |
| ``fedalloy-data`` | its data: a folder, or a function ``package.module:function``; ``recipe`` (for trials): this
  client's share of the recipe's own data |
| ``fedalloy-store`` | a folder for what it keeps between rounds and a list of everything it has sent |
| ``fedalloy-policy`` | the policy file, which limits what is sent (:mod:`fedalloy.flower.node.policy`); default: none |
| ``fedalloy-device`` | a torch device; default: ``cpu`` |
| ``fedalloy-threads`` | threads of torch; default: torch's choice |

A run's keys are in the bundle with their defaults (:data:`RUN_DEFAULTS`) and are set by ``flwr run -c``; the files
they name are on the server's machine. Everything else about a run is in its recipe: ``[engine] kind = "flower"`` holds
the deadline, the minimum of contributions and the limits (:class:`fedalloy.flower.engine.Flower`).

| key | meaning |
|---|---|
| ``fedalloy-recipe`` | the recipe to run |
| ``fedalloy-folder`` | its run folder; if it holds the run already, the run continues from its last checkpoint |
| ``fedalloy-seed`` | the seed; -1: the recipe's first |
| ``fedalloy-bindings`` | the file that records which node is which client; empty: ``bindings.json`` in the run folder |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedalloy.core.errors import SpecError, nearest

CLIENT, DATA, STORE, POLICY = "fedalloy-client", "fedalloy-data", "fedalloy-store", "fedalloy-policy"
DEVICE, THREADS = "fedalloy-device", "fedalloy-threads"
NODE_KEYS = (CLIENT, DATA, STORE, POLICY, DEVICE, THREADS)

RECIPE, FOLDER, SEED, BINDINGS = "fedalloy-recipe", "fedalloy-folder", "fedalloy-seed", "fedalloy-bindings"
RUN_DEFAULTS: dict[str, str | int] = {RECIPE: "", FOLDER: "", SEED: -1, BINDINGS: ""}
"""Every key of a run with its default, as the bundle declares them."""

FROM_RECIPE = "recipe"
"""The value of ``fedalloy-data`` for this client's share of the recipe's own data."""

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "1048576",
}
"""Environment variables of every Flower process, set before Flower is imported: telemetry is off, and orders are polled
ten times a second instead of once. Models pass as pieces of some megabytes, in many threads: glibc would keep free ones
in arenas of every thread instead of giving them back."""


@dataclass(frozen=True)
class NodeConfig:
    """The configuration of a node."""

    client: str
    data: str
    store: Path
    policy: Path | None = None
    device: str = "cpu"
    threads: int | None = None

    @staticmethod
    def read(values: Mapping[str, Any]) -> NodeConfig:
        """The configuration in a node's keys; an error names the key.

        >>> NodeConfig.read({"fedalloy-client": 0, "fedalloy-data": "recipe", "fedalloy-store": "kept"}).client
        '0'
        """
        _check_keys(values, NODE_KEYS, "node configuration")
        for key in (CLIENT, DATA, STORE):
            if values.get(key, "") == "":
                raise SpecError(f"node configuration: '{key}' is missing; see fedalloy.flower.config for all keys")
        policy, threads = values.get(POLICY), values.get(THREADS)
        return NodeConfig(
            str(values[CLIENT]),
            str(values[DATA]),
            Path(str(values[STORE])).expanduser(),
            Path(str(policy)).expanduser() if policy else None,
            str(values.get(DEVICE, "cpu")),
            int(threads) if threads else None,
        )

    def to_keys(self) -> dict[str, str | int]:
        """The keys that :meth:`read` accepts, for writing a node's configuration."""
        keys: dict[str, str | int] = {CLIENT: self.client, DATA: self.data, STORE: str(self.store)}
        if self.policy:
            keys[POLICY] = str(self.policy)
        if self.device != "cpu":
            keys[DEVICE] = self.device
        if self.threads:
            keys[THREADS] = self.threads
        return keys


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of a run: its recipe, its folder, its seed, and the file of the nodes' identities."""

    recipe: Path
    folder: Path
    seed: int | None = None
    bindings: Path | None = None

    @staticmethod
    def read(values: Mapping[str, Any]) -> ServerConfig:
        """The settings in a run's keys; an error names the key.

        >>> ServerConfig.read({"fedalloy-recipe": "r.toml", "fedalloy-folder": "runs/r", "fedalloy-seed": -1}).seed
        """
        _check_keys(values, RUN_DEFAULTS, "run configuration")
        for key in (RECIPE, FOLDER):
            if not values.get(key):
                raise SpecError(f"run configuration: '{key}' is empty; give it with flwr run -c '{key}=\"...\"'")
        seed, bindings = int(values.get(SEED, -1)), values.get(BINDINGS)
        return ServerConfig(
            Path(str(values[RECIPE])).expanduser(),
            Path(str(values[FOLDER])).expanduser(),
            seed if seed >= 0 else None,
            Path(str(bindings)).expanduser() if bindings else None,
        )

    def to_keys(self) -> dict[str, str | int]:
        """The keys that :meth:`read` accepts."""
        seed = -1 if self.seed is None else self.seed
        bindings = str(self.bindings) if self.bindings else ""
        return {RECIPE: str(self.recipe), FOLDER: str(self.folder), SEED: seed, BINDINGS: bindings}


def as_arguments(keys: Mapping[str, str | int]) -> str:
    """Keys as one argument of ``--node-config`` or ``flwr run -c``.

    >>> as_arguments({"fedalloy-client": "north", "fedalloy-threads": 2})
    'fedalloy-client="north" fedalloy-threads=2'
    """
    for key, value in keys.items():
        if isinstance(value, str) and ('"' in value or "\\" in value or "\n" in value):
            raise SpecError(f"'{key}': {value!r} cannot be passed on; remove quotes, backslashes and line breaks")
    return " ".join(f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in keys.items())


def _check_keys(values: Mapping[str, Any], allowed: Mapping[str, Any] | tuple[str, ...], where: str) -> None:
    """Refuse misspelt keys of fedalloy; other keys are ignored."""
    for key in values:
        if key.startswith("fedalloy") and key not in allowed:
            raise SpecError(f"{where}: unknown key '{key}'; {nearest(key, allowed)}")

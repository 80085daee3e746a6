"""``fedalloy flower doctor``: everything that a node needs, checked before the first round.

Each check is one line: what was found, and what to do. A check that fails does not end the others, except those that
could say nothing after it.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from fedalloy.core.errors import FedalloyError
from fedalloy.experiment.recipe import Recipe
from fedalloy.experiment.records.lock import holder
from fedalloy.flower.config import FROM_RECIPE
from fedalloy.flower.knock import Knock, connected
from fedalloy.flower.layout import NodePlace
from fedalloy.flower.node.approval import Approvals
from fedalloy.flower.node.policy import Policy
from fedalloy.flower.reachability import OK, PROBLEM, SKIPPED, WARNING, Diagnosis, Reach
from fedalloy.flower.review import Review

_LEAST_DISK = 1e9
_TIMES_THE_MODEL = 10
"""A node keeps two states and a log; what a model needs is small beside this many times its size."""
READ_THE_README = "see README.md in the node's folder"


@dataclass
class Doctor:
    """The checks of one node's folder; with a ``recipe`` also those of the study."""

    place: NodePlace
    recipe: Recipe | None = None

    def checks(self) -> Iterator[Diagnosis]:
        """All checks, in the order in which things are needed."""
        yield self._versions()
        yield from self._files()
        yield self._disk()
        yield from self._network()
        policy = self._policy()
        yield policy[0]
        yield from self._study(policy[1]) if self.recipe and policy[1] else self._data()

    @property
    def running(self) -> int | None:
        """The process that runs this node now."""
        return holder(self.place.config.store / "node.lock")

    def _versions(self) -> Diagnosis:
        from fedalloy.flower.compatibility import advice, is_tested

        found = f"fedalloy {metadata.version('fedalloy')}, flwr {metadata.version('flwr')}"
        if not is_tested(metadata.version("flwr")):
            return Diagnosis("versions", WARNING, found, advice(metadata.version("flwr")))
        return Diagnosis("versions", OK, f"{found}; the server must have the same version of fedalloy")

    def _files(self) -> Iterator[Diagnosis]:
        key = self.place.key
        if not self.place.secure:
            yield Diagnosis(
                "key", WARNING, "this node is not encrypted and has no key", "only for tests on one machine"
            )
        elif not key.is_file():
            yield Diagnosis("key", PROBLEM, f"{key} does not exist", READ_THE_README)
        elif stat.S_IMODE(key.stat().st_mode) & 0o077 and os.name == "posix":
            yield Diagnosis("key", PROBLEM, f"{key} can be read by other users", f"chmod 600 {key}")
        else:
            yield Diagnosis("key", OK, f"{key.name} is readable by its owner only")
        yield self._own_port()

    def _own_port(self) -> Diagnosis:
        port = self.place.port
        if self.running:
            return Diagnosis("own port", OK, f"{port} is used by this node, which is running (process {self.running})")
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                return Diagnosis(
                    "own port", PROBLEM, f"{port} is taken ({error})", "choose another 'port' in node.toml"
                )
        return Diagnosis("own port", OK, f"{port} is free")

    def _disk(self) -> Diagnosis:
        store = self.place.config.store
        probe = store / ".doctor"
        try:
            store.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"1")
            probe.unlink()
        except OSError as error:
            advice = "the node keeps its states and its audit log there: make it writable for the node's user"
            return Diagnosis("disk", PROBLEM, f"{store} cannot be written ({error})", advice)
        free = shutil.disk_usage(store).free
        if free < _LEAST_DISK:
            advice = "a node that cannot write its audit log answers nothing: make room"
            return Diagnosis("disk", PROBLEM, f"{free / 1e9:.2f} GB are free in {store}", advice)
        return Diagnosis("disk", OK, f"{free / 1e9:.0f} GB are free in {store}")

    def _network(self) -> Iterator[Diagnosis]:
        if not self.place.secure:
            yield Diagnosis("server", SKIPPED, "without encryption there is nothing to check")
            return
        host, _, port = self.place.server.rpartition(":")
        found = list(Reach(host.strip("[]"), int(port), self.place.authority).checks())
        yield from found
        yield self._admitted(bool([one for one in found if one.state == PROBLEM]))

    def _admitted(self, unreachable: bool) -> Diagnosis:
        """Whether the server knows the key. A node that is running is not signed off for this."""
        if unreachable or not self.place.key.is_file():
            return Diagnosis("admitted", SKIPPED, "comes after the lines above")
        if self.running:
            return Diagnosis("admitted", SKIPPED, f"the node is running (process {self.running}); see its log")
        try:
            with connected(self.place.server, self.place.authority, self.place.key) as fleet:
                refusal = Knock(fleet, self.place.number_file, lambda text: None).ask()
        except FedalloyError as error:
            return Diagnosis("admitted", PROBLEM, str(error), READ_THE_README)
        except OSError:  # the number that the server gave cannot be kept, which 'disk' says
            return Diagnosis("admitted", OK, "the server knows this node's key")
        if refusal:
            return Diagnosis("admitted", PROBLEM, str(refusal))
        return Diagnosis("admitted", OK, "the server knows this node's key")

    def _policy(self) -> tuple[Diagnosis, Policy | None]:
        file = self.place.config.policy
        try:
            policy = Policy.read(file)
        except FedalloyError as error:
            return Diagnosis("policy", PROBLEM, str(error)), None
        if file is None:
            return Diagnosis("policy", WARNING, "none: everything is allowed", "set 'policy' in node.toml"), policy
        return Diagnosis("policy", OK, f"{file.name} can be read"), policy

    def _data(self) -> Iterator[Diagnosis]:
        """The data alone, where no study is given."""
        from fedalloy.flower.node.data import read_source

        if self.place.config.data == FROM_RECIPE:
            yield Diagnosis(
                "data", WARNING, "a share of the recipe's own data", "only for trials: set 'data' in node.toml"
            )
            return
        advice = "give the study's recipe too, to check that they fit: fedalloy flower doctor DIR RECIPE"
        yield _tried("data", lambda: _described(read_source(self.place.config.data, 0).parts), advice)

    def _study(self, policy: Policy) -> Iterator[Diagnosis]:
        """The data, the policy and the approval against the study."""
        from fedalloy.flower.node.checking import check_node

        recipe = self.recipe
        assert recipe is not None

        def step() -> str:
            made = check_node(self.place.config, recipe)
            parts = ", ".join(f"{part} {count}" for part, count in made.examples.items())
            return f"{parts} examples of shape {list(made.shape)} fit the study; one step had the loss {made.loss}"

        fitting = _tried("data", step, "make the data fit the recipe, or ask the coordinator for the right one")
        try:
            review = Review.of(recipe, models=policy.models)
        except FedalloyError as error:
            yield fitting
            yield Diagnosis("study", PROBLEM, str(error), "ask the coordinator")
            return
        objections = review.objections(policy)
        yield from () if objections and fitting.state == PROBLEM else (fitting,)
        yield self._allowed(review, objections)
        yield self._approved(review, policy)
        yield self._space(review)

    def _allowed(self, review: Review, objections: list[str]) -> Diagnosis:
        if objections:
            advice = "change policy.toml if you agree, or tell the coordinator: this node would refuse every round"
            return Diagnosis("study", PROBLEM, "; ".join(objections), advice)
        return Diagnosis("study", OK, f"the policy allows it; it sends {', '.join(review.sent)} and an update")

    def _approved(self, review: Review, policy: Policy) -> Diagnosis:
        if not policy.require_approval:
            return Diagnosis("approval", OK, "policy.toml does not require it")
        if review.study in Approvals(self.place.config.store).read():
            return Diagnosis("approval", OK, f"the study {review.study[:16]} is approved")
        advice = f"read 'fedalloy flower review', then 'fedalloy flower approve {self.place.folder} RECIPE'"
        return Diagnosis("approval", PROBLEM, f"the study {review.study[:16]} is not approved", advice)

    def _space(self, review: Review) -> Diagnosis:
        needed = _TIMES_THE_MODEL * review.bytes
        free = shutil.disk_usage(self.place.config.store).free
        found = f"{needed / 1e9:.2g} GB would do for this study's states, {free / 1e9:.0f} GB are free"
        return (
            Diagnosis("space", OK, found)
            if free > needed
            else Diagnosis("space", PROBLEM, found, "make room in the store")
        )


def examine(folder: Path, recipe: Recipe | None = None) -> list[Diagnosis]:
    """All checks of a node's folder; settings that cannot be read are the only one."""
    try:
        place = NodePlace.read(folder)
    except FedalloyError as error:
        return [Diagnosis("settings", PROBLEM, str(error))]
    about = f"node '{place.name}', client {place.config.client}, server {place.server}"
    return [Diagnosis("settings", OK, about), *Doctor(place, recipe).checks()]


def _tried(name: str, step: Callable[[], str], advice: str) -> Diagnosis:
    """What a step found; its own error, which may be any, is what is wrong."""
    try:
        return Diagnosis(name, OK, step())
    except Exception as error:
        kind = "" if isinstance(error, FedalloyError) else f" ({type(error).__name__})"
        return Diagnosis(name, PROBLEM, f"{error}{kind}", advice)


def _described(parts: object) -> str:
    assert isinstance(parts, dict)
    told = [f"{part or 'all'} {len(x)} of shape {list(x.shape[1:])}" for part, (x, _) in parts.items()]
    return f"{', '.join(told)} (not compared with a study)"

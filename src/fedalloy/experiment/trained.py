"""A run after some round: its federation, the server's state and the clients' states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from fedalloy.core import aspects, tree
from fedalloy.core.algorithm import ServerState
from fedalloy.core.protocols import ClientStore, Objective, Shared
from fedalloy.core.types import State, Tree
from fedalloy.engines.batched import Batched
from fedalloy.engines.loop import Loop
from fedalloy.experiment.machinery import Threads
from fedalloy.experiment.round import Federation, client_states
from fedalloy.methods.classifier import classifier_of, synthetic_set, train_classifier

_CHUNK_BYTES = 128 << 20
_MOST = 64


class ServerModel(NamedTuple):
    """A model as pure functions, with its parameters and buffers."""

    objective: Objective
    params: Tree
    buffers: Tree


@dataclass(frozen=True)
class Trained:
    """A run after a round, read-only."""

    fed: Federation = field(repr=False)
    state: ServerState = field(repr=False)
    store: ClientStore = field(repr=False)
    round: int

    @property
    def shared(self) -> Shared:
        """The parts every client receives."""
        return self.state["shared"]

    def states(self, ids: Tensor) -> dict[int, State]:
        """The states of some clients; one that never took part has its initial state."""
        return client_states(self.fed, self.state, self.store, ids)

    def models(self, ids: Tensor, mix: float | None = None) -> list[tuple[Tree, Tree]]:
        """Parameters and buffers of each client's own model; ``mix`` is the share of the local model."""
        states = self.states(ids)
        return [self.model_of(states[client], mix) for client in ids.tolist()]

    def model_of(self, state: State, mix: float | None = None) -> tuple[Tree, Tree]:
        """The model of a client with this state."""
        return aspects.personal_model(self.fed.algorithm.solver, self.shared, state["solver"], mix)

    def server_model(self) -> ServerModel:
        """The server's model; for methods that learn samples, a classifier trained on them."""
        fed, settings, key = self.fed, self.fed.config.classifier, self.fed.root.fold("classifier", self.round)
        if not aspects.is_generative(fed.algorithm.solver):
            return ServerModel(fed.task.objective, self.shared["params"], self.shared["buffers"])
        made = synthetic_set(fed.task, fed.algorithm, self.state, key.fold("samples"), settings.per_class)
        assert made is not None, "a generative solver makes samples"
        objective = classifier_of(fed.task)
        # Only this engine is worth it here: it replays a captured step where others would launch every kernel.
        engine = fed.engine if isinstance(fed.engine, Batched) else Loop()
        with Threads(fed.config):  # for a run that was opened again: sums over other parts are rounded differently
            return ServerModel(objective, *train_classifier(objective, *made, key, engine, settings))

    @property
    def at_once(self) -> int:
        """The number of clients whose states and models are in memory at the same time."""
        one = 3 * tree.nbytes(self.shared["params"])
        return max(1, min(_MOST, _CHUNK_BYTES // max(1, one)))

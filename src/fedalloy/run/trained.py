"""What a run has learned so far: the federation it is, the server's state and the clients' states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.algorithm import ServerState
from fedalloy.core.protocols import ClientStore, Shared
from fedalloy.core.types import State, Tree
from fedalloy.run.round import Federation, client_states

_CHUNK_BYTES = 128 << 20
_MOST = 64


@dataclass(frozen=True)
class Trained:
    """A run after a round, to be looked at: nothing here changes it."""

    fed: Federation
    state: ServerState
    store: ClientStore
    round: int

    @property
    def shared(self) -> Shared:
        """The parts every client receives."""
        return self.state["shared"]

    def states(self, ids: Tensor) -> dict[int, State]:
        """The states of some clients; whoever never took part has its initial one."""
        return client_states(self.fed, self.state, self.store, ids)

    def models(self, ids: Tensor, mix: float | None = None) -> list[tuple[Tree, Tree]]:
        """Parameters and buffers that each of some clients itself uses; ``mix`` is the share of the local model."""
        states = self.states(ids)
        return [self.model_of(states[client], mix) for client in ids.tolist()]

    def model_of(self, state: State, mix: float | None = None) -> tuple[Tree, Tree]:
        """The model of a client that keeps this state."""
        return self.fed.algorithm.solver.personal(self.shared, state["solver"], mix)

    @property
    def at_once(self) -> int:
        """For how many clients states and models are held in memory together."""
        one = 3 * tree.nbytes(self.shared["params"])
        return max(1, min(_MOST, _CHUNK_BYTES // max(1, one)))

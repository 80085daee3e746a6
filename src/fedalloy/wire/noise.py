"""Every client adds its own noise before anybody else sees its update (Geyer et al. 2017, arXiv:1712.07557)."""

from __future__ import annotations

from dataclasses import dataclass

from fedalloy.core import tree
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Shared, Wire
from fedalloy.core.registry import register
from fedalloy.core.types import Payload, State, Tree


@register("wire", "noise")
@dataclass(frozen=True)
class Noise(Wire):
    """``x + std z`` with ``z`` standard normal, drawn from the client's key of the round.

    Put it after ``clip``: of updates no longer than ``norm``, ``std = multiplier * norm`` hides each client behind
    Gaussian noise of that multiplier. Only the ``part`` is hidden, the buffers of a model are not. A weighting that
    sets no bound on what one client counts for is refused: it could amplify what the noise was to hide.
    When to use it: client-level differential privacy without trust in the server.

    >>> import torch
    >>> wire, shared = Noise(std=0.5), {"params": {"w": torch.zeros(2)}}
    >>> draws = {"w": torch.tensor([2.0, -1.0])}
    >>> wire.encode({"delta": {"w": torch.tensor([1.0, 1.0])}}, {}, draws)[0]
    {'delta': {'w': tensor([2.0000, 0.5000])}}
    """

    std: float = 0.01
    part: str = "delta"
    like: str = "params"

    def __post_init__(self) -> None:
        if not self.std >= 0:
            raise ValueError(f"std must be 0 or more, got {self.std}")

    @property
    def needs_weight_bound(self) -> bool:
        return True

    def draws(self, shared: Shared, keys: Key) -> Tree:
        return {
            name: keys.fold("noise", name).normal(*leaf.shape, dtype=leaf.dtype)
            for name, leaf in shared[self.like].items()
        }

    def encode(self, payload: Payload, mine: State, draws: Tree) -> tuple[Payload, State]:
        return {**payload, self.part: tree.add(payload[self.part], draws, self.std)}, mine

    def bytes_sent(self, payload: Payload, plain: int) -> int:
        """Noise leaves nothing sparse: what was compressed before is whole again."""
        return max(plain, sum(tree.nbytes(leaves) for leaves in payload.values()))

"""Seeded noise on what every client sends, for simulations. No privacy guarantee."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedalloy.core import tree
from fedalloy.core.keys import Key
from fedalloy.core.packing import Packings
from fedalloy.core.protocols import Shared, Wire
from fedalloy.core.registry import register
from fedalloy.core.types import Payload, State, Tree


@register("wire", "noise")
@dataclass(frozen=True)
class Noise(Wire):
    """``x + std z`` with ``z`` standard normal, drawn from the client's key of the round.

    The noise is a function of the run's seed, which the server knows and tells the nodes: whoever knows the seed can
    take the noise off again (only nodes that require noise draw it from a key of their own). Nothing counts how much
    has been given away over the rounds. So this shows what noise does to accuracy and gives **no privacy guarantee**.
    Refused unless every part that is sent has a ``clip`` directly before its noise; so are models with buffers, which
    would be sent without noise, and weightings that set no bound on what one client counts for.
    When to use it: to see how a method bears Gaussian noise of a given size on clipped updates (of updates no longer
    than ``norm``, ``std = multiplier * norm``, as in Geyer et al. 2017, arXiv:1712.07557).

    >>> import torch
    >>> wire, shared = Noise(std=0.5), {"params": {"w": torch.zeros(2)}}
    >>> draws = {"w": torch.tensor([2.0, -1.0])}
    >>> wire.encode({"delta": {"w": torch.tensor([1.0, 1.0])}}, {}, draws)[0]
    {'delta': {'w': tensor([2.0000, 0.5000])}}
    """

    needs_weight_bound: ClassVar[bool] = True
    needs_clipping: ClassVar[bool] = True

    std: float = 0.01
    part: str = "delta"
    like: str = "params"

    def __post_init__(self) -> None:
        if not self.std >= 0:
            raise ValueError(f"std must be 0 or more, got {self.std}")

    @property
    def changes(self) -> frozenset[str]:
        return frozenset({self.part})

    def draws(self, shared: Shared, keys: Key) -> Tree:
        return {
            name: keys.fold("noise", name).normal(*leaf.shape, dtype=leaf.dtype)
            for name, leaf in shared[self.like].items()
        }

    def encode(self, payload: Payload, mine: State, draws: Tree) -> tuple[Payload, State]:
        update = payload[self.part]
        for name, leaf in update.items():
            # One number for many entries would hide none of their differences, many for one entry not even that entry.
            if draws[name].shape != leaf.shape:
                raise ValueError(
                    f"noise: '{self.like}' has not the shapes of '{self.part}', so that its entries would not get a "
                    "number each; name the part that it is like"
                )
        return {**payload, self.part: tree.add(update, draws, self.std)}, mine

    def packings(self, before: Packings) -> Packings:
        """Noise leaves nothing sparse: what was compressed before is whole again."""
        return {part: packing for part, packing in before.items() if part != self.part}

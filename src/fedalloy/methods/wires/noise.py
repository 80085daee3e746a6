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

    The noise is a function of the run's seed, which the server knows and sends to the nodes: anyone who knows the seed
    can subtract the noise again (only nodes that require noise draw it from their own key). There is no accounting of
    the privacy loss over rounds. So this shows what noise does to accuracy and gives **no privacy guarantee**.
    Refused unless every part that is sent has a ``clip`` directly before its noise. Also refused are models with
    buffers, which would be sent without noise, and weightings that do not bound one client's weight.
    When to use it: to measure how a method tolerates Gaussian noise of a given size on clipped updates (for updates
    clipped to ``norm``, ``std = multiplier * norm``, as in Geyer et al. 2017, arXiv:1712.07557).

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
            # Broadcasting would add one number to many entries, which hides none of their differences, or many numbers
            # to one entry, which average out.
            if draws[name].shape != leaf.shape:
                raise ValueError(
                    f"noise: '{self.like}' and '{self.part}' have different shapes, so entries would not get a number "
                    "each; set 'like' to a part with the same shapes"
                )
        return {**payload, self.part: tree.add(update, draws, self.std)}, mine

    def packings(self, before: Packings) -> Packings:
        """Noise fills in zeros, so a part that was compressed before is sent whole."""
        return {part: packing for part, packing in before.items() if part != self.part}

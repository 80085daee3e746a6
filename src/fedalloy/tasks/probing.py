"""What a module does in a call, found by calling it once with a few examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.errors import FedalloyError
from fedalloy.core.inputs import Inputs
from fedalloy.core.keys import Key
from fedalloy.tasks.keyed import KeyedDraws, other_draws, other_generators, seeded_by

ROWS = 3
"""Examples of a probe."""


@dataclass(frozen=True)
class ProbeResult:
    """What a probe of the training mode found: whether the model ``draws``, whether some of these draws are ``unkeyed``
    (a global generator of torch, Python or numpy moved), whether a row's output depends on how many rows follow
    (``couples``), and whether an output depends on the calls before it (``remembers``)."""

    draws: bool = False
    unkeyed: bool = False
    couples: bool = False
    remembers: bool = False


Call = Callable[[Inputs, KeyedDraws], Tensor]
"""The outputs in training mode under a mode that answers random calls."""


@torch.no_grad()
def probe(call: Call, example: Inputs) -> ProbeResult:
    """Call a model with two rows, with three of which the first two are the same, and again with two, under the same
    key. A model that fails is left to fail where its error can name the client; nothing is assumed of it."""
    rows = some_rows(example)
    modes, made, moved = [], [], False
    try:
        for count in (ROWS - 1, ROWS, ROWS - 1):
            with seeded_by(Key.of(0).fold("probe")):
                start, others = torch.random.get_rng_state(), other_generators()
                modes.append(KeyedDraws(Key.of(0).fold("probe"), even=True))
                made.append(call(inputs.take(rows, slice(0, count)), modes[-1]))
                moved |= not torch.equal(start, torch.random.get_rng_state())
                moved |= other_draws(others, other_generators())
    except FedalloyError:
        raise
    except Exception:
        return ProbeResult(draws=True, couples=True)
    few, more, again = made
    return ProbeResult(bool(modes[0].count) or moved, moved, not _same_rows(few, more), not close(few, again))


def some_rows(example: Inputs) -> Inputs:
    """As many examples as a probe needs; the first ones again if there are fewer."""
    count = inputs.length(example)
    return inputs.take(example, torch.arange(ROWS, device=inputs.device_of(example)) % max(1, count))


def close(one: Tensor, other: Tensor) -> bool:
    """Whether outputs agree: to 1e-6 in float64, in float32 to what its digits allow for a deep model."""
    if one.shape != other.shape:
        return False
    part = 1e-6 if one.dtype == torch.float64 else 1e-3
    scale = max(1.0, float(other.double().abs().nan_to_num().max())) if other.numel() else 1.0
    return torch.allclose(one.double(), other.double(), rtol=0, atol=part * scale, equal_nan=True)


def _same_rows(few: Tensor, more: Tensor) -> bool:
    """Whether the outputs of the common rows agree; one without rows, or with another order of axes, does not."""
    if not few.dim() or not more.dim() or len(few) != ROWS - 1 or len(more) != ROWS:
        return False
    return close(more[: ROWS - 1], few)

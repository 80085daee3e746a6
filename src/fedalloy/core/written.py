"""How often a tensor was written to, for answers that are kept as long as nobody writes into them."""

from __future__ import annotations

from itertools import count

from torch import Tensor

_UNCOUNTED = count(-1, -1)


def writes_to(values: Tensor) -> int:
    """As torch counts them. Writes to a tensor that was made in inference mode are not counted: it gets another number
    in every call, so that no answer is kept for it.

    >>> import torch
    >>> values = torch.zeros(2)
    >>> before, _ = writes_to(values), values.add_(1)
    >>> writes_to(values) == before
    False
    """
    try:
        return values._version
    except RuntimeError:
        return next(_UNCOUNTED)

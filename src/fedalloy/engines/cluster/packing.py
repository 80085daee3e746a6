"""Values for Ray's object store: tensors become arrays, which every process of a machine reads without a copy."""

from __future__ import annotations

import io
import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedalloy.core.errors import SpecError

_WITHOUT_ARRAYS = {torch.bfloat16: torch.int16}
"""Dtypes that numpy does not have, with one of the same size that it has."""


@dataclass(frozen=True)
class Packed:
    """A pickled value without its arrays, and these arrays as bytes."""

    rest: bytes
    arrays: list[Any]


def pack(value: Any) -> Packed:
    """A value for the object store: nested containers, tensors, rules, tasks with models of a notebook.

    >>> unpack(pack({"w": torch.tensor([1.0, 2.0]), "steps": 3}))
    {'w': tensor([1., 2.]), 'steps': 3}
    """
    from ray import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        """Passes plain tensors on as arrays; everything else is pickled as Ray pickles it."""

        def reducer_override(self, what: Any) -> Any:
            return _reduced(what) if _is_plain(what) else super().reducer_override(what)

    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    arrays = [np.frombuffer(raw, np.uint8) if (raw := one.raw()).nbytes else b"" for one in buffers]
    return Packed(stream.getvalue(), arrays)


def pack_task(algorithm: Any, task: Any) -> Packed:
    """Algorithm and task as they are sent to workers; refused if they cannot be sent."""
    try:
        return pack((algorithm, task))
    except Exception as error:  # of whatever kind: classes say themselves how they are pickled
        raise SpecError(
            f"engine 'ray': the task cannot be sent to workers ({type(error).__name__}: {error}): open files, locks "
            "and connections cannot; open them where they are used, or leave them out in __getstate__"
        ) from error


def unpack(packed: Packed) -> Any:
    """The value; its tensors lie in the object store and must not be written to, as with every input of a client."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writ", UserWarning)
        return pickle.loads(packed.rest, buffers=packed.arrays)


def _is_plain(what: Any) -> bool:
    """Whether an array can stand for a tensor."""
    return (
        type(what) is Tensor
        and what.device.type == "cpu"
        and what.layout is torch.strided
        and not (what.requires_grad or what.is_complex() or what.is_quantized)
        and not torch._C._functorch.is_functorch_wrapped_tensor(what)
    )


def _reduced(tensor: Tensor) -> tuple[Any, ...]:
    stand_in = _WITHOUT_ARRAYS.get(tensor.dtype)
    whole = tensor.contiguous()
    return _tensor, ((whole.view(stand_in) if stand_in else whole).numpy(), tensor.dtype if stand_in else None)


def _tensor(array: Any, dtype: torch.dtype | None) -> Tensor:
    found = torch.from_numpy(array)
    return found if dtype is None else found.view(dtype)

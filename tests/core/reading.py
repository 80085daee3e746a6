"""How often the numbers of some storages are read, counted while torch works."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_FORM_ONLY = {f"new_{what}" for what in ("empty", "empty_strided", "zeros", "ones", "full")}
_FORM_ONLY |= {f"{what}_like" for what in ("empty", "zeros", "ones", "full", "rand", "randn")}
"""Operations that look at a tensor's shape and type alone."""


class Reads(TorchDispatchMode):
    """Counts the elements of watched tensors that operations read.

    Views are free. A piece of at most ``chunk`` elements that is read again, as a whole or in part, counts once as long
    as nothing else of the watched tensors is read in between: it is the current one. Copies are not watched.
    """

    def __init__(self, watched: Iterable[Tensor], chunk: int) -> None:
        super().__init__()
        self.chunk, self.elements, self.log = chunk, 0, list[str]()
        self._current: dict[int, Tensor] = {}
        self._sizes: dict[int, int] = {}
        self._held = list[Tensor]()
        self.total = 0
        for one in watched:
            self.watch(one)

    def watch(self, tensor: Tensor) -> None:
        """Count what is read of a tensor's storage from now on."""
        key = tensor.untyped_storage().data_ptr()
        if key not in self._sizes:
            self._sizes[key] = tensor.untyped_storage().nbytes() // tensor.element_size()
            self.total += self._sizes[key]
            # As long as it is held, nothing else can lie at its address.
            self._held.append(tensor)

    @property
    def passes(self) -> float:
        """The elements that were read, in passes over everything that is watched."""
        return self.elements / self.total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not _is_view(func) and func._schema.name.removeprefix("aten::") not in _FORM_ONLY:
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, Tensor) and one.untyped_storage().data_ptr() in self._sizes and one.numel():
                    self._read(one, str(func))
        return made

    def _read(self, tensor: Tensor, what: str) -> None:
        key = tensor.untyped_storage().data_ptr()
        touched = torch.zeros(self._sizes[key], dtype=torch.bool)
        # Dimensions without a stride repeat the same numbers.
        once = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        touched.as_strided(once, tensor.stride(), tensor.storage_offset()).fill_(True)
        current = self._current.get(key)
        if current is not None and not bool((touched & ~current).any()):
            return
        number = int(touched.sum())
        self.elements += number
        self.log.append(f"{what}: {number}")
        self._current = {key: touched} if number <= self.chunk else {}


def _is_view(func: Any) -> bool:
    """Whether an operation only describes its argument again: what it returns is an alias that it does not write."""
    schema = func._schema
    alias = [one.alias_info for one in schema.returns]
    return bool(alias) and all(info is not None and not info.is_write for info in alias)

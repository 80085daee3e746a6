"""Storage for state that may outgrow memory: tensors over unnamed files that vanish with the tensor."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scratch:
    """Where new tensors are stored: in memory, or mapped to files in ``folder`` (None: the system's temporary folder).

    A mapped tensor can be read, copied and checkpointed like any other. Its file is unlinked as soon as it is mapped,
    so the space is freed with the last view of the tensor, even if the process is killed.
    """

    mapped: bool
    folder: str | None = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor.

        >>> Scratch(mapped=True).empty((2, 3), torch.float32).fill_(1.0).sum()
        tensor(6.)
        """
        count = math.prod(shape)
        if not self.mapped or count == 0:
            return torch.empty(shape, dtype=dtype)
        with tempfile.TemporaryDirectory(prefix="fedalloy-", dir=self.folder, ignore_cleanup_errors=True) as folder:
            file = Path(folder) / "tensor"
            _reserve(file, count * dtype.itemsize)
            return torch.from_file(str(file), shared=True, size=count, dtype=dtype).reshape(shape)


def _reserve(file: Path, size: int) -> None:
    """Allocate the space now: a full disk is an error here, but would kill the process when the mapping is written."""
    with file.open("wb") as opened:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(opened.fileno(), 0, size)
            else:
                opened.truncate(size)
        except OSError as error:
            raise OSError(
                f"no space for {size / 1e6:.0f} MB of moments in {file.parent.parent}: {error.strerror}; "
                "name a folder on a larger disk with 'scratch', or raise 'in_memory_mb' to keep them in memory"
            ) from error

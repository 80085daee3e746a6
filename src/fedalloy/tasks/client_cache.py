"""The clients in memory, of data that are read on demand."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.protocols import DataPart
from fedalloy.core.types import Block, Examples
from fedalloy.tasks.fork_guard import GUARD

Parts = dict[DataPart, Examples]


class ClientCache:
    """The clients read last, up to a number of bytes; the next ones are read ahead in one thread.

    A forked process starts with an empty one, because threads and locks do not survive a fork. A fork waits until the
    client that is being read ahead has been read, because the source may hold locks of its own.
    """

    def __init__(self, read: Callable[[int], Parts], most: int) -> None:
        self._read, self._most = read, most
        self._begin()

    def _begin(self) -> None:
        self._process, self._lock, self._used = os.getpid(), threading.Lock(), 0
        self._kept: OrderedDict[int, Parts] = OrderedDict()
        self._reader: threading.Thread | None = None
        self._wanted: Callable[[], Sequence[int]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_read": self._read, "_most": self._most}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @property
    def used(self) -> int:
        """Bytes in the cache."""
        return self._used

    def get(self, client: int) -> Parts:
        """A client's examples, from the cache or from the source."""
        if self._process != os.getpid():
            self._begin()
        with self._lock:
            if client in self._kept:
                self._kept.move_to_end(client)
                return self._kept[client]
        found = self._read(client)
        with self._lock:
            self._keep(client, found)
        return found

    def prefetch(self, clients: Callable[[], Sequence[int]]) -> None:
        """Read clients in the background until half of the cache is theirs; errors are raised when they are needed.

        A request that has not begun is replaced by a newer one.
        """
        if self._process != os.getpid():
            self._begin()
        with self._lock:
            self._wanted = clients
            if self._reader is not None:
                return
            # a daemon, because the end of the program must not wait for a slow function of the user
            self._reader = threading.Thread(target=self._read_ahead, name="fedalloy-data", daemon=True)
            self._reader.start()

    def _read_ahead(self) -> None:
        while True:
            with self._lock:
                clients, self._wanted = self._wanted, None
                if clients is None:
                    self._reader = None
                    return
            self._fill(clients)

    def _fill(self, clients: Callable[[], Sequence[int]]) -> None:
        left = self._most // 2
        with suppress(Exception):  # raised again by whoever needs the client
            with GUARD.working():
                wanted = clients()
            for client in wanted:
                with GUARD.working():
                    left -= _bytes(self.get(client))
                if left < 0:
                    return

    def _keep(self, client: int, found: Parts) -> None:
        if client in self._kept:
            return
        self._kept[client] = found
        self._used += _bytes(found)
        while self._used > self._most and self._kept:
            _, oldest = self._kept.popitem(last=False)
            self._used -= _bytes(oldest)


def leaves_of(examples: Examples | Block) -> list[Tensor]:
    """All tensors of some examples."""
    return [*inputs.leaves(examples.x), *inputs.leaves(examples.y)]


def _bytes(parts: Parts) -> int:
    return sum(leaf.numel() * leaf.element_size() for one in parts.values() for leaf in leaves_of(one))

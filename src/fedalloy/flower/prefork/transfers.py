"""Large messages with fewer copies: Flower's transfer in chunks stays as it is, and so does what is sent.

As Flower does it, a process that sends a message holds it twice and one that receives it three times, and the SuperLink
keeps up to a gigabyte of caches. For a model of 200 MB that is most of the memory of a node and of the server.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRAGMAS = {"page_size": "32768", "cache_size": "-8000", "mmap_size": "0", "wal_autocheckpoint": "500"}
"""Settings of the SuperLink's database, which holds messages in chunks of five megabytes: a chain of 1,280 pages of
4 kB (an existing database keeps its pages). With a checkpoint after every four megabytes each chunk is written twice at
once, and what a cache of 64 MB for each of fifteen connections holds is never used a second time."""
_STARTED, _LOOK, _LOOK_AT_WORK = 5.0, 0.5, 0.05
"""Seconds until a program has started, and between two looks at its memory while that is as it was or changes."""
_GROWN, _CHANGED = 12 << 20, 4 << 20
"""The growth in bytes after which garbage is collected, and the change that tells that messages are on their way."""
_ARRAY, _RAW = b"Array ", b'"stype": "fedalloy.raw"'
"""The beginnings of Flower's arrays, and what those of fedalloy contain."""


def fewer_copies(program: str) -> None:
    """Install the functions of this module in a Flower program, and in its forks."""
    from flwr.supercore.inflatable import inflatable_utils as utils

    if utils.push_object_contents_from_iterable is not push_in_turn:
        utils.push_object_contents_from_iterable = push_in_turn
        utils.inflate_object_from_contents = _joining(utils.inflate_object_from_contents)
    if program == "flwr-serverapp":
        from flwr.superlink.grid import http_grid

        grid: Any = http_grid
        grid.inflate_object_from_contents = utils.inflate_object_from_contents
    if program == "flwr-clientapp":
        from flwr.supernode.runtime import run_clientapp

        app: Any = run_clientapp
        app.push_objects = _giving(app.push_objects)
    if program == "flower-superlink":
        from flwr.supercore import sql_mixin

        # The size of pages must be set before the first table is made.
        place: Any = sql_mixin
        kept = tuple((name, value) for name, value in place.SQLITE_PRAGMAS if name not in PRAGMAS)
        place.SQLITE_PRAGMAS = (*PRAGMAS.items(), *kept)


def collecting(run: Callable[[], Any], *, loaded: bool = False) -> Callable[[], Any]:
    """A program that collects garbage when its memory has grown. Each of Flower's requests is a cycle of objects, which
    holds a chunk; Python counts objects, not bytes, and lets hundreds of them wait. A program that is ``loaded``
    receives messages at once."""

    def program() -> Any:
        threading.Thread(target=_collect_garbage, args=(0.0 if loaded else _STARTED,), daemon=True).start()
        return run()

    return program


def _collect_garbage(after: float) -> None:
    time.sleep(after)
    gc.collect()
    gc.freeze()  # what a program has after its start it keeps: looking through it would take most of the time
    held = last = _memory()
    pause = _LOOK
    while held:
        time.sleep(pause)
        now = _memory()
        pause = _LOOK_AT_WORK if abs(now - last) > _CHANGED else _LOOK
        if now > held + _GROWN:
            gc.collect()
            held = _memory()
        held, last = min(held, now), now


def _memory() -> int:
    """The resident memory of this process in bytes; 0 where the system does not tell it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def push_in_turn(
    object_contents: Iterable[tuple[str, bytes]],
    push_object_fn: Callable[[str, bytes], None],
    *,
    max_concurrent_pushes: int = 2,
) -> None:
    """Push objects; the content of one is made when a thread is free for it, not all of them at the beginning."""
    source, turn, failed = iter(object_contents), threading.Lock(), threading.Event()

    def push() -> None:
        while not failed.is_set():
            with turn:
                one = next(source, None)
            if one is None:
                return
            try:
                push_object_fn(*one)
            except BaseException:
                failed.set()
                raise

    with ThreadPoolExecutor(max_concurrent_pushes) as threads:
        for done in [threads.submit(push) for _ in range(max_concurrent_pushes)]:
            done.result()


@dataclass(frozen=True)
class _Once:
    """An object of a message that is sent once: a chunk has no content afterwards."""

    kept: Any

    def deflate(self) -> bytes:
        """Its content."""
        from flwr.app.message.arraychunk import ArrayChunk

        content: bytes = self.kept.deflate()
        if isinstance(self.kept, ArrayChunk):
            self.kept.data = memoryview(b"")
        return content


def _giving(push: Callable[..., None]) -> Callable[..., None]:
    """Flower's function that sends the objects of a message, which gives up each chunk as its turn comes. The program
    ends when they are sent: nobody reads them again."""

    def given(objects: dict[str, Any], *others: Any, **options: Any) -> None:
        push({known: _Once(one) for known, one in objects.items()}, *others, **options)

    return given


def _joining(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Flower's function that makes a message of its objects' contents, with the chunks of an array joined one by one.

    Only in fedalloy's messages: they have one array, where several may share a chunk, and read it from any buffer."""

    def inflate(
        object_id: str, object_contents: dict[str, bytes], *, keep_object_contents: bool = False, objects: Any = None
    ) -> Any:
        arrays = [one for one, content in object_contents.items() if content.startswith(_ARRAY)]
        ours = len(arrays) == 1 and _RAW in object_contents[arrays[0]]
        if objects is not None or keep_object_contents or not ours:
            return whole(object_id, object_contents, keep_object_contents=keep_object_contents, objects=objects)
        empty, data = joined(arrays[0], object_contents)
        message = whole(object_id, object_contents, objects={arrays[0]: empty})
        for record in message.content.array_records.values():
            for array in record.values():
                array.data = data  # any buffer will do, and this one is not copied
        return message

    return inflate


def joined(array_id: str, contents: dict[str, bytes]) -> tuple[Any, bytearray]:
    """The only array of some contents without its data, and the data; the chunks are removed while they are copied."""
    from flwr.app import Array
    from flwr.supercore.inflatable.inflatable_object import (
        get_object_body,
        get_object_children_ids_from_object_content,
    )

    told = json.loads(get_object_body(contents[array_id], Array))
    named = get_object_children_ids_from_object_content(contents[array_id])
    order = [named[place] for place in told["arraychunk_ids"]]
    if set(order) != set(named):
        raise ValueError("an array does not consist of the chunks that it names")
    array = Array(told["dtype"], tuple(told["shape"]), told["stype"], b"")
    data, left = bytearray(), Counter(order)
    for chunk in order:
        data += _body(contents[chunk])
        left[chunk] -= 1
        if not left[chunk]:
            del contents[chunk]
    return array, data


def _body(content: bytes) -> memoryview:
    """The data of a chunk, where they are."""
    from flwr.app.message.arraychunk import ArrayChunk
    from flwr.supercore.constant import HEAD_BODY_DIVIDER
    from flwr.supercore.inflatable.inflatable_object import get_object_type_from_object_content

    if get_object_type_from_object_content(content) != ArrayChunk.__qualname__:
        raise ValueError("an array consists of something else than chunks")
    return memoryview(content)[content.find(HEAD_BODY_DIVIDER) + len(HEAD_BODY_DIVIDER) :]

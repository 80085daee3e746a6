"""Direct reads of rows on disk: the same bytes as through the page cache, wherever a piece begins."""

from __future__ import annotations

import ctypes
import errno
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.keys import Key
from fedalloy.core.native import numbers
from fedalloy.engines import direct_reads, file_pieces
from fedalloy.engines.direct_reads import LEAST, PAGE, FileReader
from fedalloy.engines.mapped_rows import MappedRows
from fedalloy.engines.shared_memory import Layout, Slot
from tests.engines.test_out_of_core import both, payload_of

WIDTH = 40_000
"""Columns of float32, more than the least direct read."""


@pytest.fixture
def uncached(monkeypatch):
    """Nothing is said to be in the page cache, so that what was just written is read from the disk."""
    monkeypatch.setattr(FileReader, "cached", lambda self, at, size: False)


def rows_of(folder, *sizes: int) -> tuple[MappedRows, Slot, Tensor]:
    """Three rows with leaves of these sizes; the last leaf, and what it holds."""
    rows = MappedRows(
        3, Layout.of({"delta": {str(place): torch.zeros(size) for place, size in enumerate(sizes)}}), folder
    )
    slot = rows.layout.slots[-1]
    rows.leaf(slot).copy_(held := Key.of(len(sizes)).normal(3, sizes[-1]))
    if not rows.reader.direct:
        pytest.skip("this file system has no direct reads")
    return rows, slot, held


def whole(rows: MappedRows, slot: Slot, width: int, *, reuse: bool = False) -> Tensor:
    return torch.cat([piece.clone() for _, piece in rows.slabs(slot, [2, 0, 1], width, reuse=reuse)], dim=1)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    before=st.integers(1, 3000),
    columns=st.integers(16384, 60_000),
    width=st.integers(16384, 30_000),
    reuse=st.booleans(),
)
def test_pieces_are_those_of_the_file(uncached, tmp_path, before, columns, width, reuse):
    rows, slot, held = rows_of(tmp_path, before, columns)
    seen: list[tuple[int, int]] = []
    right = FileReader._past_cache

    def watched(self, region, offset, at, size):
        done = right(self, region, offset, at, size)
        seen.append((size, int(done)))
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileReader, "_past_cache", watched)
        assert torch.equal(whole(rows, slot, width, reuse=reuse), held[[2, 0, 1]])
    assert all(done for _, done in seen)
    assert sum(size for size, _ in seen) >= 3 * 4 * (columns - columns % width)


def test_short_reads_go_through_the_page_cache(uncached, tmp_path, monkeypatch):
    rows, slot, held = rows_of(tmp_path, WIDTH)
    monkeypatch.setattr(FileReader, "_past_cache", None)
    assert torch.equal(whole(rows, slot, LEAST // 4 - 1), held[[2, 0, 1]])


def test_what_is_in_the_page_cache_is_copied_from_there(tmp_path, monkeypatch):
    rows, slot, held = rows_of(tmp_path, WIDTH)
    begin = slot.begin + PAGE
    assert rows.reader.cached(begin, 4 * WIDTH - PAGE)
    os.fsync(rows._file.fileno())
    assert torch.equal(whole(rows, slot, WIDTH), held[[2, 0, 1]])
    monkeypatch.setattr(rows.reader, "_mincore", None)
    assert not rows.reader.cached(begin, 4 * WIDTH - PAGE)


def test_pages_that_are_not_cached_are_said_to_be_so(tmp_path):
    rows = MappedRows(1, Layout.of({"delta": {"w": torch.zeros(1 << 20)}}), tmp_path)
    rows.bytes[0] = 1
    os.fsync(rows._file.fileno())
    ctypes.CDLL(None).madvise(ctypes.c_void_p(rows.bytes.data_ptr()), ctypes.c_size_t(rows.size), 4)  # MADV_DONTNEED
    os.posix_fadvise(rows._file.fileno(), 1 << 21, 1 << 20, os.POSIX_FADV_DONTNEED)
    assert rows.reader.cached(0, 1 << 20)
    assert not rows.reader.cached(0, 1 << 22)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_is_read_as_before(uncached, number, tmp_path, monkeypatch):
    rows, slot, held = rows_of(tmp_path, 3 * WIDTH)
    right, direct = os.preadv, rows.reader._unbuffered

    def refusing(file, buffers, at):
        if file == direct:
            raise OSError(number, "refused")
        return right(file, buffers, at)

    monkeypatch.setattr(os, "preadv", refusing)
    assert torch.equal(whole(rows, slot, WIDTH), held[[2, 0, 1]])
    assert not rows.reader.direct


def test_an_error_of_the_disk_is_raised(uncached, tmp_path, monkeypatch):
    rows, slot, _ = rows_of(tmp_path, WIDTH)

    def broken(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OSError, match="broken"):
        whole(rows, slot, WIDTH)


def test_a_read_that_ends_early_is_done_again(uncached, tmp_path, monkeypatch):
    rows, slot, held = rows_of(tmp_path, WIDTH)
    right, direct = os.preadv, rows.reader._unbuffered
    monkeypatch.setattr(
        os, "preadv", lambda file, buffers, at: 7 if file == direct else right(file, buffers, at),
    )  # fmt: skip
    assert torch.equal(whole(rows, slot, WIDTH), held[[2, 0, 1]])


def test_files_are_read_where_they_cannot_be_opened_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(direct_reads, "_opened", lambda file: None)
    rows = MappedRows(3, Layout.of({"delta": {"w": torch.zeros(WIDTH)}}), tmp_path)
    (slot,) = rows.layout.slots
    rows.leaf(slot).copy_(held := Key.of(1).normal(3, WIDTH))
    assert torch.equal(whole(rows, slot, 17_000), held[[2, 0, 1]])


@pytest.mark.parametrize("compiled", [True, False])
def test_sums_of_direct_pieces_are_those_of_memory(uncached, compiled, tmp_path, monkeypatch):
    if not compiled:
        monkeypatch.setattr(numbers, "_LIBRARY", None)
    leaves = {"v": (9,), "w": (2 * tree.COLUMNS + 16_401,)}
    inside, outside = both(payload_of(30, 1, leaves), list(range(30)), tmp_path)
    weights = Key.of(5).uniform(30, dtype=torch.float64)
    one, other = (cohort.combine("delta", weights) for cohort in (inside, outside))
    assert all(torch.equal(one[name], other[name]) for name in leaves)


@pytest.mark.parametrize("fault", ["another place in the page", "the row before"])
def test_a_planted_fault_is_found(uncached, fault, tmp_path, monkeypatch):
    rows, slot, held = rows_of(tmp_path, 100, 3 * WIDTH)
    assert torch.equal(whole(rows, slot, 17_000), held[[2, 0, 1]])
    right = file_pieces.Pieces._place

    def wrong(self, turn, lead, count):
        piece, memory = right(self, turn, lead if fault == "the row before" else 0, count)
        return (piece.roll(1, 0) if fault == "the row before" else piece), memory

    monkeypatch.setattr(file_pieces.Pieces, "_place", wrong)
    assert not torch.equal(whole(rows, slot, 17_000), held[[2, 0, 1]])


def test_descriptors_are_closed_with_the_rows(tmp_path):
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = opened()
    rows, _, _ = rows_of(tmp_path, WIDTH)
    assert opened() == before + 2 + mapped_descriptors()
    del rows, _
    assert opened() == before


def mapped_descriptors() -> int:
    """Python keeps one more for a mapping."""
    return 1

"""Tensors over unnamed files: ordinary to everybody, gone without a trace."""

from __future__ import annotations

import errno
import gc
import os

import pytest
import torch

from fedalloy.methods.weightings.scratch import Scratch


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("fedalloy-" in line for line in maps)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc to see mappings")
def test_a_mapping_ends_with_its_last_view():
    before = mappings()
    tensor = Scratch(mapped=True).empty((3, 1000), torch.float32)
    view = tensor[1]
    assert mappings() == before + 1
    del tensor
    gc.collect()
    assert mappings() == before + 1
    view.fill_(2.0)
    del view
    gc.collect()
    assert mappings() == before


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("shape", [(2, 5), (2, 0), (1,)])
def test_what_is_written_is_read(mapped, shape, tmp_path):
    scratch = Scratch(mapped, str(tmp_path))
    one, other = (scratch.empty(shape, torch.float64).fill_(value) for value in (1.0, 2.0))
    assert torch.equal(one, torch.ones(shape, dtype=torch.float64))
    assert torch.equal(other, one * 2)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_with_a_way_out(monkeypatch, tmp_path):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(OSError, match=r"no space for 80 MB .*No space left.*'scratch'.*'in_memory_mb'"):
        Scratch(mapped=True, folder=str(tmp_path)).empty((10, 1_000_000), torch.float64)
    assert list(tmp_path.iterdir()) == []

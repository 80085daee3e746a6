"""Compiled kernels for tests: with a fault planted in their source, and of every width that this machine has."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from fedalloy.core.native import building

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="the kernels are compiled with gcc")


def compiled(
    folder: Path, old: str = "", new: str = "", source: str = "logistic.c", every_width: bool = False
) -> ctypes.CDLL:
    """The kernels, with one piece of their source replaced; for the narrowest vectors only, which is faster."""
    copied = folder / "native"
    shutil.copytree(building.HERE, copied, ignore=shutil.ignore_patterns("*.py", "*.so", "__pycache__"))
    _replace(copied / source, old, new)
    if not every_width:
        _replace(copied / "native.c", "#define X86\n", "")
    assert building.build(folder / "kernels.so", copied, "-O1") is None
    return ctypes.CDLL(str(folder / "kernels.so"))


def widths() -> list[int]:
    """The bytes of the vectors that the kernels have versions for and this machine has."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    wider = {32: {"avx2", "fma", "bmi2", "movbe"}, 64: {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}
    return [16, *(width for width, needed in wider.items() if needed <= flags)]


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1 or not old
    file.write_text(text.replace(old, new) if old else text)

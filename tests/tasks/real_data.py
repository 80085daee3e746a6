"""Where the real data files are, for the tests that need them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedalloy.tasks import locate
from fedalloy.tasks.datasets.base import DatasetLoader


def data_folder() -> Path:
    named = os.environ.get("FEDALLOY_DATA")
    return Path(named) if named else Path(__file__).resolve().parents[2].parent / "shared" / "data"


def use_real_data(loader: type[DatasetLoader], monkeypatch: pytest.MonkeyPatch) -> None:
    """Point at the real files of a loader, or skip; they must be the files that were meant."""
    missing = [name for name in loader.files if not (data_folder() / name).is_file()]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} in FEDALLOY_DATA")
    monkeypatch.setenv("FEDALLOY_DATA", str(data_folder()))
    assert {locate.check(name).verdict for name in loader.files} == {"ok"}

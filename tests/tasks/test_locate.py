"""Data files are found where the environment says, and checked against what datasets declare."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from fedalloy.core import registry
from fedalloy.core.errors import DataError
from fedalloy.tasks import locate


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    named, cache = tmp_path / "named", tmp_path / "cache" / "fedalloy" / "data"
    named.mkdir()
    cache.mkdir(parents=True)
    monkeypatch.setenv("FEDALLOY_DATA", str(named))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return named, cache


def test_the_named_folder_comes_before_the_cache(places):
    named, cache = places
    (cache / "a.bin").write_bytes(b"cache")
    assert locate.find("a.bin") == cache / "a.bin"
    (named / "a.bin").write_bytes(b"named")
    assert locate.find("a.bin") == named / "a.bin"


def test_without_variables_the_home_cache_is_searched(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDALLOY_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate.folders() == (tmp_path / ".cache" / "fedalloy" / "data",)


def test_a_missing_file_says_where_it_was_looked_for_and_how_to_get_it(places):
    with pytest.raises(DataError) as error:
        locate.find("b.bin", "copy it from the shelf")
    message = str(error.value)
    assert all(str(folder) in message for folder in places)
    assert "copy it from the shelf" in message
    assert "FEDALLOY_DATA" in message


def test_a_folder_of_that_name_is_no_file(places):
    (places[0] / "c.bin").mkdir()
    assert locate.look("c.bin") is None


def test_a_dataset_extends_the_table_by_declaring_its_files(places, monkeypatch):
    @dataclass(frozen=True)
    class Shelf:
        files: ClassVar[dict[str, str]] = {"shelf.bin": hashlib.sha256(b"right").hexdigest()}
        hint: ClassVar[str] = "ask the librarian"

    monkeypatch.setitem(registry._rules["dataset"], "shelf", Shelf)
    assert locate.known()["shelf.bin"].dataset == "shelf"
    assert locate.known()["shelf.bin"].hint == "ask the librarian"
    assert locate.check("shelf.bin").verdict == "missing"
    (places[0] / "shelf.bin").write_bytes(b"wrong")
    assert locate.check("shelf.bin").verdict == "changed"
    (places[0] / "shelf.bin").write_bytes(b"right")
    assert locate.check("shelf.bin") == locate.Check(
        "shelf.bin", "ok", Shelf.files["shelf.bin"], places[0] / "shelf.bin", Shelf.files["shelf.bin"]
    )


def test_an_undeclared_file_cannot_be_checked(places):
    with pytest.raises(DataError, match=r"did you mean 'mnist_train\.npz'"):
        locate.check("mnist_trian.npz")

"""``fedalloy doctor`` knows everything that the package needs or may use, and says what is missing for what."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

from fedalloy.cli import doctor

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]


def names(requirements):
    return {re.split(r"[\[<>=]", one)[0] for one in requirements}


def test_it_looks_for_every_package_of_the_project():
    extras = {extra: names(some) for extra, some in PROJECT["optional-dependencies"].items() if extra != "dev"}
    assert set(doctor.NEEDED) == names(PROJECT["dependencies"])
    assert set(doctor.EXTRAS) == set().union(*extras.values())
    assert [package for package, (extra, _) in doctor.EXTRAS.items() if package not in extras[extra]] == []


def test_it_says_what_is_missing_for_what(cli, monkeypatch):
    known = metadata.version

    def without_optuna(name):
        if name == "optuna":
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(metadata, "version", without_optuna)
    rows = {what: (found, fine) for what, found, fine in doctor._packages()}
    assert rows["optuna (optional)"] == ("not installed (extra 'tune': fedalloy tune and advise)", True)
    assert rows["filelock"][1]

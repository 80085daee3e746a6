"""The app bundle that is sent to nodes: two imports, byte for byte the same for every run and every recipe.

Nodes run what is installed on them. A server therefore cannot send them code, only a spec, which they check.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

from fedalloy.core.errors import FedalloyError
from fedalloy.flower.config import RUN_DEFAULTS

PACKAGE = "fedalloy_bundle"
_VERSION = "1.0.0"
"""The version of the bundle, not of fedalloy: it changes when these files do."""
HASH = "d7fe93b0e44d05ad9cdfa2899a23f0a28814deae7d1a2f1491c39ddc2161036e"
"""SHA-256 of the bundle as Flower builds it, by which nodes identify it."""


def bundle_files() -> dict[str, str]:
    """Every file of the bundle, by its path.

    >>> bundle_files()["fedalloy_bundle/client_app.py"].splitlines()[-3:]
    ['from fedalloy.flower import client', '', 'app = client.app']
    """
    return {
        "pyproject.toml": _project(),
        f"{PACKAGE}/__init__.py": '"""What fedalloy sends to its nodes: nothing but two imports."""\n',
        f"{PACKAGE}/server_app.py": _module("server"),
        f"{PACKAGE}/client_app.py": _module("client"),
    }


def write_bundle(folder: str | Path) -> Path:
    """Write the bundle into a folder, for ``flwr run FOLDER``; an existing file that differs is not overwritten."""
    place = Path(folder)
    for name, content in bundle_files().items():
        file = place / name
        if file.exists() and file.read_text(encoding="utf-8") != content:
            raise FedalloyError(f"{file} is not what fedalloy would write there: choose another folder for the bundle")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    return place


def bundle_hash(app: Path) -> str:
    """The hash of an app in a folder, as Flower builds it."""
    from flwr.cli.build import build_fab_from_disk

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from a library that Flower uses
        return hashlib.sha256(build_fab_from_disk(app)).hexdigest()


def _module(side: str) -> str:
    # Flower reads the file and requires an assignment to ``app``: importing the name is not enough.
    return (
        f'"""The {side} half, as it is installed on this machine."""\n\n'
        f"from fedalloy.flower import {side}\n\napp = {side}.app\n"
    )


def _project() -> str:
    keys = "\n".join(f'{key} = "{value}"' if value == "" else f"{key} = {value}" for key, value in RUN_DEFAULTS.items())
    return f"""[project]
name = "fedalloy-bundle"
version = "{_VERSION}"
description = "Two imports: the server and the client of fedalloy"
license = "Apache-2.0"
dependencies = []

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["{PACKAGE}"]

[tool.flwr.app]
publisher = "fedalloy"

[tool.flwr.app.components]
serverapp = "{PACKAGE}.server_app:app"
clientapp = "{PACKAGE}.client_app:app"

[tool.flwr.app.config]
{keys}
"""

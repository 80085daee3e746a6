"""Folder names for experiments: unique, inside the output folder, and valid on any file system."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedalloy.core.errors import SpecError

LONGEST = 255
"""The longest file name in bytes."""
_KEPT, _MARK = 200, 12
_DEVICE = re.compile(r"(con|prn|aux|nul|(com|lpt)\d)(\..*)?", re.IGNORECASE)
"""Names that are devices on Windows, where no folder can have them; neither can one that ends in a dot."""
RESERVED = frozenset({
    "advice.json", "advice.toml", "advise.json", "comparison.json", "environment.json", "index.sqlite", "lock",
    "looks.json", "recipe.toml", "stop", "tuning", "tuned.toml", "tuning.json",
})  # fmt: skip
"""Names that a comparison uses beside its runs, and those that would make its folder look like a run."""


def safe(name: str) -> str:
    """A name as a folder name; one that is too long is cut and gets a hash of the whole.

    >>> safe("FedProx (mu=0.1)")
    'FedProx_mu=0.1'
    """
    plain = re.sub(r"[^\w.=+-]+", "_", name).strip("_") or "run"
    plain = re.sub(r"(?<=[^.])\.+$", "", plain)
    plain = f"{plain}_" if _DEVICE.fullmatch(plain) else plain
    return plain if len(plain.encode()) <= LONGEST else _marked(plain, name)


def folders(names: Sequence[str], what: str = "compare") -> dict[str, str]:
    """The folder of every name. Refuses names that would share a folder, make it hidden, leave the output folder or
    collide with a file there.

    >>> folders(["FedAvg", "FedProx (mu=0.1)"])
    {'FedAvg': 'FedAvg', 'FedProx (mu=0.1)': 'FedProx_mu=0.1'}
    """
    taken: dict[str, str] = {}
    for name in names:
        folder = safe(name)
        if not name.strip():
            raise SpecError(f"{what}: {name!r} is no name: give every algorithm a name of its own")
        if folder.startswith("."):
            raise SpecError(
                f"{what}: '{name}' begins with a dot and cannot name a folder of runs: give it another name"
            )
        if _same(folder) in RESERVED:
            raise SpecError(
                f"{what}: '{name}' is a reserved name in the folder of a comparison: give it another name (not "
                f"{', '.join(sorted(RESERVED))})"
            )
        if (other := taken.setdefault(_same(folder), name)) != name:
            raise SpecError(
                f"{what}: '{other}' and '{name}' would share the folder '{folder}': give one of them a name that "
                "differs in letters, digits or . = + - (not only in upper and lower case)"
            )
    return {name: safe(name) for name in names}


def settings_folders(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """A folder for every point of a grid; points whose names would be the same get a hash of their values.

    >>> settings_folders([{"algorithm.lr": 0.1}, {"algorithm.lr": 0.5}])
    ['algorithm.lr=0.1', 'algorithm.lr=0.5']
    """
    exact = [json.dumps(dict(point), default=repr) for point in points]
    if twice := [point for place, point in enumerate(exact) if point in exact[:place]]:
        raise SpecError(f"grid: {twice[0]} is given twice; remove one of them")
    plain = [safe(",".join(f"{path}={value}" for path, value in point.items())) for point in points]
    shared = _repeated(map(_same, plain))
    return [
        _marked(folder, text) if _same(folder) in shared or folder.startswith(".") else folder
        for folder, text in zip(plain, exact, strict=True)
    ]


def _same(folder: str) -> str:
    """Equal for folders that are the same on some file system."""
    return unicodedata.normalize("NFKC", folder).casefold()


def _repeated(folders: Iterable[str]) -> set[str]:
    seen: set[str] = set()
    return {folder for folder in folders if folder in seen or seen.add(folder)}  # type: ignore[func-returns-value]


def _marked(folder: str, text: str) -> str:
    short = folder.encode()[:_KEPT].decode(errors="ignore").lstrip(".")
    return f"{short}-{hashlib.sha256(text.encode()).hexdigest()[:_MARK]}"

"""The lowest versions that pyproject.toml declares, as a file of constraints for pip: `make test-lowest` installs them.

TORCH is the version of torch (default: the lowest one), for machines that cannot get every one.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FLOOR = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?>=([0-9.]+)")


def lowest(requirements: list[str], torch: str = "") -> list[str]:
    """One line ``name==version`` per requirement with a floor.

    >>> lowest(["numpy>=1.26", "h11>=0.14,<1", "pandas-stubs"])
    ['numpy==1.26', 'h11==0.14']
    """
    found = (_FLOOR.match(one) for one in requirements)
    floors: dict[str, str] = {one[1]: one[2] for one in found if one}
    if torch:
        floors["torch"] = torch
    return [f"{name}=={version}" for name, version in floors.items()]


def main() -> None:
    """Print the constraints of the package and of its extra ``notebook``, which the fast tests use."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["notebook"]]
    print("\n".join(lowest(wanted, os.environ.get("TORCH", ""))))


if __name__ == "__main__":
    main()

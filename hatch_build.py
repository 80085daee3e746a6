"""Builds the wheel with compiled kernels where there is a compiler for them, and without them elsewhere."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = Path("src/fedalloy/core/native")


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg, misc]
    """Compiles the kernels and names the platform they are for."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built, also for an editable install."""
        found = importlib.util.spec_from_file_location("building", Path(self.root) / _FOLDER / "building.py")
        assert found is not None
        assert found.loader is not None
        building = importlib.util.module_from_spec(found)
        found.loader.exec_module(building)
        reason = building.build()
        if reason:
            self.app.display_warning(f"no compiled kernels, fedalloy uses torch instead: {reason}")
            return
        build_data["artifacts"].append(f"{_FOLDER.as_posix()}/{building.LIBRARY}")
        build_data["pure_python"] = False
        # The kernels need no symbol newer than those of glibc 2.29.
        glibc = platform.libc_ver()[0] == "glibc"
        build_data["tag"] = f"py3-none-{'manylinux_2_29' if glibc else 'linux'}_{platform.machine()}"

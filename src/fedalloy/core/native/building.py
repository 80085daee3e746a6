"""Compile the kernels: when a wheel is built or a checkout is installed, and by ``python -m
fedalloy.core.native.building``. Uses the standard library only, because the build imports it by its path."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = "kernels.so"
_PATIENCE = 120.0
"""Seconds for the compiler, which needs about two."""
_FLAGS = ("-std=gnu11", "-fno-math-errno", "-Wno-psabi", "-shared", "-fPIC")


def fingerprint(folder: Path = HERE) -> str:
    """Of all sources: a library that was compiled from others is not used."""
    sources = (path.read_bytes() for path in sorted(folder.glob("*.c")))
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


def build(target: Path = HERE / LIBRARY, folder: Path = HERE, optimise: str = "-O3") -> str | None:
    """Compile the sources in ``folder`` into ``target``; returns the reason if that is not possible here."""
    compiler = os.environ.get("CC") or shutil.which("gcc")
    if not sys.platform.startswith("linux") or compiler is None:
        return "the kernels are compiled on Linux, with gcc"
    made = target.with_suffix(f".{os.getpid()}.so")
    command = [
        compiler,
        optimise,
        *_FLAGS,
        f'-DSOURCES="{fingerprint(folder)}"',
        "-o",
        str(made),
        str(folder / "native.c"),
    ]
    try:
        done = subprocess.run([*command, "-lm"], capture_output=True, text=True, timeout=_PATIENCE)
        if done.returncode:
            return f"{compiler} failed: {done.stderr.strip()}"
        made.replace(target)  # whole or not at all: another process may be loading it
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} failed: {error}"
    finally:
        made.unlink(missing_ok=True)
    return None


if __name__ == "__main__":
    sys.exit(build())

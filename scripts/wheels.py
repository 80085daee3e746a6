"""Gather the wheels of transformers and PEFT for a machine that cannot install anything.

    python scripts/wheels.py gather carried/wheels

Such a machine has torch, numpy and scipy; the wheels (26 MB) have everything else that fedalloy and these two need, in
the versions of ``constraints.txt``. There, unpack them and put the folder on Python's path:

    python3 scripts/wheels.py unpack carried/wheels /tmp/site && export PYTHONPATH=src:/tmp/site

Only the standard library is used.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGES = (
    "transformers", "peft", "accelerate", "huggingface_hub", "tokenizers", "regex", "safetensors", "packaging",
    "PyYAML", "tqdm", "psutil", "httpx", "httpcore", "h11", "anyio", "idna", "certifi", "filelock", "fsspec",
    "typing_extensions", "click", "typer", "rich", "shellingham", "markdown-it-py", "mdurl", "Pygments", "pydantic",
    "pydantic_core", "annotated-types", "typing-inspection",
)  # fmt: skip
"""Named one by one: following the requirements would also bring torch and all of CUDA."""
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64")


def gather(folder: Path, python: str) -> None:
    """Download the wheels for a version of Python."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "-d", str(folder)]
    kind = ["--python-version", python, "--only-binary=:all:"]
    kind += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*pip, *kind, "-c", "constraints.txt", *PACKAGES], check=True)
    wheels = list(folder.glob("*.whl"))
    print(f"{folder}: {len(wheels)} wheels, {sum(one.stat().st_size for one in wheels) / 2**20:.1f} MiB")


def unpack(folder: Path, site: Path) -> None:
    """Unpack every wheel into one folder, which then is like a ``site-packages``."""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)


def main() -> None:
    """One of the two steps."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0], formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.epilog = "\n".join(lines[2:])
    steps = parser.add_subparsers(dest="step", required=True)
    here = steps.add_parser("gather", help="download the wheels")
    here.add_argument("folder", type=Path)
    here.add_argument("--python", default="3.12", help="the version of Python there (default: 3.12)")
    there = steps.add_parser("unpack", help="unpack them on the other machine")
    there.add_argument("folder", type=Path)
    there.add_argument("site", type=Path)
    asked = parser.parse_args()
    if asked.step == "gather":
        gather(asked.folder, asked.python)
    else:
        unpack(asked.folder, asked.site)


if __name__ == "__main__":
    main()

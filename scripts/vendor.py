"""Fetch the third-party files of the pages through npm, and record their versions and checksums.

python scripts/vendor.py            # refetch everything named in vendor.json
python scripts/vendor.py --check    # only compare the files with the written checksums
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LISTS = (ROOT / "src/fedalloy/report/assets/vendor/vendor.json", ROOT / "tests/browser/assets/vendor.json")


def main() -> int:
    """Returns the number of files that differ from the list."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    return sum(differences(place) if check else refetch(place) for place in LISTS)


def differences(listed: Path) -> int:
    """Compare the files with their checksums."""
    wrong = [name for name, of in _files(listed) if _digest(listed.parent / name) != of["sha256"]]
    for name in wrong:
        print(f"{listed.parent / name} differs from vendor.json; run scripts/vendor.py", file=sys.stderr)
    return len(wrong)


def refetch(listed: Path) -> int:
    """Download every package from npm's registry, and update the checksums."""
    packages = json.loads(listed.read_text(encoding="utf-8"))
    for package in packages:
        with tempfile.TemporaryDirectory() as folder:
            name = f"{package['package']}@{package['version']}"
            subprocess.run(["npm", "pack", "--silent", name], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
                for file, of in package["files"].items():
                    member = archive.extractfile(f"package/{of['from']}")
                    assert member is not None, f"{name} has no {of['from']}"
                    (listed.parent / file).write_bytes(member.read())
                    of["sha256"] = _digest(listed.parent / file)
    listed.write_text(json.dumps(packages, indent=2) + "\n", encoding="utf-8")
    return 0


def _files(listed: Path) -> list[tuple[str, dict[str, Any]]]:
    packages = json.loads(listed.read_text(encoding="utf-8"))
    return [(name, of) for package in packages for name, of in package["files"].items()]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())

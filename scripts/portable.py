"""The tests that must pass on every system, as `.github/workflows/portable.yml` runs them: core, methods, tasks,
loop and batched, records, comparison and report. The rest needs Linux, a browser, Flower or a minute of patience."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PORTABLE = [
    "tests/core",
    "tests/methods",
    "tests/tasks",
    "tests/engines/test_loop.py",
    "tests/engines/test_fused.py",
    "tests/experiment/test_driver.py",
    "tests/experiment/test_round.py",
    "tests/experiment/test_sampling.py",
    "tests/experiment/test_float64.py",
    "tests/experiment/records/test_checkpoint.py",
    "tests/experiment/records/test_disk_store.py",
    "tests/experiment/records/test_toml.py",
    "tests/report/test_data.py",
    "tests/report/test_page.py",
    "tests/results",
    "tests/test_compare.py",
    "tests/test_portable.py",
    "tests/test_recipe.py",
]


def main(more: list[str]) -> int:
    """Run them; further arguments go to pytest."""
    return subprocess.call([sys.executable, "-m", "pytest", "-q", *PORTABLE, "-m", "not flower", *more], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

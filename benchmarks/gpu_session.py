"""Several parts of ``benchmarks.gpu_kernels`` in one call on a lent GPU, each in its own process with its own limit.

    PYTHONPATH=src python -m benchmarks.gpu_session PLAN --out FOLDER [--minutes 6]

``PLAN`` has one step a line: seconds, then the command's words after ``python3``; a line that begins with ``&`` runs
beside the others that do, before the first one that does not (this is how the compiler's cache is filled), and its
findings are not kept. ``OUT/`` in a line is the folder. Whatever a step prints goes to ``log.txt``; a step that fails
or is too slow ends alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def run(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a step; what it prints is added to the log when it is written."""
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, *words], stdout=file, stderr=file, start_new_session=True)


def wait(step: subprocess.Popen[bytes], until: float) -> str:
    """Its exit status, or that it was ended."""
    try:
        return str(step.wait(max(0.1, until - time.monotonic())))
    except subprocess.TimeoutExpired:
        os.killpg(step.pid, signal.SIGKILL)
        step.wait()
        return "ended, too slow"


def main() -> None:
    """All steps of a plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    end = begin + 60 * options.minutes
    lines = [
        line.replace("OUT/", f"{options.out}/").split()
        for line in options.plan.read_text().splitlines()
        if line.strip()
    ]
    log = beside = options.out / "log.txt"

    def say(line: str) -> None:
        print(line, flush=True)
        with (options.out / "steps.txt").open("a") as file:
            file.write(line + "\n")

    started = [(words, run(words[2:], beside), float(words[1])) for words in lines if words[0] == "&"]
    for words, step, seconds in started:
        said = wait(step, min(end, begin + seconds))
        say(f"{time.monotonic() - begin:6.1f} s  beside  {' '.join(words[2:])[:90]}: {said}")
    for words in (line for line in lines if line[0] != "&"):
        now = time.monotonic()
        if now > end - 5:
            say(f"not run: {' '.join(words)}")
            continue
        kept = [*words[1:], *(["--out", str(options.out)] if "benchmarks.gpu_kernels" in words else [])]
        said = wait(run(kept, log), min(end, now + float(words[0])))
        took = time.monotonic() - now
        say(f"{now - begin:6.1f} s  {took:5.1f} s  {' '.join(words[1:])[:90]}: {said}")


if __name__ == "__main__":
    main()

"""Run studies on a federation under faults, check what came out, and write a report."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.chaos.checking import judge
from benchmarks.chaos.faults import Faults
from benchmarks.chaos.links import Links, add_namespaces, remove_namespaces
from benchmarks.chaos.report import Findings, written
from benchmarks.chaos.services import CLASSES, FEATURES, MARK, NODES, ROOT, Federation, processes
from fedalloy.experiment.records import toml
from fedalloy.experiment.records.reading import is_run, read_run, read_status
from fedalloy.experiment.records.scalars import seconds_of

STUDIES = ("fedavg", "scaffold", "superfed_lm", "aaggff_s")
_CALM = 3
"""Rounds without faults at the beginning, whose median time is that of a round."""
_LOOK = 0.5
_PATIENCE = 600.0
"""Seconds that a study has to finish after the last fault."""


@dataclass
class Run:
    """A study and the command that starts, follows and continues it."""

    federation: Federation
    name: str
    rounds: int
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    begun: float = 0.0

    @property
    def folder(self) -> Path:
        """Its records, on a small disk."""
        return self.federation.disk(None) / self.name

    @property
    def recipe(self) -> Path:
        """Its recipe, which is written where there is none."""
        file = self.federation.place / f"{self.name}.toml"
        if not file.exists():
            file.write_text(toml.dumps(_recipe(self.name, self.rounds)))
        return file

    @property
    def over(self) -> bool:
        """Whether it is finished."""
        return is_run(self.folder) and read_status(self.folder)["state"] == "finished"

    @property
    def round(self) -> int:
        """The last recorded round."""
        return read_run(self.folder).last_round if is_run(self.folder) else 0

    def keep_going(self) -> None:
        """Give the same command again, whenever it ended and the study is not finished."""
        if self.over or (self.process is not None and self.process.poll() is None):
            return
        command = self.federation.command("run", str(self.federation.place / "fed" / "server"), str(self.recipe))
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, MARK: f"{self.federation.token}.operator"}
        with (self.federation.place / "logs" / "operator.log").open("ab") as log:
            self.process = subprocess.Popen([*command, "-o", str(self.folder)], stdout=log, stderr=log, env=environment)
        self.starts += 1


def _recipe(algorithm: str, rounds: int) -> dict[str, Any]:
    return {
        "task": {
            "dataset": {"kind": "nodes", "shape": [FEATURES], "classes": CLASSES},
            "model": {"kind": "mlp", "hidden": [8]},
        },
        "partition": {"clients": NODES},
        "algorithm": {"name": algorithm, "batch_size": 16},
        "run": {"rounds": rounds, "seeds": [5]},
        "evaluate": {"every": 1000, "clients": 1},
        "engine": {"kind": "flower", "deadline": 20.0, "minimum": 2, "wait": 3600.0},
    }


def under_faults(run: Run, faults: Faults, seconds: float, every: float, say: Callable[[str], None]) -> None:
    """One study: some calm rounds, faults for its share of the time, then calm until it is finished."""
    faults.study, run.begun = run.folder, time.monotonic()
    end, due = None, 0.0
    while not run.over:
        now = time.monotonic()
        end = now + seconds if end is None and run.round >= _CALM else end
        if now > (end or run.begun) + _PATIENCE:
            say(f"{run.name} did not finish within {_PATIENCE:.0f} s after the last fault")
            break
        calm = end is None or now > end
        faults.heal(everything=calm and bool(faults.healing))
        run.keep_going()
        if not calm and now >= due:
            faults.one()
            due = time.monotonic() + faults.random.expovariate(1 / every)
        time.sleep(_LOOK)
    faults.heal(everything=True)
    say(f"{run.name}: {run.round} rounds in {time.monotonic() - run.begun:.0f} s, the command was given {run.starts} x")


def _times(run: Run) -> tuple[float, float]:
    """The seconds of a calm round, and those that the study took longer than that."""
    spent = [seconds_of(row) for row in read_run(run.folder).timings()]
    calm = statistics.median(spent[:_CALM] or [float("nan")])
    return calm, time.monotonic() - run.begun - calm * run.rounds


def session(place: Path, chosen: argparse.Namespace, say: Callable[[str], None]) -> Findings:
    """The whole benchmark in a folder: what happened, and what was found."""
    federation, random = Federation(place, f"fa{os.getpid()}"), Random(chosen.seed)
    findings = Findings(chosen.minutes, chosen.seed, Federation.clocks_can_jump())
    add_namespaces(federation.namespaces)
    links = None
    try:
        federation.mount()
        links = Links.start(federation.namespaces)
        for service in (federation.server, *federation.nodes):
            service.start()
        faults = Faults(federation, links, random, say, findings.faults)
        share = 60 * chosen.minutes / len(chosen.studies)
        for name in chosen.studies:
            run = Run(federation, name, chosen.rounds or max(8, round(share / 6)))
            under_faults(run, faults, share, chosen.every, say)
            findings.add(judge(federation, name, run.recipe, run.folder), *_times(run))
            say(str(findings.verdicts[-1]))
        findings.orphans = [service.name for service in (*federation.nodes, federation.server) if not service.stop()]
        findings.restarts = {one.name: one.starts - 1 for one in (federation.server, *federation.nodes)}
    finally:
        _clean(federation, links, place)
    findings.tracebacks = _tracebacks(place / "logs")
    return findings


def _clean(federation: Federation, links: Links | None, place: Path) -> None:
    for service in (*federation.nodes, federation.server):
        service.kill()
    for pid in processes(f"{federation.token}.operator"):
        os.kill(pid, 9)
    if links:
        links.stop()
    federation.unmount(place / "kept")
    remove_namespaces(federation.namespaces)


def _tracebacks(logs: Path) -> dict[str, int]:
    found = {file.stem: file.read_text(errors="replace").count("Traceback (most recent") for file in logs.glob("*.log")}
    return {name: count for name, count in sorted(found.items()) if count}


def main() -> None:
    """Read the options, run, write the report."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    options.add_argument("--minutes", type=float, default=10.0, help="time with faults, for all studies together")
    options.add_argument("--seed", type=int, default=0, help="of the faults; when they strike depends on the machine")
    options.add_argument("--every", type=float, default=8.0, help="mean seconds between two faults")
    options.add_argument("--rounds", type=int, default=0, help="rounds of every study; default: by the time")
    options.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES))
    options.add_argument("-o", "--output", type=Path, help="write the report here as well")
    options.add_argument("--keep", type=Path, help="a new folder for logs and records; default: a temporary one")
    chosen = options.parse_args()
    if os.geteuid() != 0 or sys.platform != "linux" or shutil.which("ip") is None:
        sys.exit("this needs Linux, root and Debian's iproute2: it makes network namespaces, TUN devices and tmpfs")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no process, namespace or mount is left behind
    place = chosen.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    place.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:6.0f} s] {text}", flush=True)

    findings = session(place.absolute(), chosen, say)
    report = written(findings)
    print(report)
    if chosen.output:
        chosen.output.write_text(report)
    if findings.holds and not chosen.keep:
        shutil.rmtree(place, ignore_errors=True)
    sys.exit(0 if findings.holds else f"something does not hold; logs and records are in {place}")


if __name__ == "__main__":
    main()

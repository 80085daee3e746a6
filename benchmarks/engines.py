"""The speed of the public ``fit``: four workloads against a hand-written loop, many clients, and start-up.

    python -m benchmarks.engines [--only W1,W4] [--quick] [--json FILE] [--write-minimums]

Each workload is one ``fit`` with records in a folder, the default engine, screening, shuffling and masks, in turns
with the sequential loop, so that both have the same load on the machine. The loop's turns have one thread and all cores
alternately (unless one of them is far slower), and the better median counts. A turn is many small rounds: the first
ones after the other's turn find their data and code no longer in the caches, which no run would. Medians and quartiles
are shown; start-up, the first round and the last, which evaluates, are not counted.
Both must move the model equally far. Exits with 1 when a ratio is below its minimum (``minimums.json``), when
rounds get slower (in processor time) or need more memory with the size of the population, or when the first round ends
too late. ``--write-minimums`` writes 80 % of the measured ratios to ``minimums.json`` instead, on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.workloads import LR, WORKLOADS, Sequential, Workload, moved, task_of
from fedalloy.algorithms import fedavg
from fedalloy.core.keys import Key
from fedalloy.core.types import Tree
from fedalloy.experiment.driver import RoundEvent
from fedalloy.experiment.fit import RunResult, fit
from fedalloy.tasks.datasets.lazy_synthetic import LogisticClients, lazy_synthetic
from fedalloy.tasks.objective import ModuleObjective

_MINIMUMS = Path(__file__).with_name("minimums.json")
MINIMUMS: dict[str, Any] = json.loads(_MINIMUMS.read_text())
_SHARE = 0.8
"""The part of a measured ratio that becomes its minimum."""
SECONDS = {"W1": 20.0, "W2": 25.0, "W3": 60.0, "W4": 20.0}
"""The approximate time for each workload."""
POPULATIONS = (1_000, 10_000, 100_000, 1_000_000)
_WORTH_TRYING = 1.5
"""Where the loop takes this much longer with another number of threads, it has no turns with it."""
UNEQUAL = 0.1
QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart.toml"


@dataclass
class Line:
    """One workload in the table; times in milliseconds a round, spreads are the quartiles."""

    workload: str
    what: str
    sequential_ms: float
    sequential_spread: tuple[float, float]
    fedalloy_ms: float
    fedalloy_spread: tuple[float, float]
    ratio: float
    minimum: float
    aim: float
    engine: str
    threads: str
    rounds: int
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        verdict = "below the minimum" if self.ratio < self.minimum else "aim" if self.ratio >= self.aim else "ok"
        theirs = _with(self.sequential_ms, self.sequential_spread)
        times = f"{theirs:>26} {_with(self.fedalloy_ms, self.fedalloy_spread):>26}"
        limits = f"{self.ratio:7.2f} {self.minimum:8.1f} {self.aim:5.1f}"
        return f"{self.workload:4} {times} {limits}  {self.engine:12} {verdict}"


def race(load: Workload, seconds: float) -> Line:
    """One workload: our rounds and the loop's in turns, within one ``fit``."""
    task = task_of(load)
    initial = task.objective.init(Key.of(0).fold("model"))[0]
    choices = thread_choices(load, initial, task)
    control = Turns(load.turn, Sequential(load, task, initial), tuple(choices))
    rounds = 2 + load.turn * max(4, round(seconds / (1.4 * min(choices.values()) * load.turn)))
    with tempfile.TemporaryDirectory() as folder:
        result = fit(
            fedavg(lr=LR, batch_size=load.batch), task, rounds=rounds, cohort=load.cohort, initial=initial,
            folder=f"{folder}/run", evaluate_every=rounds, evaluate_clients=1, checkpoint_every=1e9, watcher=control,
        )  # fmt: skip
        engine = next(_timings(result))["engine"]
    for _ in range(rounds - control.taken):
        control.sequential.round()
    return _line(load, control, engine, _faults(result.model, control.sequential, initial))


def thread_choices(load: Workload, initial: Tree, task: Any) -> dict[int, float]:
    """The numbers of threads with which the loop may be fastest, and roughly its seconds a round."""
    found: dict[int, float] = {}
    for threads in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        loop = Sequential(load, task, initial)
        found[threads] = min(_timed(loop.round) for _ in range(2 if load.turn == 1 else 5))
    return {threads: taken for threads, taken in found.items() if taken < _WORTH_TRYING * min(found.values())}


class Turns:
    """Called after every round of a run: records its time, and runs the loop when it is its turn, with these
    numbers of threads alternately."""

    def __init__(self, turn: int, sequential: Sequential, choices: tuple[int, ...]) -> None:
        self.turn, self.sequential = turn, sequential
        self.ours: list[float] = []
        self.theirs: dict[int, list[float]] = {threads: [] for threads in choices}
        self._since = 0.0

    @property
    def taken(self) -> int:
        """How many rounds the loop has run."""
        return sum(map(len, self.theirs.values()))

    @property
    def best(self) -> tuple[int, list[float]]:
        """The number of threads with which the loop is fastest, and the seconds of its rounds."""
        return min(self.theirs.items(), key=lambda found: statistics.median(found[1]))

    def __call__(self, event: RoundEvent) -> None:
        """The first round picks the engine, and the last one evaluates: both are left out."""
        round, now = event.row["round"], time.perf_counter()
        if 1 < round < event.rounds:
            self.ours.append(now - self._since)
            if len(self.ours) % self.turn == 0:
                self._their_turn()
        self._since = time.perf_counter()

    def _their_turn(self) -> None:
        before, taken = torch.get_num_threads(), min(self.theirs.items(), key=lambda found: len(found[1]))
        torch.set_num_threads(taken[0])
        taken[1].extend(_timed(self.sequential.round) for _ in range(self.turn))
        torch.set_num_threads(before)


def _line(load: Workload, turns: Turns, engine: dict[str, Any], faults: list[str]) -> Line:
    threads, seconds = turns.best
    theirs, ours = _middle(seconds), _middle(turns.ours)
    ratio, minimum = theirs[0] / ours[0], MINIMUMS["ratios"][load.name]
    if ratio < minimum:
        faults = [*faults, f"{load.name} is {ratio:.2f} x the sequential loop, less than {minimum}"]
    return Line(
        load.name, load.what, theirs[0], theirs[1], ours[0], ours[1], ratio, minimum, MINIMUMS["aims"][load.name],
        f"{engine['engine']} x{engine['threads']}", f"sequential x{threads}", len(turns.ours), faults,
    )  # fmt: skip


def _faults(model: Tree, sequential: Sequential, initial: Tree) -> list[str]:
    ours, theirs = moved(model, initial), moved(sequential.server, initial)
    if abs(ours / theirs - 1) <= UNEQUAL:
        return []
    return [f"{sequential.load.name}: unequal work, the models moved by {ours:.4g} and {theirs:.4g}"]


def flatness(rounds: int, repeats: int = 3) -> list[dict[str, float]]:
    """Processor time and memory of a round with 100 clients from growing populations, alternately; data are generated
    on access."""
    _lazy_run(POPULATIONS[0], rounds)
    seconds: dict[int, list[float]] = {population: [] for population in POPULATIONS}
    grown = dict.fromkeys(POPULATIONS, 0.0)
    for _ in range(repeats):
        for population in POPULATIONS:
            before = _peak_megabytes()
            seconds[population] += _lazy_run(population, rounds)
            grown[population] += _peak_megabytes() - before
    return [{"clients": n, "ms": 1e3 * statistics.median(seconds[n]), "megabytes": grown[n]} for n in POPULATIONS]


def _lazy_run(population: int, rounds: int) -> list[float]:
    objective = ModuleObjective(lambda: nn.Linear(60, 10))
    task = lazy_synthetic(population, objective, key=Key.of(0), clients=LogisticClients(20))
    stamps: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        fit(
            fedavg(lr=LR, batch_size=10), task, rounds=rounds, cohort=100, folder=f"{folder}/run",
            evaluate_every=rounds, evaluate_clients=100, watcher=lambda _: stamps.append(time.thread_time()),
        )  # fmt: skip
    return [after - before for before, after in pairwise(stamps[:-1])]


def start_up(repeats: int) -> dict[str, float]:
    """Medians of seconds: ``import torch`` alone, the quickstart recipe up to the end of one round, and ``--help``."""

    def first_round() -> None:
        with tempfile.TemporaryDirectory() as folder:
            _python("-m", "fedalloy", "run", str(QUICKSTART), "--set", "run.rounds=1", "-o", f"{folder}/run")

    commands: dict[str, Any] = {
        "torch": lambda: _python("-c", "import torch"), "run": first_round,
        "help": lambda: _python("-m", "fedalloy", "--help"),
    }  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats + 1):  # the first one fills the caches
        for name, command in commands.items():
            taken[name].append(_timed(command))
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}


def _python(*words: str) -> None:
    subprocess.run([sys.executable, *words], check=True, capture_output=True)


def _timed(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _middle(seconds: list[float]) -> tuple[float, tuple[float, float]]:
    """The median and the quartiles, in milliseconds."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return 1e3 * middle, (1e3 * low, 1e3 * high)


def _with(value: float, spread: tuple[float, float]) -> str:
    digits = 2 if value < 100 else 0
    return f"{value:.{digits}f} ({spread[0]:.{digits}f}-{spread[1]:.{digits}f})"


def _timings(result: RunResult) -> Any:
    assert result.folder is not None
    return (json.loads(line) for line in (result.folder / "timings.jsonl").read_text().splitlines())


def _peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def _flat_faults(rows: list[dict[str, float]]) -> list[str]:
    limit, first = MINIMUMS["flat"], rows[0]
    slow = [row for row in rows if row["ms"] > limit["time"] * first["ms"]]
    large = [row for row in rows if row["megabytes"] > limit["megabytes"]]
    return [f"{row['clients']:,} clients: {row['ms']:.1f} ms a round, not {first['ms']:.1f}" for row in slow] + [
        f"{row['clients']:,} clients: the process grew by {row['megabytes']:.0f} MB" for row in large
    ]


def arguments() -> argparse.Namespace:
    """The command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="W1,W2,W3,W4,flat,start", help="W1,W2,W3,W4,flat,start or some of them")
    parser.add_argument("--quick", action="store_true", help="a fifth of the time")
    parser.add_argument("--json", type=Path, help="write everything measured to a file")
    parser.add_argument("--write-minimums", action="store_true", help="80 % of the measured ratios".replace("%", "%%"))
    return parser.parse_args()


def main() -> int:
    """Measure the chosen parts and print them; returns 1 if a minimum is not reached."""
    options = arguments()
    wanted, share = options.only.split(","), 0.2 if options.quick else 1.0
    told: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    faults: list[str] = []
    told["load"] = load_before = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, torch {torch.__version__}; milliseconds a round, median (quartiles)")
    if load_before > 0.5 * (os.cpu_count() or 1):
        print(f"The machine is busy (load {load_before:.1f}): short rounds suffer most, ratios are too low.")
    print()
    print(f"{'':4} {'sequential':>26} {'fedalloy':>26} {'ratio':>7} {'minimum':>8} {'aim':>5}  engine", flush=True)
    for load in WORKLOADS:
        if load.name in wanted:
            line = race(load, share * SECONDS[load.name])
            print(line, flush=True)
            told[load.name], faults = asdict(line), faults + line.faults
    if "flat" in wanted:
        told["flat"] = flatness(20 if options.quick else 60)
        print(f"\n{'clients':>10} {'ms a round':>11} {'MB more':>8}   (a cohort of 100, drawn when asked for)")
        for row in told["flat"]:
            print(f"{row['clients']:>10,} {row['ms']:11.2f} {row['megabytes']:8.1f}", flush=True)
        faults += _flat_faults(told["flat"])
    if "start" in wanted:
        told["start"] = seconds = start_up(3 if options.quick else 10)
        after, limits = seconds["run"] - seconds["torch"], MINIMUMS["start"]
        print(f"\nfedalloy run: the first round ends {after:.2f} s after 'import torch' (at most {limits['run']})")
        print(f"fedalloy --help: {seconds['help']:.2f} s (at most {limits['help']})")
        faults += [f"the first round ended {after:.2f} s after 'import torch'"] if after > limits["run"] else []
        faults += [f"--help took {seconds['help']:.2f} s"] if seconds["help"] > limits["help"] else []
    print("\n" + ("\n".join(faults) or "All minimums are reached."))
    if options.json:
        options.json.write_text(json.dumps({**told, "faults": faults}, indent=1) + "\n")
    if options.write_minimums:
        _write_minimums(told)
        return 0
    return 1 if faults else 0


def _write_minimums(told: dict[str, Any]) -> None:
    """Replace the minimums of the ratios that were measured; the others stay."""
    ratios = {name: round(_SHARE * told[name]["ratio"], 1) for name in MINIMUMS["ratios"] if name in told}
    lines = (
        f'  "{name}": {json.dumps(value)}'
        for name, value in {**MINIMUMS, "ratios": {**MINIMUMS["ratios"], **ratios}}.items()
    )
    _MINIMUMS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())

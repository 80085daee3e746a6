"""The engine ``ray`` on a cluster of three raylets of this machine, held against the loop, and under faults.

    python -m benchmarks.ray --conform               # everything
    python -m benchmarks.ray --conform --brief       # what `make test` runs

Every check is a function that returns what is wrong; nothing is wrong if all return nothing. Ray listens on the
loopback address only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedalloy
from fedalloy.core.errors import SpecError
from fedalloy.engines.cluster import pool as ray_pool
from fedalloy.engines.cluster import worker as ray_worker
from fedalloy.engines.cluster.session import load_ray
from fedalloy.engines.ray import Ray
from fedalloy.testing import FAULTS, check_engine, engine_cases, small_task
from fedalloy.testing.comparing import differences

METHODS = (
    "fedavg", "scaffold", "ditto", "superfed_mm", "aaggff_d", "fedlayerwise", "median", "fedcams", "fedevg",
)  # fmt: skip
NODES, KILLS, ROUNDS = 3, 3, 3
LENGTHS = (60, 240, 960, 3840)
"""Rounds of a run that is to be killed, until one is long enough."""
TOLERANCE = 1e-9
PATIENCE = 600.0
"""Seconds after which something that should have happened has not; many times what it takes on an idle machine."""
SURROUNDINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's own processes listen on the loopback address
    "RAY_worker_niceness": "0",  # with Ray's default, 15, workers take many times as long on a busy machine
    "RAY_worker_register_timeout_seconds": "600",  # as long as a worker may take to start
    # What other programs take of memory and disk ends no worker: only the planted faults do.
    "RAY_memory_monitor_refresh_ms": "0", "RAY_local_fs_capacity_threshold": "1",
}  # fmt: skip
RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
Check = Callable[["Cluster", Path], list[str]]


class LongLived(Ray):
    """Keeps its workers from run to run, because starting them takes seconds."""

    cluster: Cluster | None = None

    def close(self) -> None:
        """Only ``end`` ends them; a round that failed may have left workers busy."""
        if self._pool is not None and self._pool._running:
            self.end()
        elif self.cluster is not None and self._pool is not None and self.workers:
            self.cluster.pools[self.workers] = self._pool

    def end(self) -> None:
        if self.cluster is not None and self.workers:
            self.cluster.pools.pop(self.workers, None)
        super().close()


class Cluster:
    """Three raylets with one core each, and the engines that the checks share."""

    def __init__(self) -> None:
        os.environ.update(SURROUNDINGS)
        ray_pool.START_SECONDS = PATIENCE
        self.ray = load_ray()
        from ray.cluster_utils import Cluster as Raylets

        settings: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20, "node_ip_address": "127.0.0.1"}
        self.raylets = Raylets(initialize_head=True, head_node_args={**settings, "include_dashboard": False})
        self.others = [self.raylets.add_node(wait=False, **settings) for _ in range(NODES - 1)]
        self.raylets.wait_for_nodes(PATIENCE)
        self.address = self.raylets.address
        self.ray.init(address=self.address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
        self.pools: dict[int, Any] = {}
        self._engines: list[LongLived] = []

    def engine(self, workers: int, inner: str = "loop", states: Path | None = None) -> LongLived:
        """An engine of so many workers, which are started once; settings are given to them with every task."""
        made = LongLived("auto", workers, 0.25, inner=inner, block=2, states=str(states) if states else None)
        if (pool := self.pools.get(workers)) is not None:
            pool.settings, pool.algorithm, made._pool = made._settings(), None, pool
        made.cluster = self
        self._engines.append(made)
        return made

    def free(self) -> None:
        """End all workers."""
        for pool in self.pools.values():
            pool.stop()
        self.pools.clear()
        for one in self._engines:
            one._pool = None

    def close(self) -> None:
        self.free()
        self.ray.shutdown()
        self.raylets.shutdown()


def played(method: str, engine: Any, folder: Path | None = None, task: Any = None, rounds: int = ROUNDS) -> Any:
    """A run of a method on seven small clients in float64."""
    task = task or small_task("mlp", (9, 4, 16, 1, 7, 12, 5))
    return fedalloy.fit(method, task, rounds=rounds, engine=engine, metrics=("loss",), folder=folder, cohort=6)


def methods_equal_the_loop(cluster: Cluster, folder: Path) -> list[str]:
    """Nine methods give the loop's rows, models and states."""
    wrong = []
    for method in METHODS:
        stateful = fedalloy.fit(method, small_task(), rounds=1, engine="loop").trained.fed.algorithm.stateful
        engine = cluster.engine(3, states=folder / f"{method}-states" if stateful else None)
        found, expected = played(method, engine), played(method, "loop")
        wrong += [f"{method}: {place}" for place in differences(visible(found), visible(expected), TOLERANCE)]
    return wrong


def visible(result: Any) -> dict[str, Any]:
    """What a run leaves: its rows, its model and the clients' states."""
    ids = torch.arange(result.trained.fed.task.population)
    states = result.trained.states(ids) if result.trained.fed.algorithm.stateful else {}
    return {
        "rounds": {str(row["round"]): _numbers(row) for row in result.rounds()},
        "clients": {str(place): _numbers(row) for place, row in enumerate(result.clients())},
        "model": result.model,
        "states": {str(client): state for client, state in states.items()},
    }


def _numbers(row: Any) -> Any:
    """A row as tensors, so that numbers are compared within a tolerance."""
    if isinstance(row, dict):
        return {name: _numbers(value) for name, value in row.items()}
    if isinstance(row, list):
        plain = all(isinstance(one, int | float) for one in row)
        return torch.tensor(row, dtype=torch.float64) if plain else {str(i): _numbers(one) for i, one in enumerate(row)}
    return torch.tensor(row, dtype=torch.float64) if isinstance(row, int | float) else row


def files_of(folder: Path, states: Path | None = None) -> dict[str, bytes]:
    """The bytes that must be equal: records, the last checkpoint, and the newest state of every client."""
    last = max((folder / "checkpoints").glob("round-*.safetensors"))
    kept = [folder / "rounds.jsonl", folder / "clients.jsonl", folder / "status.json", last]
    newest = {one.name.partition("-")[0]: one for one in sorted(states.glob("*/*.state"), key=_round)} if states else {}
    return {one.name: one.read_bytes() for one in [*kept, *newest.values()]}


def _round(state: Path) -> int:
    return int(state.stem.partition("-")[2])


def unequal(one: dict[str, bytes], other: dict[str, bytes], what: str) -> list[str]:
    return [f"{what}: {name}" for name in sorted({*one, *other}) if one.get(name) != other.get(name)]


def any_number_of_workers(cluster: Cluster, folder: Path) -> list[str]:
    """One, two and three workers leave identical files, with both inner engines; also the states of clients."""
    wrong = []
    for method, inner in (("fedavg", "loop"), ("fedavg", "batched"), ("scaffold", "loop")):
        found = []
        for workers in (1, 2, 3):
            place = folder / f"{method}-{inner}-{workers}"
            states = Path(f"{place}-states") if method == "scaffold" else None
            played(method, cluster.engine(workers, inner, states), place)
            found.append(files_of(place, states))
        wrong += [*unequal(found[0], found[1], f"{place.name}, 1 and 2"), *unequal(found[0], found[2], place.name)]
    return wrong


@contextmanager
def planted(place: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


def sums_between_workers(cluster: Cluster, folder: Path) -> list[str]:
    """Added by the workers or by the driver: the same bits. The driver then receives one model."""
    played("fedavg", cluster.engine(3), folder / "here")
    with planted(ray_pool, "ADDED_HERE", 0):
        played("fedavg", cluster.engine(3), folder / "there")
        played("fedavg", cluster.engine(1), folder / "one")
    here, there, one = (files_of(folder / name) for name in ("here", "there", "one"))
    return [*unequal(here, there, "added by workers"), *unequal(here, one, "added by one worker")]


def faults_are_found(cluster: Cluster, folder: Path) -> list[str]:
    """What these checks compare with would show a fault: in the engine, in its handle, in the order of sums."""
    engine, cases = cluster.engine(3), {case.name: case for case in engine_cases()}
    wrong = [
        f"the fault {name} was not found"
        for name, case in (
            ("key_by_slot", "fedavg"),
            ("shuffled_clients", "lopsided weights"),
            ("call_order", "fedavg"),
        )
        if not check_engine(FAULTS[name](engine), [cases[case]])
    ]

    def as_they_come(pieces: Any, rounded: Any) -> Any:
        return ray_worker_add([{-number: leaves for number, leaves in some.items()} for some in pieces], rounded)

    ray_worker_add = ray_worker.add_blocks
    played("fedavg", engine, folder / "right")
    with planted(ray_pool, "add_blocks", as_they_come):
        played("fedavg", engine, folder / "reversed")
    same = files_of(folder / "right") == files_of(folder / "reversed")
    return [*wrong, *(["blocks added in another order were not found"] if same else [])]


def others_are_refused(cluster: Cluster, folder: Path) -> list[str]:
    """A worker with another fedalloy, torch or other data is refused by name, and so are states without a folder."""
    wrong = []
    for name in ray_pool.MUST_AGREE:
        told = ray_worker.identity_of

        def other(task: Any, files: Any, told: Any = told, name: str = name) -> dict[str, str]:
            return {**told(task, files), name: "another"}

        with planted(ray_pool, "identity_of", other):
            wrong += _refusal(lambda: played("fedavg", cluster.engine(1), rounds=1), f"has other {name}: ")
    wrong += _refusal(lambda: played("scaffold", cluster.engine(3), rounds=1), "several machines: set states")
    (folder / "foreign").mkdir()
    (folder / "foreign" / "notes.txt").write_text("mine")
    engine = cluster.engine(1, states=folder / "foreign")
    return wrong + _refusal(lambda: played("scaffold", engine, rounds=1), "holds other files")


def _refusal(run: Callable[[], Any], words: str) -> list[str]:
    try:
        run()
    except SpecError as error:
        return [] if words in str(error) else [f"refused in other words than '{words}': {error}"]
    return [f"not refused: '{words}'"]


class Deadly(nn.Module):
    """A linear model that ends its process ``deaths`` times, while files in ``folder`` count them; or that waits at one
    client while there is a file ``gate``."""

    def __init__(self, folder: str = "", deaths: int = 0, gate: str = "") -> None:
        super().__init__()
        self.layer, self.folder, self.deaths, self.gate = nn.Linear(4, 3), folder, deaths, gate

    def forward(self, x: Tensor) -> Tensor:
        chosen = bool(self.folder or self.gate) and float(x.max()) > 50
        if chosen and self.folder and len(list(Path(self.folder).iterdir())) < self.deaths:
            (Path(self.folder) / str(time.monotonic_ns())).touch()
            os._exit(3)
        if chosen and self.gate:
            _wait(lambda: not Path(self.gate).exists())
        scores: Tensor = self.layer(x.clamp(max=50))
        return scores


def deadly_task(folder: Path | None, deaths: int, gate: Path | str = "") -> Any:
    from dataclasses import replace

    from tests.engines.rounds import task_of

    made = task_of(lambda: Deadly(str(folder or ""), deaths, str(gate)), sizes=(5, 3, 6, 1, 4, 2))
    x = made.block.x.clone()
    x[int(made.block.start[2])] = 99.0
    return replace(made, block=replace(made.block, x=x))


def a_killed_actor_changes_nothing(cluster: Cluster, folder: Path) -> list[str]:
    """A worker that dies in the middle of a block: its blocks run again, the record says so, the files are equal."""
    (folder / "deaths").mkdir()
    calm, wounded = deadly_task(None, 0), deadly_task(folder / "deaths", 1)
    played("fedavg", cluster.engine(2), folder / "calm", calm, 2)
    played("fedavg", cluster.engine(2), folder / "wounded", wounded, 2)
    told = [json.loads(line) for line in (folder / "wounded" / "timings.jsonl").read_text().splitlines()]
    lost = [one for row in told for one in row.get("lost_workers", [])]
    wrong = [] if len(lost) == 1 and lost[0]["blocks"] else [f"one worker died, the record says {lost}"]
    return [*unequal(files_of(folder / "calm"), files_of(folder / "wounded"), "after a death"), *wrong]


def a_killed_node_changes_nothing(cluster: Cluster, folder: Path) -> list[str]:
    """A machine that is lost in the middle of a round; the others take over. Comes last: the node does not return."""
    task = deadly_task(None, 0, gate := folder / "gate")
    engine, lost_node = _spread(cluster, folder / "calm", task)
    cluster.others.remove(lost_node)

    def lose() -> None:
        theirs = {pid for pid in _workers() if _parent(pid) in _raylets_of(lost_node)}
        cluster.raylets.remove_node(lost_node, allow_graceful=False)
        _wait(lambda: not any(map(_alive, theirs)))  # a worker that lives on for a moment could answer until the end
        gate.unlink()

    thread = threading.Thread(target=lose)

    def watcher(event: Any) -> None:
        if event.progress.round == 1:  # the second round does not end before the machine is lost
            gate.touch()
            thread.start()

    fedalloy.fit(
        "fedavg", task, rounds=3, engine=engine, metrics=("loss",), folder=folder / "lost", cohort=6, watcher=watcher
    )
    thread.join()
    told = [json.loads(line) for line in (folder / "lost" / "timings.jsonl").read_text().splitlines()]
    lost = [one for row in told for one in row.get("lost_workers", [])]
    wrong = [] if lost else ["a node was lost, the record does not say so"]
    return [*unequal(files_of(folder / "calm"), files_of(folder / "lost"), "after the loss of a node"), *wrong]


def _spread(cluster: Cluster, folder: Path, task: Any) -> tuple[LongLived, Any]:
    """An engine with a worker on a machine that may be lost, and that machine; Ray spreads workers as it can."""
    for attempt in range(9):
        engine = cluster.engine(3)
        played("fedavg", engine, folder if attempt == 0 else folder.with_name(f"calm-{attempt}"), task, 3)
        assert engine._pool is not None
        used = {member.node for member in engine._pool.members}
        for node in cluster.others:
            if node.node_id in used:
                return engine, node
        engine.end()
    raise RuntimeError("all workers are on the machine of the driver")


class KilledDriver:
    """Runs of the same recipe in processes of their own, which can be killed."""

    def __init__(self, cluster: Cluster, folder: Path, rounds: int) -> None:
        folder.mkdir()
        self.folder, self.log = folder, folder / "log"
        self.line = [
            sys.executable, "-m", "fedalloy", "run", str(RECIPE), "--engine", "ray",
            "--set", f"engine.address={cluster.address}", "--set", "engine.workers=1",
            "--set", "engine.cpus_per_worker=0.25", "--set", "engine.block=2", "--set", "algorithm.name=scaffold",
            "--set", "run.checkpoint_every=0.05", "--set", "run.target=2", "--set", f"run.rounds={rounds}",
        ]  # fmt: skip

    def begin(self, place: str, *more: str) -> subprocess.Popen[bytes]:
        told = [*self.line, "--set", f"engine.states={self.folder / place}-states", "-o", str(self.folder / place)]
        return subprocess.Popen([*told, *more], stdout=subprocess.DEVNULL, stderr=self.log.open("ab"))

    def kill(self, number: int) -> list[str] | None:
        """Begin or resume the run and kill it after its next checkpoint; None if it had ended before."""
        before, others = newest(self.folder / "cut") if number else 0, _workers()
        child = self.begin("cut", *(["--resume"] if number else []))
        _wait(lambda: newest(self.folder / "cut") > before or child.poll() is not None)
        if child.poll() is None:
            child.send_signal(signal.SIGSTOP)  # looking for its workers takes a moment, in which it could end by itself
        _wait(lambda: bool(_workers() - others) or child.poll() is not None, 5.0, fail=False)
        workers = _workers() - others
        child.send_signal(signal.SIGKILL)
        if child.wait() > 0:
            return [f"a run failed: {self.log.read_text()[-800:]}"]
        if child.returncode == 0 or not workers:  # a run ends its workers before it ends itself
            return None
        gone = _wait(lambda: not any(map(_alive, workers)), fail=False)
        return [] if gone else [f"workers outlived their driver: {[pid for pid in workers if _alive(pid)]}"]

    def result(self) -> list[str]:
        """Resume the run until it ends, and compare with one that was not killed."""
        if self.begin("cut", "--resume").wait() != 0 or self.begin("whole").wait() != 0:
            return [f"a run failed: {self.log.read_text()[-800:]}"]
        one, other = (files_of(self.folder / name, self.folder / f"{name}-states") for name in ("whole", "cut"))
        return unequal(one, other, "killed and resumed")


def a_killed_driver_resumes(cluster: Cluster, folder: Path, kills: int = KILLS) -> list[str]:
    """A driver killed with SIGKILL and resumed: identical files, and its workers end with it. On a busy machine a run
    may end before it is killed; then a longer one is tried."""
    for pool in cluster.pools.values():  # replacements of dead workers are not counted as the killed driver's
        started = list(pool._starting)
        cluster.ray.wait(started, num_returns=len(started), timeout=PATIENCE) if started else None
    for rounds in LENGTHS:
        driver = KilledDriver(cluster, folder / str(rounds), rounds)
        wrong: list[str] | None = []
        for number in range(kills):
            if wrong == []:
                wrong = driver.kill(number)
        if wrong is not None:
            return wrong or driver.result()
    return [f"the run ended before it was killed, even after {LENGTHS[-1]} rounds"]


def signals_leave_nobody(cluster: Cluster, folder: Path) -> list[str]:
    """Ctrl-C, SIGTERM and SIGKILL of a driver with a Ray of its own leave no process behind."""
    wrong = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        place = folder / number.name
        line = [
            sys.executable, "-m", "fedalloy", "run", str(RECIPE), "--engine", "ray", "--set", "engine.workers=1",
            "--set", "run.rounds=100000", "--set", "run.checkpoint_every=0.05", "--set", "run.target=2",
            "-o", str(place),
        ]  # fmt: skip
        marker = f"FEDALLOY_TEST={os.getpid()}-{number.name}"
        env = {**os.environ, "FEDALLOY_TEST": marker.partition("=")[2], "RAY_ADDRESS": ""}
        child = subprocess.Popen(
            line, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        _wait(partial(_begun, place, child))
        started = _marked(marker)
        os.killpg(child.pid, number) if number == signal.SIGINT else child.send_signal(number)
        child.wait()
        if not _wait(partial(_gone, marker), fail=False):
            wrong.append(f"{number.name}: {len(_marked(marker))} of {len(started)} processes were left")
        if number != signal.SIGKILL and json.loads((place / "status.json").read_text())["state"] != "stopped":
            wrong.append(f"{number.name}: the run did not end as stopped")
    return wrong


def newest(folder: Path) -> int:
    found = [int(file.stem.split("-")[1]) for file in (folder / "checkpoints").glob("round-*.safetensors")]
    return max(found, default=0)


def _workers() -> set[int]:
    """The processes of all workers of this process's own raylets; other programs may have workers, too."""
    return {pid for pid in _named("ray::BlockWorker") if _alive(pid) and _parent(_parent(pid)) == os.getpid()}


def _raylets_of(node: Any) -> set[int]:
    return {info.process.pid for info in node.all_processes["raylet"]}


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _named(text: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and text in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _marked(marker: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and marker in (folder / "environ").read_text().split("\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return [pid for pid in found if _alive(pid)]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _begun(place: Path, child: subprocess.Popen[bytes]) -> bool:
    """Whether a run has a checkpoint, or has ended."""
    return newest(place) > 0 or child.poll() is not None


def _gone(marker: str) -> bool:
    return not _marked(marker)


def _wait(condition: Callable[[], bool], seconds: float = PATIENCE, fail: bool = True) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            if fail:
                raise TimeoutError("nothing happened")
            return False
        time.sleep(0.02)
    return True


def one_kill(cluster: Cluster, folder: Path) -> list[str]:
    """A driver killed once."""
    return a_killed_driver_resumes(cluster, folder, 1)


BRIEF: tuple[Check, ...] = (
    methods_equal_the_loop, any_number_of_workers, sums_between_workers, faults_are_found, others_are_refused,
    a_killed_actor_changes_nothing, one_kill, a_killed_node_changes_nothing,
)  # fmt: skip
WHOLE: tuple[Check, ...] = (*BRIEF[:-2], a_killed_driver_resumes, signals_leave_nobody, BRIEF[-1])


def conform(checks: tuple[Check, ...], folder: Path) -> dict[str, list[str]]:
    """What is wrong, by check; a check that fails has the error's text."""
    cluster, found = Cluster(), dict[str, list[str]]()
    try:
        for check in checks:
            place, began = folder / check.__name__, time.perf_counter()
            place.mkdir()
            try:
                found[check.__name__] = check(cluster, place)
            except Exception as error:
                found[check.__name__] = [f"{type(error).__name__}: {error}"]
            print(f"{check.__name__}: {time.perf_counter() - began:.1f} s {found[check.__name__] or 'ok'}", flush=True)
    finally:
        cluster.close()
    return found

"""The engine ``ray``: the loop's numbers, whoever runs a block and however often; states in a folder; refusals."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedalloy
from fedalloy import algorithms
from fedalloy.core import tree
from fedalloy.core.errors import CheckpointError, ClientError, SpecError
from fedalloy.core.types import Cohort
from fedalloy.engines.cluster import pool as ray_pool
from fedalloy.engines.cluster import session as ray_session
from fedalloy.engines.cluster import worker as ray_worker
from fedalloy.engines.cluster.session import ClusterError
from fedalloy.engines.cluster.states import HELD, OwnedStates, StateFiles
from fedalloy.engines.cluster.worker import add_blocks, partial_sum
from fedalloy.engines.loop import Loop
from fedalloy.engines.ray import Ray
from fedalloy.engines.shared_cohort import Overwritten
from fedalloy.methods.published import fedavg
from fedalloy.testing import FAULTS, HANDLE_FAULTS, check_engine, engine_cases, small_task, work
from fedalloy.testing.comparing import differences
from tests.engines.fake_ray import OTHERS, FakeRay, failed
from tests.engines.rounds import gaps, play

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs pip install 'fedalloy[ray]'")
ALGORITHM = algorithms.scaffold(lr=0.3, batch_size=8)
CASES = {case.name: case for case in engine_cases()}


@pytest.fixture
def ray(monkeypatch) -> FakeRay:
    """Workers in this process."""
    return without_ray(monkeypatch)


def without_ray(monkeypatch, **settings) -> FakeRay:
    fake = FakeRay(**settings)
    monkeypatch.setattr(ray_pool, "load_ray", lambda: fake)
    monkeypatch.setattr("fedalloy.engines.ray.connect", lambda *_: False)
    monkeypatch.setattr(Ray, "_cores", lambda self: self._threads or 8)  # as the fake says
    return fake


# ---------------------------------------------------------------------------------------------- the real thing


def test_on_a_cluster_of_three_nodes(root):
    """Nine methods, one to three workers, a killed actor, a killed node, a killed driver, planted faults: everything is
    in one process of its own, because starting raylets takes most of the time."""
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    line = [
        sys.executable,
        "-m",
        "benchmarks.ray",
        "--conform",
        *([] if "FEDALLOY_LONG" in os.environ else ["--brief"]),
    ]
    # The folder of a test has a long name, and the path of a socket may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="ray-") as short:
        env["TMPDIR"] = short
        done = subprocess.run(line, cwd=root, env=env, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


# ---------------------------------------------------------------------------------------------- the same numbers


def test_it_does_what_the_loop_does(ray):
    assert check_engine(Ray(workers=2, block=2)) == []


STACKED = ("fedavg", "scaffold", "batchnorm and state", "failing links", "fedevg", "wire with memory")


def test_stacked_blocks_do_what_the_loop_does(ray):
    engine = Ray(workers=2, block=2, inner={"kind": "batched", "memory_mb": 64})
    assert check_engine(engine, [CASES[name] for name in STACKED]) == []


def test_sums_between_workers_are_the_same_bits(ray, monkeypatch):
    task, engine = small_task("mlp"), Ray(workers=3, block=2)
    weights = torch.rand(5, dtype=torch.float64)
    here = play(engine, ALGORITHM, task).cohort.combine("delta", weights)
    monkeypatch.setattr(ray_pool, "ADDED_HERE", 0)
    monkeypatch.setattr(tree, "COLUMNS", 7)  # so that every worker has some columns
    there = play(engine, ALGORITHM, task).cohort.combine("delta", weights)
    assert list(differences(here, there)) == []


@pytest.mark.parametrize("name", ["key_by_slot", "forgotten_mask", "lost_client_state", "shuffled_clients"])
def test_a_fault_planted_into_it_is_caught(name, ray):
    case = "wavering steps" if name != "shuffled_clients" else "lopsided weights"
    assert check_engine(FAULTS[name](Ray(workers=2, block=2)), [CASES[case]])


@pytest.mark.parametrize("name", HANDLE_FAULTS)
def test_a_handle_that_answers_wrong_is_caught(name, ray):
    assert check_engine(HANDLE_FAULTS[name](Ray(workers=2, block=2)), [CASES["scaffold"]])


@settings(max_examples=20)
@given(st.data())
def test_whoever_dies_whenever_the_bits_are_the_same(data):
    """Workers die, lose their object store or report what fails first on a machine that ends, at any call of a round;
    answers come in any order; one to three workers."""
    deaths, losses = (data.draw(st.sets(st.integers(0, 40), max_size=most)) for most in (3, 2))
    reported = data.draw(st.dictionaries(st.integers(0, 40), st.sampled_from(REPORTED).map(failed), max_size=2))
    chosen = data.draw(st.randoms(use_true_random=False))
    workers = data.draw(st.integers(1, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_pool, "TRIES", 99)
        patch.setattr(ray_pool, "ADDED_HERE", data.draw(st.sampled_from([0, 1 << 30])))
        patch.setattr(ray_worker, "SUMMED_AT_ONCE", data.draw(st.sampled_from([30, 1 << 26])))
        expected = everything_of(patch, FakeRay(), 1)
        fake = FakeRay(lambda number, method: number in deaths, losses.__contains__, chosen.choice)
        fake.faults = lambda number, method: reported.get(number)
        assert list(differences(everything_of(patch, fake, workers), expected)) == []


def everything_of(patch, fake: FakeRay, workers: int):
    patch.setattr(ray_pool, "load_ray", lambda: fake)
    patch.setattr("fedalloy.engines.ray.connect", lambda *_: False)
    found = play(Ray(workers=workers, block=2), ALGORITHM, small_task("mlp"))
    cohort, like = found.cohort, found.cohort.template("delta")
    weights, pieces = torch.arange(1.0, 6.0, dtype=torch.float64) / 7, cohort.chunks(("delta", "control"))
    return {
        "sum": cohort.combine("delta", weights), "rows": cohort.rows("control", cohort.ids.flip(0)),
        "dots": cohort.dots("delta", {name: torch.ones(leaf.shape, dtype=leaf.dtype) for name, leaf in like.items()}),
        "columns": {str(chunk): dict(zip("ab", some, strict=True)) for chunk, some in pieces},
        "states": {str(client): state for client, state in found.states.items()}, "stats": cohort.stats,
    }  # fmt: skip


def test_a_block_that_kills_twice_stops_the_run_and_names_its_clients(monkeypatch):
    without_ray(monkeypatch, dies=lambda number, method: method == "run")
    with pytest.raises(ClientError, match=r"its worker died 2 times with the clients \[0, 1\]"):
        play(Ray(workers=1, block=2), ALGORITHM, small_task())


def test_a_worker_that_loses_its_object_store_is_a_lost_worker_and_no_failed_client(monkeypatch):
    """The machine ends a little later than its object store: a block that could not begin there runs elsewhere."""
    without_ray(monkeypatch, breaks=lambda number: number == 2)
    engine = Ray(workers=2, block=2)
    found = play(engine, ALGORITHM, small_task())
    assert gaps(found, play(Loop(), ALGORITHM, small_task()), 1e-12) == []
    (lost,) = engine.incidents()["lost_workers"]
    assert "Broken pipe" in lost["why"]


REPORTED = (
    BrokenPipeError(32, "Broken pipe"), ConnectionResetError(104, "Connection reset by peer"), OSError("Broken pipe"),
    EOFError("end of file"), TimeoutError("no answer"), MemoryError("no memory"), RuntimeError("the store is closed"),
    ValueError("whatever comes first"), ray_worker.StoreLost("OSError: Broken pipe"),
    *(kind("reported by Ray") for kind in OTHERS.values()),
)  # fmt: skip
"""What a worker may report whose machine is ending."""


def once(method: str, error: Exception):
    """The first call of a method reports an error."""
    left = [error]
    return lambda _, called: left.pop() if called == method and left else None


def reports_of(cause: Exception, method: str):
    """The forms in which such an error arrives: of a call, of Ray itself, and for blocks as that of a client."""
    yield failed(cause)
    if type(cause) in OTHERS.values():
        yield cause
        yield failed(RuntimeError(f"{type(cause).__name__}: {cause}"))
    if method == "run":
        yield from (ClientError(stage, RuntimeError(f"OSError: {cause}"), client=0) for stage in ("worker", "train"))


@pytest.mark.parametrize("method", ["prepare", "run", "partials", "add", "rows", "columns", "dots"])
def test_whatever_a_worker_reports_whose_machine_is_ending_it_is_lost(method, monkeypatch):
    """The bits are the same, no client is blamed and nobody is refused."""
    monkeypatch.setattr(ray_pool, "ADDED_HERE", 0)
    expected = everything_of(monkeypatch, FakeRay(), 1)
    for cause in REPORTED:
        for error in reports_of(cause, method):
            fake = FakeRay(faults=once(method, error))
            assert list(differences(everything_of(monkeypatch, fake, 2), expected)) == [], error
            assert fake.started <= 3, f"{error}: {fake.started - 3} workers were lost for nothing"


def test_an_error_of_a_machine_that_is_well_is_the_clients(monkeypatch):
    """Also one whose words sound like a lost connection: it comes back with its client at the first time."""
    error = ClientError("train", OSError("Broken pipe"), client=3)
    fake = without_ray(monkeypatch, faults=once("run", error), ending=False)
    with pytest.raises(ClientError, match=r"client 3 .* Broken pipe"):
        play(Ray(workers=2, block=2), ALGORITHM, small_task())
    assert fake.started == 2


@pytest.mark.parametrize("error", [ModuleNotFoundError("no module 'mine'"), FileNotFoundError(2, "none", "x.csv")])
def test_a_task_that_cannot_be_loaded_is_refused_at_once(error, monkeypatch):
    fake = without_ray(monkeypatch, faults=lambda number, method: failed(error), ending=False)
    monkeypatch.setattr(ray_pool.WorkerPool, "_reads", lambda *_: True)
    with pytest.raises(SpecError, match=r"a worker cannot load the task .*every machine the same files"):
        play(Ray(workers=2), ALGORITHM, small_task())
    assert fake.started == 2


def test_a_task_that_cannot_be_sent_is_refused_with_the_reason(ray):
    task = small_task()
    object.__setattr__(task.objective, "lock", threading.Lock())
    with pytest.raises(SpecError, match=r"engine 'ray': the task cannot be sent to workers \(TypeError: .*lock.*open"):
        play(Ray(workers=1), ALGORITHM, task)


@pytest.mark.parametrize("given", [{"contributions_mb": 0.0}, {"contributions_folder": "/somewhere"}], ids=str)
def test_a_place_for_contributions_is_refused_because_they_stay_with_the_workers(given):
    (name,) = given
    with pytest.raises(SpecError, match=f"{name} has no effect with the engine Ray"):
        fedalloy.fit(ALGORITHM, small_task(), rounds=1, engine="ray", **given)


def test_workers_for_which_this_machine_has_no_room_are_refused_at_once(monkeypatch):
    fake = without_ray(monkeypatch)
    with pytest.raises(SpecError, match=r"no worker fits .* 1 CPUs and 1 GPUs each, the cluster has 8 CPUs and 0 GPUs"):
        play(Ray(workers=1, gpus_per_worker=1), ALGORITHM, small_task())
    assert fake.started == 0


def test_more_workers_than_cores_are_told_and_not_waited_for(monkeypatch, caplog):
    """They start one after another: the run would say nothing for minutes."""
    without_ray(monkeypatch)
    engine = Ray(workers=5)
    engine.limit_threads(2)
    waiting: list[int] = []
    real = ray_pool.WorkerPool.run_round

    def run_round(self, *given: Any) -> None:
        waiting.append(len(self._starting))
        real(self, *given)

    monkeypatch.setattr(ray_pool.WorkerPool, "run_round", run_round)
    play(engine, ALGORITHM, small_task())
    assert waiting == [3]
    assert "5 workers of 1 CPUs each share 2 cores of this machine: more than 2 take turns" in caplog.text


def test_a_run_that_waits_for_its_workers_says_so(monkeypatch, caplog):
    fake = without_ray(monkeypatch)
    slow: Any = iter([([], [])] * 2)
    real = fake.wait
    monkeypatch.setattr(fake, "wait", lambda references, **given: next(slow, None) or real(references, **given))
    play(Ray(workers=2), ALGORITHM, small_task())
    assert caplog.text.count("0 of 2 workers have started; 180 s are left") == 2


@pytest.mark.parametrize(("workers", "each", "cores"), [(1, 0.25, 1), (3, 0.5, 2), (1, 2.5, 3), (2, 2, 4)])
def test_a_ray_of_its_own_has_whole_cores(ray, monkeypatch, workers, each, cores):
    """Ray refuses a machine with two and a half of them."""
    asked: list[Any] = []

    def connected(*given: Any) -> bool:
        asked.append(given)
        return False

    monkeypatch.setattr("fedalloy.engines.ray.connect", connected)
    play(Ray(workers=workers, cpus_per_worker=each), ALGORITHM, small_task())
    assert [(given[1], type(given[1])) for given in asked] == [(cores, int)]


def test_there_are_as_many_workers_as_fit_also_into_a_ray_of_its_own(monkeypatch):
    """Not as many as there are cores: on a machine with fewer GPUs the others would wait for ever."""
    fake = without_ray(monkeypatch)
    monkeypatch.setattr(fake, "cluster_resources", lambda: {"CPU": 3.0})
    play(Ray(), ALGORITHM, small_task())
    assert fake.started == 3


def test_workers_that_never_begin_end_the_run_with_the_reason(monkeypatch):
    fake = without_ray(monkeypatch, faults=lambda number, method: failed(EOFError("end of file")))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(ClusterError, match=r"workers die as soon as they start \(.*EOFError: end of file\)"):
        play(Ray(workers=2), ALGORITHM, small_task())
    assert fake.started == 2 + ray_pool.STARTS + 2 * 2


def test_an_error_in_an_answer_of_a_machine_that_is_well_is_raised(monkeypatch):
    without_ray(monkeypatch, faults=once("rows", failed(KeyError("control"))), ending=False)
    cohort = play(Ray(workers=2, block=2), ALGORITHM, small_task()).cohort
    with pytest.raises(KeyError, match="control"):
        cohort.rows("control", cohort.ids)


def test_workers_that_die_whenever_they_are_asked_end_the_run(monkeypatch):
    without_ray(monkeypatch, dies=lambda number, method: method == "rows")
    cohort = play(Ray(workers=2, block=2), ALGORITHM, small_task()).cohort
    with pytest.raises(ClusterError, match=r"workers died 5 times while they were asked 'rows' .*dead"):
        cohort.rows("control", cohort.ids)


def test_deaths_are_told_once(monkeypatch):
    without_ray(monkeypatch, dies=lambda number, method: method == "run" and number < 3)
    engine = Ray(workers=2, block=2)
    found = play(engine, ALGORITHM, small_task())
    assert gaps(found, play(Loop(), ALGORITHM, small_task()), 1e-12) == []
    (lost,) = engine.incidents()["lost_workers"]
    assert lost["blocks"] == [0]
    assert engine.incidents() == {}


# ---------------------------------------------------------------------------------------------- blocks


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(0, 2**20))
def test_blocks_add_up_to_the_whole(sizes, seed):
    clients, draw = sum(sizes), torch.Generator().manual_seed(seed)
    payload = {
        "p": {
            "w": torch.randn(clients, 3, 2, generator=draw),
            "half": torch.randn(clients, 5, generator=draw).to(torch.bfloat16),
            "count": torch.randint(0, 9, (clients,), generator=draw),
        }
    }
    weights = torch.rand(clients, generator=draw, dtype=torch.float64)
    pieces, begin = [], 0
    for number, size in enumerate(sizes):
        some = torch.arange(begin, begin + size)
        block = Cohort(some, {"p": tree.rows(payload["p"], some)})
        pieces.append({number: partial_sum(block, "p", None, weights[some])})
        begin += size
    dtypes = {name: leaf.dtype for name, leaf in payload["p"].items()}
    found, expected = add_blocks(pieces[::-1], dtypes), tree.combine(payload["p"], weights)
    assert torch.equal(found["count"], expected["count"])
    assert found["half"].dtype == torch.bfloat16
    assert list(differences({"w": found["w"]}, {"w": expected["w"]}, 1e-5)) == []


def test_contributions_of_an_earlier_round_say_so(ray):
    engine = Ray(workers=2, block=2)
    first = play(engine, ALGORITHM, small_task()).cohort
    kept = first.keep()
    weights = torch.ones(len(first), dtype=torch.float64)
    before = first.combine("delta", weights)
    products, nobody = first.dots("delta", before), first.rows("delta", first.ids[:0])
    play(engine, ALGORITHM, small_task(), work(0, 1), round=2)
    with pytest.raises(Overwritten, match="keep\\(\\) copies them"):
        first.combine("delta", weights)
    assert list(differences(kept.combine("delta", weights), before)) == []
    assert list(differences(kept.dots("delta", before), products)) == []
    assert [leaf.shape for leaf in nobody.values()] == [(0, *leaf.shape) for leaf in before.values()]


def test_a_replaced_clients_weights_are_added_in_float64(ray):
    found = play(Ray(workers=2, block=2), ALGORITHM, small_task()).cohort.alone("delta", "delta")
    ones = {name: torch.ones(leaf.shape, dtype=leaf.dtype) for name, leaf in found.template("delta").items()}
    weights = torch.full((len(found),), 1.0)
    weights[0] = 2.0**24  # and 1 more is no number of float32
    summed = found.resend(found.ids, {"delta": ones}).combine("delta", weights)
    assert all(bool((leaf == 2.0**24 + len(found) - 1).all()) for leaf in summed.values())


def test_blocks_do_not_depend_on_the_workers(ray):
    for cohort, inner, block, expected in (
        (6, "loop", None, [1] * 6), (600, "loop", None, [3] * 200), (40, "batched", None, [3] * 13 + [1]),
        (7, "loop", 3, [3, 3, 1]),
    ):  # fmt: skip
        engine = Ray(workers=5, inner=inner, block=block)
        ids = tuple(range(cohort))
        orders = engine._orders(small_task(sizes=(1,) * cohort), {one: {} for one in ids}, work(*ids))
        assert [len(order[0]) for order in orders] == expected


# ---------------------------------------------------------------------------------------------- states in a folder


def test_a_state_is_read_as_it_was_written(tmp_path):
    files = StateFiles(tmp_path)
    state = {
        "solver": {"w": torch.randn(2, 3).to(torch.bfloat16), "n": 3, "x": 0.1, "on": True, "none": None},
        "wire": {},
    }
    files.write(1234, 7, state)
    assert list(differences(files.read(1234, 7), state)) == []
    assert list(files.present()) == [(1234, 7)]
    path = files.path(1234, 7)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="the state of client 1234 from round 7 cannot be read"):
        files.read(1234, 7)
    with pytest.raises(SpecError, match="a state holds a str"):
        files.write(1, 1, {"text": "no"})


def test_a_folder_belongs_to_one_run(tmp_path):
    OwnedStates(StateFiles(tmp_path / "a")).claim("runs/one")
    OwnedStates(StateFiles(tmp_path / "a")).claim("runs/one")
    with pytest.raises(SpecError, match=r"holds the states of another run \(runs/one; this one is runs/two\)"):
        OwnedStates(StateFiles(tmp_path / "a")).claim("runs/two")
    (tmp_path / "a" / "run.json").write_text("")  # as another run leaves it that is killed while it begins
    with pytest.raises(SpecError, match=r"run.json cannot be read: remove it if no run uses the folder"):
        OwnedStates(StateFiles(tmp_path / "a")).claim("runs/one")


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_of_states_that_cannot_be_is_refused_in_words(name, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match=r"states = '.*' cannot be used"):
        OwnedStates(StateFiles(tmp_path / name)).claim("a")


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_a_place_that_takes_no_states_leaves_no_run_behind(number, tmp_path, ray, monkeypatch):
    """A folder on a disk that is read-only or full: with space, or another one, the same command begins the run."""
    given: dict[str, Any] = {"folder": tmp_path / "run", "rounds": 1}

    def begin():
        return fedalloy.fit("scaffold", small_task(), engine=Ray(workers=1, states=str(tmp_path / "states")), **given)

    def refused(self: Path, content: bytes) -> int:
        self.touch()
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", refused)
        with pytest.raises((SpecError, OSError), match=r"cannot be used|No space left"):
            begin()
    assert not (tmp_path / "run").exists()
    assert begin().status == "finished"


def test_a_disk_that_fills_while_a_folder_is_taken_leaves_it_to_nobody(tmp_path, monkeypatch):
    owned = OwnedStates(StateFiles(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("fedalloy.engines.cluster.states.json.dumps", lambda *_: full())
        with pytest.raises(OSError, match="No space left"):
            owned.claim("a")
    owned.claim("b")


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_a_killed_worker_left_half_written_is_removed(tmp_path):
    files = StateFiles(tmp_path / "a")
    OwnedStates(files).claim("runs/one")
    files.write(3, 1, {"n": 1})
    left = files.path(3, 2).with_suffix(".0123.part")
    left.write_bytes(b"half")
    OwnedStates(files).claim("runs/one")
    assert not left.exists()
    assert files.read(3, 1) == {"n": 1}


def test_a_full_disk_of_states_interrupts_the_run_which_then_resumes(tmp_path, ray, monkeypatch):
    """It leaves nothing half written, and the resumed run is that of the loop."""
    task, options, sync = small_task(), {"workers": 2, "block": 2, "states": str(tmp_path / "states")}, os.fsync
    place: dict[str, Any] = {"folder": tmp_path / "run", "rounds": 3, "engine": "ray", "engine_options": options}

    def full(number: int) -> None:
        if "-2." in os.readlink(f"/proc/self/fd/{number}"):  # the states of the second round
            raise OSError(28, "No space left on device")
        sync(number)

    with monkeypatch.context() as patch:
        patch.setattr("fedalloy.engines.cluster.states.os.fsync", full)
        with pytest.raises(ClientError, match="No space left on device"):
            fedalloy.fit("scaffold", task, **place)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "interrupted"
    assert not list((tmp_path / "states").glob("*/*.part"))
    found = fedalloy.fit("scaffold", task, **place, resume=True)
    expected = fedalloy.fit("scaffold", task, rounds=3, engine="loop")
    assert list(differences(found.model, expected.model, 1e-12)) == []


def test_two_runs_of_one_process_do_not_share_a_folder(tmp_path, ray):
    """Also without run folders: the second would overwrite what the first one's result reads."""
    task, options = small_task(), {"workers": 1, "states": str(tmp_path / "states")}
    first = fedalloy.fit("scaffold", task, rounds=2, engine="ray", engine_options=options)
    before = {str(client): state for client, state in first.trained.states(torch.arange(2)).items()}
    with pytest.raises(SpecError, match="holds the states of another run"):
        fedalloy.fit("scaffold", task, rounds=2, seed=1, engine="ray", engine_options=options)
    after = {str(client): state for client, state in first.trained.states(torch.arange(2)).items()}
    assert list(differences(before, after)) == []


def test_a_run_in_a_folder_of_the_same_name_elsewhere_is_another_run(tmp_path, ray):
    """Two machines with run folders of their own, at the same place, and one folder of states."""
    task, options = small_task(), {"workers": 1, "states": str(tmp_path / "states")}
    given: dict[str, Any] = {"rounds": 2, "engine": "ray", "engine_options": options, "folder": tmp_path / "run"}
    fedalloy.fit("scaffold", task, **given)
    (tmp_path / "run").rename(tmp_path / "on the other machine")
    with pytest.raises(SpecError, match=r"of another run \(.*run, begun as \w+; this one is .*If that run is gone"):
        fedalloy.fit("scaffold", task, **given)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "on the other machine").rename(tmp_path / "run")
    fedalloy.fit("scaffold", task, **{**given, "rounds": 3}, resume=True)


def test_a_run_that_an_earlier_version_began_keeps_its_folder_of_states(tmp_path, ray):
    task, options = small_task(), {"workers": 1, "states": str(tmp_path / "states")}
    given: dict[str, Any] = {"engine": "ray", "engine_options": options, "folder": tmp_path / "run"}
    fedalloy.fit("scaffold", task, rounds=2, **given)
    for place, entry in (("run/environment.json", "run_id"), ("states/run.json", "run")):
        told = json.loads((tmp_path / place).read_text())
        told[entry] = str(tmp_path / "run") if entry == "run" else None
        (tmp_path / place).write_text(json.dumps(told))
    resumed = fedalloy.fit("scaffold", task, rounds=3, **given, resume=True)
    assert (resumed.status, len(list(resumed.rounds()))) == ("finished", 3)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.sets(st.integers(0, 5)), st.booleans()), max_size=12))
def test_states_that_a_kept_checkpoint_names_are_never_removed(tmp_path_factory, rounds):
    """Every round writes some clients' states; some rounds are followed by a checkpoint."""
    owned = OwnedStates(StateFiles(tmp_path_factory.mktemp("states")))
    owned.claim("run")
    current: dict[int, int] = {}
    saved: list[dict[int, int]] = []
    for number, (clients, checkpoint) in enumerate(rounds, start=1):
        for client in clients:
            owned.files.write(client, number, {"round": number})
        owned.wrote({client: {"round": number} for client in clients})
        current |= dict.fromkeys(clients, number)
        if checkpoint:
            saved.append(dict(current))
            owned.checkpointed(number, {client: {"round": made} for client, made in current.items()})
    needed = {pair for named in saved[-HELD:] for pair in named.items()} | set(current.items())
    there = set(owned.files.present())
    assert needed <= there
    if len(saved) >= HELD and saved[-1] == current:
        assert there == needed


def test_a_run_with_states_in_a_folder_is_the_loop_and_resumes(tmp_path, ray):
    task = small_task()

    def run(name: str, rounds: int, resume: bool = False, **given):
        return fedalloy.fit(
            "scaffold", task, rounds=rounds, folder=tmp_path / name, resume=resume, metrics=("loss",), cohort=4, **given
        )

    options: dict[str, Any] = {"workers": 2, "block": 2, "states": str(tmp_path / "states")}
    run("cut", 3, engine="ray", engine_options=options)
    found = run("cut", 6, resume=True, engine="ray", engine_options={**options, "workers": 3})
    expected = run("loop", 6, engine="loop")
    assert list(differences(found.model, expected.model, 1e-12)) == []
    ids = torch.arange(task.population)
    theirs, ours = ({str(c): s for c, s in one.trained.states(ids).items()} for one in (found, expected))
    assert list(differences(theirs, ours, 1e-12)) == []
    with pytest.raises(CheckpointError, match="block"):
        run("cut", 7, resume=True, engine="ray", engine_options={**options, "block": 3})


@pytest.mark.parametrize(
    ("began", "then", "words"),
    [
        ({"states": "a"}, {}, "not in its folder, but where the engine kept them"),
        ({"states": "a"}, None, "not in its folder, but where the engine kept them"),
        ({"states": "a"}, {"states": "b"}, "states of 2 clients are missing in states = .*client . from round 1"),
        (None, {"states": "a"}, "are in its folder, and engine Ray keeps them elsewhere"),
    ],
)
def test_states_are_looked_for_where_they_are_before_a_run_is_resumed(began, then, words, tmp_path, ray):
    """None is the loop, with the states on disk; a run in memory may be resumed with a folder."""

    def run(given: dict[str, str] | None, **more):
        places: dict[str, Any] = {name: str(tmp_path / place) for name, place in (given or {}).items()}
        engine = "loop" if given is None else Ray(workers=1, **places)
        more |= {"client_memory_mb": 0.0} if began is None else {}
        return fedalloy.fit("scaffold", small_task(), folder=tmp_path / "run", cohort=2, engine=engine, **more)

    run(began, rounds=1)
    before = (tmp_path / "run" / "status.json").read_text()
    with pytest.raises(CheckpointError, match=words):
        run(then, rounds=2, resume=True, allow_engine_change=True)
    assert (tmp_path / "run" / "status.json").read_text() == before


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inner": "lop"}, "inner = 'lop' is not possible: did you mean 'loop'"),
        ({"inner": {"kind": "batched", "memory": 3}}, "unknown argument 'memory'; did you mean 'memory_mb'"),
        ({"inner": {"kind": "loop", "block": 3}}, "inner 'loop' has no arguments, got block"),
        ({"inner": {"kind": "batched", "block": 0}}, "memory_mb and block must be above 0"),
        ({"states": ""}, "states is empty: name a folder"),
        ({"workers": 0}, "workers must be 1 or more, or none, got 0"),
        ({"block": -1}, "block must be 1 or more, or none, got -1"),
        ({"cpus_per_worker": 0}, "cpus_per_worker must be above 0"),
        ({"gpus_per_worker": 1.5}, "gpus_per_worker above 1 must be whole, got 1.5"),
        ({"adress": "auto"}, "did you mean 'address'"),
    ],
)
def test_options_that_cannot_be_are_refused(options, words):
    with pytest.raises(SpecError, match=words.replace("(", r"\(")):
        Ray(**options)


@pytest.mark.parametrize("name", ray_pool.MUST_AGREE)
def test_a_worker_that_differs_is_refused_by_name(name, ray, monkeypatch):
    told = ray_worker.identity_of
    monkeypatch.setattr(ray_pool, "identity_of", lambda *given: {**told(*given), name: "another"})
    with pytest.raises(SpecError, match=rf"the worker in process \d+ on \S+ has other {name}: .* there, another here"):
        play(Ray(workers=1), algorithms.fedavg(), small_task())


def test_states_on_several_machines_need_a_folder(ray, monkeypatch):
    told = ray_worker.identity_of
    monkeypatch.setattr(ray_pool, "identity_of", lambda *given: {**told(*given), "node": "elsewhere"})
    with pytest.raises(SpecError, match="clients of this algorithm keep states, and there are several machines"):
        play(Ray(workers=1), ALGORITHM, small_task())
    assert len(play(Ray(workers=1), algorithms.fedavg(), small_task()).cohort) == 5


def test_a_folder_that_a_worker_does_not_reach_is_refused(tmp_path, ray, monkeypatch):
    monkeypatch.setattr("fedalloy.engines.cluster.worker.StateFiles.owner", lambda self: os.urandom(4).hex())
    with pytest.raises(SpecError, match="does not reach states = "):
        play(Ray(workers=1, states=str(tmp_path)), ALGORITHM, small_task())


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        raise FloatingPointError("too far")


def test_a_clients_own_error_comes_back_with_its_name(ray):
    from tests.engines.rounds import task_of

    with pytest.raises(ClientError, match=r"client \d failed in round 7 .*FloatingPointError: too far"):
        play(Ray(workers=2, block=1), algorithms.fedavg(), task_of(Broken), work(3), round=7)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SpecError, match=r"pip install 'fedalloy\[ray\]'"):
        play(Ray(workers=1), algorithms.fedavg(), small_task())


def test_a_stored_run_reads_its_states_where_they_are(tmp_path, ray, monkeypatch, root):
    """``reopen`` starts no workers."""
    from fedalloy.experiment.recipe import load, resolve
    from fedalloy.experiment.recipe.reopening import reopen

    states: Path = tmp_path / "states"
    told = ["algorithm.name=scaffold", "engine.kind=ray", "engine.workers=1", f"engine.states={states}", "run.rounds=2"]
    ending, _ = resolve(load(root / "recipes" / "quickstart.toml", told)).run(tmp_path / "run")
    ids = torch.arange(10)
    before, started = ending.trained.states(ids), ray.started
    found = reopen(tmp_path / "run").states(ids)
    assert list(differences({str(c): s for c, s in found.items()}, {str(c): s for c, s in before.items()})) == []
    assert ray.started == started


@pytest.mark.parametrize("given", [None, "5"])
def test_workers_of_a_ray_of_its_own_have_the_priority_of_this_process(monkeypatch, given):
    """Ray's default, nice 15, gives them next to nothing of a machine that others use."""
    name = "RAY_worker_niceness"
    monkeypatch.setenv(name, given or "")
    if given is None:
        monkeypatch.delenv(name)
    fake = SimpleNamespace(is_initialized=lambda: False, init=lambda **_: None)
    monkeypatch.setattr(ray_session, "load_ray", lambda: fake)
    ray_session.connect("local", 1)
    assert os.environ[name] == (given or "0")


def test_a_signal_that_comes_while_ray_starts_is_for_the_runs_own_handler(monkeypatch):
    """Ray's would end the program at once, with the reason "15"."""
    from ray._private import utils

    heard: list[int] = []

    def init(**_: Any) -> None:
        utils.set_sigterm_handler(lambda number, _: sys.exit(number))
        signal.raise_signal(signal.SIGTERM)

    fake = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setattr(ray_session, "load_ray", lambda: fake)
    real, before = utils.set_sigterm_handler, signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        ray_session.connect("local", 1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
    assert utils.set_sigterm_handler is real


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere Ray ends its processes by their group")
def test_a_signal_to_the_runs_group_of_processes_does_not_end_ray(monkeypatch):
    from ray._private import services

    groups: list[tuple[int, int]] = []

    def init(**_: Any) -> None:
        process = services.ConsolePopen(["sleep", "60"])
        groups.append((os.getpgid(process.pid), process.pid))
        process.kill()
        process.wait()

    fake, real = SimpleNamespace(is_initialized=lambda: False, init=init), services.ConsolePopen
    monkeypatch.setattr(ray_session, "load_ray", lambda: fake)
    ray_session.connect("local", 1)
    assert [group == process for group, process in groups] == [True]
    assert services.ConsolePopen is real


@pytest.mark.parametrize("address", ["127.0.0.1:9", "no-port", "auto"])
def test_an_address_at_which_nobody_listens_is_told_at_once(address, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")  # what 'auto' finds
    with pytest.raises(ray_session.ClusterError, match=f"no connection to address = '{address}'"):
        play(Ray(address, workers=1), algorithms.fedavg(), small_task())


def test_auto_takes_no_cluster_that_only_happens_to_run_here(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    asked: list[Any] = []
    fake = SimpleNamespace(is_initialized=lambda: False, init=lambda **given: asked.append(given["address"]))
    monkeypatch.setattr(ray_session, "load_ray", lambda: fake)
    with pytest.raises(ray_session.ClusterError, match=r"ray start has noted no cluster here"):
        ray_session.connect("auto", 1)
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("192.0.2.1:6379\n")
    monkeypatch.setattr(ray_session, "_check_open", lambda address: None)
    ray_session.connect("auto", 1)
    assert asked == ["192.0.2.1:6379"]


def test_auto_finds_the_note_where_ray_puts_it(tmp_path, monkeypatch):
    """Below TMPDIR, which batch jobs set; RAY_TMPDIR comes first, and RAY_ADDRESS = auto says nothing."""
    rays = pytest.importorskip("ray._common.utils", reason="this Ray has it elsewhere")
    for name in ("RAY_ADDRESS", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for number, name in enumerate(("TMPDIR", "RAY_TMPDIR")):
        monkeypatch.setenv(name, str(tmp_path / name))
        (tmp_path / name / "ray").mkdir(parents=True)
        assert rays.get_default_ray_temp_dir() == str(tmp_path / name / "ray")
        (tmp_path / name / "ray" / "ray_current_cluster").write_text(f"192.0.2.{number}:6379\n")
        for said in ("", "auto"):
            monkeypatch.setenv("RAY_ADDRESS", said)
            assert ray_session.known_address() == f"192.0.2.{number}:6379"
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.9:6379")
    assert ray_session.known_address() == "192.0.2.9:6379"


@pytest.mark.parametrize("fault", ["store", "death"])
def test_a_machine_that_is_lost_with_several_workers_is_no_fault_of_a_block(monkeypatch, fault):
    """Three workers of a machine fall one after another; the fourth, elsewhere, runs what they were given."""
    count, told, rule, task = iter(range(100)), ray_worker.identity_of, fedavg(lr=0.3), small_task()

    def identity(task, files):  # the first call is the driver's
        return {**told(task, files), "node": "lost" if next(count) in (1, 2, 3) else "other"}

    monkeypatch.setattr(ray_worker, "identity_of", identity)
    fake = without_ray(monkeypatch)
    engine = Ray(workers=4, block=1)
    play(engine, rule, task)
    assert engine._pool is not None
    lost = [member.actor for member in engine._pool.members if member.node == "lost"]
    assert len(lost) == 3
    for actor in lost:
        setattr(actor, "broken" if fault == "store" else "dead", True)
    found = play(engine, rule, task)
    assert gaps(found, play(Loop(), rule, task), 1e-12) == []
    assert fake.started == 7


def test_a_worker_that_cannot_read_what_it_is_sent_is_lost_while_it_adds(monkeypatch):
    """Ray reads the arguments of a call itself; on a machine that ends that is an error of its own."""
    fake, real, left = without_ray(monkeypatch), ray_worker.BlockWorker.add, [OSError("Broken pipe")]

    def add(worker, *given):
        if left:
            raise left.pop()
        return real(worker, *given)

    monkeypatch.setattr(ray_pool, "ADDED_HERE", 0)
    engine = Ray(workers=2, block=2)
    cohort = play(engine, ALGORITHM, small_task()).cohort
    expected = cohort.combine("delta", torch.ones(len(cohort.ids), dtype=torch.float64))
    monkeypatch.setattr(ray_worker.BlockWorker, "add", add)
    assert list(differences(cohort.combine("delta", torch.ones(len(cohort.ids), dtype=torch.float64)), expected)) == []
    assert any("Broken pipe" in one["why"] for one in engine.incidents()["lost_workers"])
    assert fake.started == 3

"""What is to be measured on a lent GPU: plans name what exists, steps end in time, comparisons find a difference."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import pytest

from benchmarks import generative_quality as quality
from benchmarks import gpu_session, h200
from benchmarks.gpu_session import PLANS, Step, groups, start, steps_of, work

FOLDERS = {"OUT/": Path("/out"), "KEEP/": Path("/keep"), "DATA/": Path("/data")}


@pytest.mark.parametrize("plan", PLANS)
def test_every_step_names_what_exists(plan):
    steps = steps_of(PLANS[plan], FOLDERS)
    for step in steps:
        assert step.words[0] == "-m"
        module = importlib.import_module(step.words[1])
        chosen = step.words[step.words.index("--only") + 1 :] if "--only" in step.words else ()
        known = module.SHAPES if hasattr(module, "SHAPES") else module.PARTS if hasattr(module, "PARTS") else ()
        assert all(one.split(":")[0] in known for one in chosen if not one.startswith(("-", "/")))
    alone = sum(step.seconds for step in steps if not step.beside and not step.last)
    assert alone < 900  # limits, not what is expected


def test_findings_of_what_only_fills_the_cache_are_not_kept():
    kept, warm = (Step.read(f"{mark} 5 -m benchmarks.gpu_kernels --only cnn:tf32", FOLDERS) for mark in ("&", "&-"))
    assert "--out" in kept.call(Path("/out"))
    assert "--out" not in warm.call(Path("/out"))
    assert [len(some) for some in groups([kept, warm, Step(1, ()), Step(1, ())])] == [2, 1, 1]


def test_a_step_that_is_too_slow_ends_alone_and_the_last_one_runs(tmp_path):
    plan = "& 9 -c pass\n& 1 -c import\ttime;time.sleep(60)\n8 -c raise\tSystemExit(3)\n9! -c pass"
    steps = [
        Step(one.seconds, tuple(word.replace("_", " ") for word in one.words), one.beside, one.kept, one.last)
        for one in steps_of(plan.replace("import\t", "import_").replace("raise\t", "raise_"), {})
    ]
    said: list[str] = []
    assert not work(steps, tmp_path, 60, said.append)
    assert [line.rsplit(": ")[-1] for line in said] == ["0", "ended, too slow", "3", "0"]
    said.clear()
    assert not work(steps, tmp_path, 1, said.append)
    assert all(line.startswith("not run") for line in said)


def row(variant: str, seed: int, accuracy: float, mean: float) -> dict[str, object]:
    noise = 0.01 * seed
    values = {name: [mean + noise, 0.5 + noise] for name in ("mean", "spread", "apart", "from real")}
    return {"method": "fedevg", "variant": variant, "seed": seed, "accuracy": accuracy + seed, "classes": values}


@pytest.mark.parametrize(("accuracy", "mean", "within"), [(80.2, 0.3, True), (70.0, 0.3, False), (80.0, 0.9, False)])
def test_what_is_beyond_the_noise_of_seeds_is_found(accuracy, mean, within):
    rows = [row("tf32", seed, 80.0, 0.3) for seed in range(3)] + [
        row("bf16", seed, accuracy, mean) for seed in range(3)
    ]
    (found,) = quality.compared(rows)
    assert found["within_noise"] is within
    (few,) = quality.compared(rows[:4])
    assert few["within_noise"] is None


def test_a_call_that_is_too_long_for_a_card_is_none_of_the_documented():
    """A card runs a command for at most ten minutes, and all of a session's for thirty, its start included."""
    said = gpu_session.__doc__ or ""
    expected = [float(one) for one in re.findall(r"\*(?:First|Second|Third) call\*, expected ([0-9.]+) minutes", said)]
    assert len(expected) == len(PLANS)
    assert max(expected) < 9.5
    assert sum(expected) < 28
    assert all(f"gpu_session {plan} --data" in said for plan in PLANS)


def test_steps_side_by_side_share_the_processors(tmp_path):
    words = [
        "-c",
        "import os; print(os.environ.get('OMP_NUM_THREADS'), os.environ.get('TORCHINDUCTOR_COMPILE_THREADS'))",
    ]
    assert start(words, tmp_path / "two", beside=(os.cpu_count() or 1)).wait() == 0
    assert (tmp_path / "two").read_text() == "1 1\n"


def test_benchmarks_of_kernels_can_be_imported_without_a_card():
    """They name what exists, also where nothing runs them, and what a plan starts can be started."""
    planned = set(re.findall(r"-m benchmarks\.(\w+)", Path(gpu_session.__file__).read_text()))
    assert planned >= {"gpu_kernels", "h200", "synthetic_gpu"}
    for name in sorted(planned | {"gpu_blocks", "gpu_checks", "gpu_conform", "gpu_federations"}):
        module = importlib.import_module(f"benchmarks.{name}")
        assert name not in planned or callable(module.main)


def test_kernels_of_the_benchmark_of_blocks_are_called_as_they_are():
    from benchmarks import gpu_blocks

    for name in ("cnn1", "cnn2", "r32s 50x10"):
        stage, clients, batch, pool = gpu_blocks.stage_of(name)
        given = gpu_blocks.given_for(stage, clients, batch, pool, "float32")
        for kind in gpu_blocks.BLOCKS if not pool else ("convolve", "by_weight"):
            assert gpu_blocks.error(given, kind, "float32") < 1e-5


def test_a_shape_that_failed_is_a_failed_call(tmp_path, monkeypatch):
    monkeypatch.setattr(h200, "load", lambda folder: None)
    monkeypatch.setattr(h200, "compare", lambda name, *_: [{"shape": name, "variant": "tf32", "failed": "no module"}])
    monkeypatch.setattr("sys.argv", ["h200", "--data", ".", "--timed", "--out", str(tmp_path / "found.json")])
    with pytest.raises(SystemExit, match="cnn-50x50 tf32"):
        h200.main()
    assert "no module" in (tmp_path / "found.json").read_text()

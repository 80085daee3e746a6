"""What is to be measured on a lent GPU: plans name what exists, steps end in time, comparisons find a difference."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from benchmarks import generative_quality as quality
from benchmarks import gpu_session
from benchmarks.gpu_session import PLANS, Step, groups, steps_of, work

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


def test_the_command_is_the_one_that_is_documented():
    assert "first" in (gpu_session.__doc__ or "")
    assert "second" in (gpu_session.__doc__ or "")

"""Runs travel to a machine with a GPU and back: small, whole, and never over a run that stands further."""

import json
import random
import tarfile
from pathlib import Path

import pytest

from scripts import device_run


def make_run(folder: Path, state: str, round: int, model: int = 0) -> None:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "clients").mkdir()
    (folder / "recipe.toml").write_text("[run]\n")
    (folder / "lock").write_text("1\n")
    (folder / "rounds.jsonl").write_text("{}\n" * round)
    (folder / "status.json").write_text(json.dumps({"state": state, "round": round}))
    (folder / "checkpoints" / "last.bin").write_bytes(bytes(model))
    (folder / "clients" / "0.bin").write_bytes(b"state")


def names(folder: Path) -> set[str]:
    return {name for archive in folder.glob("*.tar.xz") for name in tarfile.open(archive).getnames()}


def test_an_ended_run_leaves_behind_what_only_serves_to_go_on(tmp_path):
    make_run(tmp_path / "runs/a/seed-0", "finished", 3)
    make_run(tmp_path / "runs/b/seed-0", "stopped", 2)
    assert device_run.pack(tmp_path / "runs", tmp_path / "out") == ["packed 1 files"]
    common = {"recipe.toml", "rounds.jsonl", "status.json"}
    ended = {f"a/seed-0/{name}" for name in common}
    stopped = {f"b/seed-0/{name}" for name in [*common, "checkpoints/last.bin", "clients/0.bin"]}
    assert names(tmp_path / "out") == ended | stopped


def test_a_model_comes_back_where_it_is_asked_for(tmp_path):
    make_run(tmp_path / "runs/a/seed-0", "finished", 3)
    make_run(tmp_path / "runs/b/seed-0", "finished", 3)
    device_run.pack(tmp_path / "runs", tmp_path / "out", ["b/"])
    models = {name for name in names(tmp_path / "out") if "checkpoints" in name}
    assert models == {"b/seed-0/checkpoints/last.bin"}


def test_what_does_not_fit_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(device_run, "MOST_BYTES", 2000)
    monkeypatch.setattr(device_run, "MOST_FILES", 1)
    for name in "abcdefgh":
        make_run(tmp_path / "runs" / name, "finished", 1)
    told = device_run.pack(tmp_path / "runs", tmp_path / "out")
    packed = {name.split("/")[0] for name in names(tmp_path / "out")}
    left = {line.split()[1].rstrip(":") for line in told if line.startswith("left")}
    assert packed
    assert left
    assert packed | left == set("abcdefgh")
    assert not packed & left
    assert all(file.stat().st_size <= 2000 for file in (tmp_path / "out").iterdir())


def test_a_large_run_does_not_keep_small_ones_from_coming_back(tmp_path, monkeypatch):
    monkeypatch.setattr(device_run, "MOST_TOGETHER", 4000)
    make_run(tmp_path / "runs/a", "stopped", 1)
    (tmp_path / "runs/a/checkpoints/last.bin").write_bytes(random.Random(0).randbytes(10_000))
    make_run(tmp_path / "runs/b", "finished", 1)
    told = device_run.pack(tmp_path / "runs", tmp_path / "out")
    assert told[0].startswith("left   a:")
    assert "b/rounds.jsonl" in names(tmp_path / "out")


def test_runs_return_whole_and_never_over_one_that_stands_further(tmp_path):
    make_run(tmp_path / "there/a", "finished", 5)
    make_run(tmp_path / "there/b", "stopped", 2)
    device_run.pack(tmp_path / "there", tmp_path / "out")
    make_run(tmp_path / "here/b", "stopped", 4)
    told = device_run.unload(tmp_path / "out", tmp_path / "here")
    assert sorted(told) == ["fetched a", "kept   b: further here"]
    assert (tmp_path / "here/a/rounds.jsonl").read_text() == "{}\n" * 5
    assert (tmp_path / "here/b/rounds.jsonl").read_text() == "{}\n" * 4


def test_commands_stop_when_the_minutes_are_over_and_what_they_made_is_packed(tmp_path):
    carried, place = tmp_path / "carried", tmp_path / "there"
    (carried / "packages").mkdir(parents=True)
    with tarfile.open(carried / "code.tar", "w"):
        pass
    make_run(place / "runs/a", "finished", 1)
    (place / "src/fedalloy").mkdir(parents=True)
    (place / "src/fedalloy/__main__.py").write_text("import time\ntime.sleep(60)\n")
    words = ["work", str(carried), str(place), str(tmp_path / "out"), "--minutes", "0.02", "--", "run", "x.toml"]
    with pytest.raises(SystemExit) as ended:
        device_run.main(words)
    assert ended.value.code != 0
    assert "a/rounds.jsonl" in names(tmp_path / "out")


@pytest.mark.parametrize(("asked", "seen"), [([], "card"), (["--cpu"], "")])
def test_commands_on_the_processor_do_not_see_the_card(tmp_path, monkeypatch, asked, seen):
    carried, place = tmp_path / "carried", tmp_path / "there"
    (carried / "packages").mkdir(parents=True)
    (place / "src/fedalloy").mkdir(parents=True)
    (place / "src/fedalloy/__init__.py").touch()
    said = "import os, pathlib\npathlib.Path('seen').write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    (place / "src/fedalloy/__main__.py").write_text(said)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "card")
    with pytest.raises(SystemExit):
        device_run.main(["work", str(carried), str(place), str(tmp_path / "out"), "--minutes", "1", *asked, "--", "x"])
    assert (place / "seen").read_text() == seen


def test_the_kernels_that_git_does_not_have_travel_with_the_code(tmp_path, capsys):
    carried, kernels = tmp_path / "carried", tmp_path / "kernels.so"
    (tmp_path / "code/src/fedalloy/core/native").mkdir(parents=True)
    carried.mkdir()
    with tarfile.open(carried / "code.tar", "w") as tar:
        tar.add(tmp_path / "code/src", "src")
    device_run.carry_kernels(kernels, carried)
    assert "draws will be slow" in capsys.readouterr().out
    kernels.write_bytes(b"compiled")
    device_run.carry_kernels(kernels, carried)
    device_run._unpack_once(carried, tmp_path / "place")
    assert (tmp_path / "place" / device_run.KERNELS).read_bytes() == b"compiled"

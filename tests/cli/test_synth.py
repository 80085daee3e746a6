"""fedalloy synth on a small run: taken out, judged, drawn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "digits-cvae.toml"
CHANGES = [
    "run.rounds=3",
    "evaluate.snapshots=2",
    "evaluate.classifier.epochs=10",
    "algorithm.batch_size=128",
    "engine.kind=loop",
]


def start(cli, place, *more):
    words = [word for change in (*CHANGES, *more) for word in ("--set", change)]
    done = cli.run("run", RECIPE, "--json", "-o", place, *words)
    assert done.code == 0, done.err
    return place


def test_a_run_is_exported_judged_and_drawn(cli, tmp_path):
    run = start(cli, tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = cli.run("synth", "export", run, "-o", tmp_path / "out", "--per-class", "4")
    assert done.code == 0, done.err
    assert done.out.split() == [str(tmp_path / "out" / name) for name in ("samples.npz", "grid.png")]
    with np.load(tmp_path / "out" / "samples.npz") as arrays:
        assert arrays["x"].shape == (40, 1, 8, 8)
        assert np.bincount(arrays["y"]).tolist() == [4] * 10
    judged = cli.run("synth", "quality", run, "--json", "--per-class", "3")
    assert judged.code == 0, judged.err
    said = json.loads(judged.out)
    assert said["count"] == 30
    assert said["frechet"] > said["frechet_real"] > 0
    assert {"membership_auc", "copies", "suspicious"} <= said["leakage"].keys()
    assert said["wire"]["samples"] == 30 * 64 * 4
    drawn = cli.run("synth", "grid", run, "-o", tmp_path / "growth.png")
    assert drawn.code == 0, drawn.err
    assert "rounds 2, 3" in drawn.out
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    old = cli.run("synth", "export", run, "-o", tmp_path / "old", "--round", "2")
    assert old.code == 0, old.err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_without_snapshots_the_run_is_drawn_as_it_stands(cli, tmp_path):
    run = start(cli, tmp_path / "run", "run.rounds=1", "evaluate.snapshots=9")
    for kept in (run / "synthetic").iterdir():
        kept.unlink()
    drawn = cli.run("synth", "grid", run, "-o", tmp_path / "now.png")
    assert "no samples were kept" in drawn.out
    assert (tmp_path / "now.png").stat().st_size > 500
    missing = cli.run("synth", "export", run, "-o", tmp_path / "x", "--round", "4")
    assert missing.code == 1
    assert "has no samples of round 4" in missing.err


def test_a_method_that_makes_nothing_ends_in_one_line(cli, tmp_path):
    run = start(cli, tmp_path / "run", "run.rounds=1", "algorithm.name=fedavg", "task.model=logistic")
    for command in (["export", run, "-o", tmp_path / "out"], ["quality", run], ["grid", run]):
        done = cli.run("synth", *command)
        assert done.code == 2
        assert "makes no synthetic samples: run fedevg, fedcgan or fedcvae" in done.err
        assert len(done.err.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["export", "quality", "grid"])
def test_help_teaches(cli, command):
    done = cli.run("synth", command, "--help")
    assert done.code == 0
    assert "RUN" in done.out

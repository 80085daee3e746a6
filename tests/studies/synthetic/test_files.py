"""Samples as files: pictures that other programs can read, tables, snapshots, growth over rounds."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch

from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.experiment.records import snapshots
from fedalloy.studies.synthetic.export import export
from fedalloy.studies.synthetic.pictures import class_grid, evenly, growth_grid, write_png

UNIT = (0.0, 1.0)


def read_png(path):
    """A picture as somebody else reads it."""
    image = pytest.importorskip("matplotlib.image")
    return (image.imread(path) * 255).round().astype(int)


def samples(classes=3, each=4, shape=(1, 8, 8)):
    x = torch.arange(classes * each * int(np.prod(shape)), dtype=torch.float32).reshape(-1, *shape)
    return x / x.max(), torch.arange(classes).repeat_interleave(each)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_says_what_was_written(tmp_path, channels):
    picture = torch.arange(5 * 7 * channels, dtype=torch.uint8).reshape(5, 7, channels)
    write_png(tmp_path / "a" / "picture.png", picture)
    found = read_png(tmp_path / "a" / "picture.png")
    assert np.array_equal(found.reshape(5, 7, -1)[..., :channels], picture.numpy())
    with pytest.raises(SpecError, match="2 channels"):
        write_png(tmp_path / "b.png", torch.zeros(2, 2, 2, dtype=torch.uint8))


def test_grids_have_a_row_per_class():
    x, y = samples()
    grid = class_grid(x, y, UNIT, most=2)
    # 8 x 8 pixels three times enlarged, a white gap of two around each.
    assert grid.shape == (3 * 26 + 2, 2 * 26 + 2, 1)
    first, third = ((x[row, 0] * 255).round().to(torch.uint8) for row in (0, 8))
    assert torch.equal(grid[2:26:3, 2:26:3, 0], first)
    assert torch.equal(grid[54:78:3, 2:26:3, 0], third)
    assert int(grid[0].min()) == 255


def test_pictures_are_exported_with_a_look_at_them(tmp_path):
    x, y = samples()
    assert [path.name for path in export(x, y, tmp_path, UNIT)] == ["samples.npz", "grid.png"]
    with np.load(tmp_path / "samples.npz", allow_pickle=False) as arrays:
        assert np.array_equal(arrays["x"], x.numpy())
        assert np.array_equal(arrays["y"], y.numpy())
        assert arrays["bounds"].tolist() == [0.0, 1.0]
    assert read_png(tmp_path / "grid.png").shape[:2] == (80, 4 * 26 + 2)


def test_rows_are_exported_as_a_table(tmp_path):
    x, y = samples(2, 2, (3,))
    assert [path.name for path in export(x, y, tmp_path, None)] == ["samples.npz", "samples.csv"]
    with (tmp_path / "samples.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0]) == ["label", "x0", "x1", "x2"]
    assert [int(row["label"]) for row in rows] == [0, 0, 1, 1]
    assert [float(row["x2"]) for row in rows] == pytest.approx(x[:, 2].tolist())
    assert np.load(tmp_path / "samples.npz")["bounds"].size == 0


def test_snapshots_come_back_and_the_same_round_is_the_same_file(tmp_path):
    x, y = samples()
    assert snapshots.rounds(tmp_path) == []
    for round in (20, 5):
        snapshots.save(tmp_path, round, x * round, y)
    before = (tmp_path / "synthetic" / "round-000005.safetensors").read_bytes()
    snapshots.save(tmp_path, 5, x * 5, y)
    assert (tmp_path / "synthetic" / "round-000005.safetensors").read_bytes() == before
    assert snapshots.rounds(tmp_path) == [5, 20]
    assert torch.equal(snapshots.load(tmp_path, 20)[0], x * 20)
    with pytest.raises(CheckpointError, match=r"round 7: kept are 5, 20; snapshots = N"):
        snapshots.load(tmp_path, 7)


def test_growth_shows_the_same_sample_over_time():
    x, y = samples()
    grid = growth_grid([(x * 0, y), (x, y)], UNIT)
    assert grid.shape == (3 * 26 + 2, 2 * 26 + 2, 1)
    assert int(grid[2:26, 2:26].max()) == 0
    assert torch.equal(grid[28:52:3, 28:52:3, 0], (x[4, 0] * 255).round().to(torch.uint8))
    with pytest.raises(SpecError, match="not pictures"):
        growth_grid([(x, y)], None)


def test_moments_are_chosen_evenly():
    assert evenly(list(range(1, 101)), 4) == [1, 34, 67, 100]
    assert evenly([3, 9], 4) == [3, 9]
    assert evenly([3, 9], 1) == [9]

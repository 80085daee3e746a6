"""Pictures: what they show is what the run did, and each of them can be drawn."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.experiment.recipe import parse, reopen, resolve
from fedalloy.experiment.records.reading import read_run
from fedalloy.report.plots import line, plane, recorded, reliability
from fedalloy.report.plots.canvas import Options
from fedalloy.report.plots.kinds import KINDS, draw
from fedalloy.report.plots.mixture import gather_mixture
from fedalloy.tasks.evaluation import evaluate_pool

COMPARING = {"gains", "rows", "variance"}
"""Kinds that need more than one run."""
MAGIC = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


def make(folder: Path, name: str, seed: int = 0, **local) -> Path:
    recipe = {
        "task": {"model": {"kind": "mlp", "hidden": [12]}},
        "partition": {"kind": "classes", "per_client": 3, "clients": 6},
        "algorithm": {"name": name, "lr": 0.2, "batch_size": 32, **local},
        "run": {"rounds": 3, "seeds": [seed]},
        "evaluate": {"metrics": ["accuracy", "loss", "ece"]},
    }
    resolve(parse(recipe)).run(folder)
    return folder


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("runs") / "superfed", "superfed_mm", start=0.0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("runs") / "fedavg", "fedavg")


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        *((kind, ".png") for kind in sorted(KINDS.keys() - COMPARING)),
        ("curves", ".pdf"),
        ("lambda", ".svg"),
    ],
)
def test_every_picture_is_drawn(kind, suffix, mixed, tmp_path):
    draw(kind, [mixed], tmp_path / "deep" / f"picture{suffix}", Options(points=3, clients=2))
    assert (tmp_path / "deep" / f"picture{suffix}").read_bytes().startswith(MAGIC[suffix])


def axes():
    return Figure().add_subplot()


def test_gains_are_sorted_and_a_falling_loss_is_one(plain, mixed, tmp_path):
    shown = {}
    for metric in ("accuracy", "loss"):
        drawn = axes()
        recorded.draw_gains(drawn, [plain, mixed], Options(metric=metric))
        (line,) = [one for one in drawn.lines if one.get_label() == "superfed_mm"]
        shown[metric] = list(line.get_ydata())
    before, after = (read_run(run).clients() for run in (plain, mixed))
    last = [[row for row in rows if row.get("mix") is None][-1]["loss"] for rows in (before, after)]
    assert shown["loss"] == sorted(shown["loss"])
    assert shown["loss"] == pytest.approx(sorted(first - mine for first, mine in zip(*last, strict=True)))
    assert len(shown["accuracy"]) == 6
    with pytest.raises(SpecError, match="at least two algorithms"):
        draw("gains", [plain], tmp_path / "alone.png")


def test_curves_are_the_means_of_the_evaluations(mixed, plain):
    from fedalloy.report.plots import recorded

    sheet = axes()
    recorded.draw_curves(sheet, [mixed, plain], Options(metric="loss"))
    drawn = {text.get_text() for text in sheet.get_legend().get_texts()}
    assert drawn == {"superfed_mm", "fedavg"}
    expected = [row["evaluation"]["loss"]["mean"] for row in read_run(plain).rounds()]
    assert any(np.allclose(one.get_ydata(), expected) for one in sheet.get_lines())


def test_seeds_are_one_line_with_a_band(tmp_path):
    from fedalloy.report.plots import recorded

    runs = [make(tmp_path / str(seed), "fedavg", seed=seed) for seed in (0, 1)]
    means = [[row["evaluation"]["loss"]["mean"] for row in read_run(run).rounds()] for run in runs]
    # A run that was interrupted counts in the rounds that it has; the line goes on without it, as in the report.
    (runs[1] / "rounds.jsonl").write_text("".join((runs[1] / "rounds.jsonl").read_text().splitlines(True)[:2]))
    sheet = axes()
    recorded.draw_curves(sheet, runs, Options(metric="loss"))
    assert [text.get_text() for text in sheet.get_legend().get_texts()] == ["fedavg"]
    assert sheet.get_xlabel() == "round (bands: all seeds)"
    assert sheet.get_lines()[0].get_ydata() == pytest.approx([*np.mean(means, 0)[:2], means[0][2]])
    (band,) = sheet.collections
    edges = band.get_paths()[0].vertices[:, 1]
    assert edges.min() == pytest.approx(min(*means[0], *means[1][:2]))
    assert edges.max() == pytest.approx(max(*means[0], *means[1][:2]))


def test_the_mixture_is_read_from_the_records(mixed, plain):
    found = gather_mixture(read_run(mixed))
    assert found.lambdas.tolist() == pytest.approx([step / 10 for step in range(11)])
    assert found.values.shape == (11, 6)
    last = list(read_run(mixed).rounds())[-1]["evaluation_mix"]["accuracy"]
    assert found.values.mean(1) == pytest.approx(last["mean"])
    with pytest.raises(SpecError, match="no scores at several lambdas"):
        gather_mixture(read_run(plain))
    with pytest.raises(SpecError, match="not scored by 'auroc'"):
        gather_mixture(read_run(mixed), "auroc")


def test_the_line_goes_from_the_federated_to_the_local_model(mixed, plain):
    trained = reopen(mixed)
    places, values = line.along_the_line(trained, "loss", 3, 6)
    rows = {row["mix"]: row for row in read_run(mixed).clients() if row["model"] == "mixed"}
    assert places.tolist() == [0.0, 0.5, 1.0]
    for place, row in zip(values, (rows[0.0], rows[0.5], rows[1.0]), strict=True):
        assert place.tolist() == pytest.approx(row["loss"], rel=1e-5)
    with pytest.raises(SpecError, match="no personal model"):
        line.along_the_line(reopen(plain), "loss", 3, 6)


def test_a_method_that_does_not_mix_has_a_line_too(tmp_path):
    folder = make(tmp_path / "ditto", "ditto")
    _, values = line.along_the_line(reopen(folder), "loss", 2, 6)
    ends = {row["model"]: row["loss"] for row in read_run(folder).clients() if row["round"] == 3}
    assert values[0].tolist() == pytest.approx(ends["global"], rel=1e-5)
    assert values[1].tolist() == pytest.approx(ends["personal"], rel=1e-5)


def test_the_middle_of_the_plane_is_the_global_model(plain):
    trained = reopen(plain)
    task: Any = trained.fed.task
    places, values = plane.on_the_plane(trained, "loss", 3)
    expected = evaluate_pool(task.objective, trained.shared["params"], {}, task.global_test, ("loss",))
    assert places.tolist() == [-1.0, 0.0, 1.0]
    assert float(values[1, 1]) == pytest.approx(expected["loss"], rel=1e-6)
    assert float(values[0, 0]) != pytest.approx(float(values[2, 2]), rel=1e-3)
    again = plane.on_the_plane(trained, "loss", 3)[1]
    assert torch.equal(again, values)


def test_a_direction_is_as_long_as_the_model_leaf_by_leaf():
    params = {"w": torch.full((3, 4), 2.0), "b": torch.zeros(3)}
    found = plane.direction(params, Key.of(1))
    assert float(found["w"].norm()) == pytest.approx(float(params["w"].norm()))
    assert float(found["b"].norm()) == 0.0


def test_reliability_counts_every_test_example_with_the_clients_own_model(mixed):
    trained = reopen(mixed)
    confidence, hit = reliability.confidences(trained)
    row = list(read_run(mixed).clients())[-1]
    task: Any = trained.fed.task
    sizes = task.test.size.tolist()
    assert len(confidence) == sum(sizes)
    means = [float(part.mean()) for part in hit.split(sizes)]
    assert means == pytest.approx(row["accuracy"])
    said, right, inside = reliability.bins(confidence, hit)
    assert int(inside.sum()) == sum(sizes)
    assert float((right.nan_to_num() * inside).sum() / inside.sum()) == pytest.approx(float(hit.mean()))
    known = inside > 0
    edges = torch.arange(reliability.BINS) / reliability.BINS
    assert bool((said[known] > edges[known]).all())


def test_wrong_questions_are_refused_before_anything_is_computed(mixed, plain, tmp_path):
    with pytest.raises(SpecError, match="did you mean 'plane'"):
        draw("plan", [mixed], tmp_path / "a.png")
    with pytest.raises(SpecError, match="allowed: pdf, png, svg"):
        draw("plane", [mixed], tmp_path / "a.jpeg")
    with pytest.raises(SpecError, match="'plane' shows one run, not 2"):
        draw("plane", [mixed, plain], tmp_path / "a.png")


def test_without_matplotlib_it_says_what_to_install(mixed, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SpecError, match=r"fedalloy\[report\]"):
        draw("curves", [mixed], tmp_path / "a.png")


def last_scores(run):
    return sorted(list(read_run(run).clients())[-1]["accuracy"])


def test_clients_and_fairness_show_every_client_at_the_end(mixed, plain):
    from fedalloy.report.plots import recorded

    sheet = axes()
    recorded.draw_clients(sheet, [plain, mixed], Options())
    assert [label.get_text() for label in sheet.get_yticklabels()] == ["fedavg", "superfed_mm"]
    drawn = [sorted(dots.get_offsets()[:, 0]) for dots in sheet.collections]
    assert drawn[0] == pytest.approx(last_scores(plain))
    assert drawn[1] == pytest.approx(last_scores(mixed))
    sheet = axes()
    recorded.draw_fairness(sheet, [plain, mixed], Options())
    shown = {line.get_label(): line for line in sheet.get_lines()}
    assert list(shown["fedavg"].get_xdata())[1:] == pytest.approx(last_scores(plain))
    assert list(shown["fedavg"].get_ydata()) == pytest.approx([place / 6 for place in range(7)])
    for drawer in (recorded.draw_clients, recorded.draw_fairness):
        with pytest.raises(SpecError, match=r"add it to evaluate\.metrics"):
            drawer(axes(), [plain], Options(metric="auroc"))


def test_weights_and_participation_show_the_rounds(plain):
    from fedalloy.report.plots import recorded

    rows = list(read_run(plain).rounds())
    sheet = axes()
    recorded.draw_contributions(sheet, [plain], Options())
    cells = np.asarray(sheet.get_images()[0].get_array())
    assert cells == pytest.approx(np.array([row["weights"] for row in rows]).T)
    sheet = axes()
    recorded.draw_participation(sheet, [plain], Options())
    assert list(sheet.get_lines()[0].get_ydata()) == [len(rows)] * 6


def test_one_algorithm_has_one_colour_in_every_picture(mixed, plain):
    from fedalloy.report.palette import assign
    from fedalloy.report.plots import recorded

    styles = assign(["fedavg", "superfed_mm"])
    sheet = axes()
    recorded.draw_participation(sheet, [mixed, plain], Options())
    assert [line.get_label() for line in sheet.get_lines()] == ["fedavg, superfed_mm"], "lines that are alike are one"
    for drawer in (recorded.draw_curves, recorded.draw_fairness):
        sheet = axes()
        drawer(sheet, [mixed, plain], Options())
        shown = {line.get_label(): line.get_color() for line in sheet.get_lines()}
        assert {name: shown[name] for name in styles} == {name: style.light for name, style in styles.items()}


def test_pictures_are_as_wide_as_asked(plain, tmp_path):
    for width, inches in (("column", 3.35), ("page", 6.9)):
        draw("curves", [plain], tmp_path / "a.pdf", Options(width=width))
        box = re.search(rb"/MediaBox \[ 0 0 ([\d.]+)", (tmp_path / "a.pdf").read_bytes())
        assert box
        assert float(box[1]) == pytest.approx(72 * inches, abs=1)
    with pytest.raises(SpecError, match="did you mean 'column'"):
        draw("curves", [plain], tmp_path / "a.pdf", Options(width="colum"))

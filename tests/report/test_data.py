"""Chart data says what the records say, in JSON, and never more than a screen can show."""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.records import snapshots
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.report import data
from fedalloy.report.data.personal import reliabilities
from fedalloy.report.data.pictures import data_uri
from fedalloy.report.page import page
from fedalloy.results.gains import client_gains
from fedalloy.results.summaries import gather, tell


def row(round: int, ids: list[int], weights: Any, **more: Any) -> dict[str, Any]:
    return {
        "round": round, "ids": ids, "weights": weights, "train_loss": 1.0 / round, "bytes_up": 500_000,
        "bytes_down": 500_000, "dropped": {}, "info": {}, "simulated_seconds": 2.0, "absent": [], "late": [], **more,
    }  # fmt: skip


def summary(low: float, mean: float, high: float, higher: bool = True) -> dict[str, float]:
    served = dict(zip(("worst_served", "best_served"), (low, high) if higher else (high, low), strict=True))
    return {"mean": mean, "worst": low, "best": high, **served, "gini": 0.1, "variance": 1.0, "parity_gap": high - low}


def write(
    folder: Path, rows: list[dict[str, Any]], clients: list[dict[str, Any]], name: str = "mine", **more: Any
) -> Path:
    recipe = {"name": name, "run": {"rounds": len(rows), "seeds": [more.pop("seed", 0)], **more.pop("run", {})}}
    made = RunFolder.create(folder, recipe, {"python": "3"}, more.pop("manifest", None))
    with made.lock():
        for one in rows:
            made.append("rounds", one)
        for one in clients:
            made.append("clients", one)
        made.set_status("finished", len(rows))
    return folder


def scores(round: int, values: list[float | None], **more: Any) -> dict[str, Any]:
    return {
        "round": round,
        "split": "test",
        "model": "global",
        "ids": list(range(len(values))),
        "accuracy": values,
        **more,
    }


@pytest.fixture
def run(tmp_path):
    def make(rows, clients=(), name="mine", **more):
        return tell(write(tmp_path / f"{name}-{more.get('seed', 0)}", rows, list(clients), name, **more))

    return make


def test_curves_are_means_over_seeds_with_their_range(run):
    stories = [
        run([row(1, [0], [1.0], evaluation={"accuracy": summary(0.1, value, 0.9)}, **{"global": {"accuracy": 0.7}})],
            seed=seed)
        for seed, value in enumerate([0.2, 0.4])
    ]  # fmt: skip
    chart = data.curves(stories)
    assert chart is not None
    (series,) = chart["series"]
    assert series["values"]["accuracy"]["mean"] == {"y": [0.3], "low": [0.2], "high": [0.4]}
    assert series["values"]["accuracy"]["pooled"]["y"] == [0.7]
    assert (series["round"], series["megabytes"], series["seconds"]) == ([1], [1], [2])


def test_the_worst_served_by_a_loss_are_those_with_the_highest(run):
    found = {"accuracy": summary(0.1, 0.5, 0.9), "loss": summary(0.2, 1.0, 3.0, higher=False)}
    story = run([row(1, [0], [1.0], evaluation=found)])
    chart = data.curves([story])
    assert chart is not None
    values = chart["series"][0]["values"]
    assert (values["accuracy"]["worst_served"]["y"], values["loss"]["worst_served"]["y"]) == ([0.1], [3])


def test_time_is_no_axis_where_nothing_is_simulated(run):
    story = run([row(1, [0], [1.0], evaluation={"accuracy": summary(0, 0, 0)}, simulated_seconds=0.0)])
    chart = data.curves([story])
    assert chart is not None
    assert list(chart["axes"]) == ["round", "megabytes"]


def test_everyone_is_a_dot_and_the_worst_come_first(run):
    manifest = {"clients": 4, "sizes": [5, 6, 7, 8], "class_counts": [[5, 0], [3, 3], [0, 7], [8, 0]]}
    rows = [row(1, [0], [1.0], evaluation={"accuracy": summary(0, 0, 0)})]
    story = run(rows, [scores(1, [0.5, None, 0.1, 0.9])], manifest=manifest)
    chart = data.distribution([story])
    assert chart is not None
    (group,) = chart["groups"]
    assert group["labels"] == ["client 2", "client 0", "client 3"]
    assert (group["values"], group["median"], group["examples"]) == ([0.1, 0.5, 0.9], 0.5, [7, 5, 8])
    worst = data.worst_clients([story], 1)
    assert worst == [{"name": "mine", "seed": 0, "client": "client 2", "score": 0.1, "finite": True, "examples": 7,
                      "common_class": 1, "common_share": 1, "rounds": 0}]  # fmt: skip


def test_gains_are_bars_from_the_largest_loss_on(run):
    rows = [row(1, [0], [1.0], evaluation={"loss": summary(0, 0, 0, higher=False)})]
    runs = [
        run(rows, [{**scores(1, []), "ids": [0, 1, 2], "loss": values}], name=name, manifest={"digest": "same"},
            run={"target_metric": "loss"})
        for name, values in (("first", [1.0, 1.0, 1.0]), ("second", [0.5, 3.0, 1.0]))
    ]  # fmt: skip
    found = client_gains(runs, "loss")
    chart = data.sorted_gains(found)
    assert chart is not None
    (group,) = chart["groups"]
    assert (group["labels"], group["values"]) == (["client 1", "client 2", "client 0"], [-2, 0, 0.5])
    assert (group["before"], group["after"]) == ([1, 1, 1], [3, 1, 0.5])
    (lost,) = data.largest_losses(found)
    assert (lost["client"], lost["first"], lost["score"], lost["gain"]) == ("client 1", 1, 3, -2)
    text = page(runs)
    assert "Who gains, who loses</h2>" in text
    assert "one seed (a single draw)" in text
    assert "No single client can be told from chance" in text
    assert "Who gains" not in page(runs[:1])


def test_weights_by_layer_are_panels_and_absence_is_empty(run):
    layers = {"fc.weight": [0.25, 0.75], "fc.bias": [0.25, 0.75], "out.weight": [0.5, 0.5]}
    chart = data.weights(run([row(1, [0, 2], layers), row(2, [1], {"fc.weight": [1.0], "out.weight": [1.0]})]))
    assert chart is not None
    assert [panel["title"] for panel in chart["panels"]] == ["fc", "out"]
    assert chart["panels"][0]["values"] == [[0.25, None], [None, 1], [0.75, None]]
    assert chart["columns"]["labels"] == ["1", "2"]


def test_info_is_lines_heat_maps_and_regret(run):
    rows = [
        row(t, [0, 1], [0.5, 0.5],
            info={"decision_loss": -math.log1p(0.5), "responses": [0.0, 1.0], "angle.fc": [0.1, 0.2], "tau": float(t)})
        for t in (1, 2, 3)
    ]  # fmt: skip
    charts = {chart["title"]: chart for chart in data.info_charts([run(rows)])}
    assert set(charts) == {
        "decision_loss",
        "tau",
        "responses: mine, seed 0",
        "angle: mine, seed 0",
        "Regret: mine, seed 0",
    }
    assert charts["tau"]["series"][0]["y"] == [1, 2, 3]
    # Always choosing the second client would have cost -log(2) a round.
    step = math.log(2) - math.log(1.5)
    assert charts["Regret: mine, seed 0"]["series"][0]["y"] == pytest.approx([step, 2 * step, 3 * step], rel=1e-4)


def test_participation_and_failures_are_counted(run):
    rows = [row(1, [0, 1], [0.5, 0.5], absent=[2]), row(2, [], [], late=[0], dropped={"1": "not finite"})]
    story = run(rows, manifest={"clients": 4})
    (told,) = data.participation_rows([story])
    keys = ("contributions", "fewest", "most", "never", "absent", "late", "refused", "empty_rounds")
    assert tuple(told[key] for key in keys) == (2, 0, 1, 2, 1, 1, 1, 1)
    assert told["reasons"] == [{"why": "not finite", "count": 1}]


def test_cost_adds_up(run):
    (told,) = data.cost_rows([run([row(1, [0], [1.0]), row(2, [0], [1.0])])])
    assert (told["megabytes_up"], told["megabytes"], told["simulated_seconds"]) == (1, 2, 4)


def test_class_counts_of_many_clients_are_added_up(run):
    story = run([row(1, [0], [1.0])], manifest={"clients": 1000, "class_counts": [[1, 2]] * 1000})
    chart = data.heterogeneity([story])
    assert chart is not None
    values = np.array(chart["panels"][0]["values"])
    assert values.shape == (200, 2)
    assert values.sum(0).tolist() == [1000, 2000]


def test_a_task_without_one_class_per_example_has_no_class_counts(run):
    story = run([row(1, [0], [1.0])], manifest={"clients": 2, "class_counts": [[], []]})
    other = run([row(1, [0], [1.0])], seed=1, manifest={"clients": 2, "class_counts": [[1, 2], [3, 4]]})
    assert data.heterogeneity([story]) is None
    assert data.heterogeneity([story, other]) == data.heterogeneity([other])


def test_a_long_run_is_no_larger_than_a_screen(run):
    rows = [row(t, list(range(t % 7, 900, 7)), [0.01] * len(range(t % 7, 900, 7)),
                evaluation={"accuracy": summary(0.1, t / 1000, 0.9)}) for t in range(1, 1001)]  # fmt: skip
    story = run(rows, [scores(1000, [k / 900 for k in range(900)])], manifest={"clients": 900})
    weights, curves, dots = data.weights(story), data.curves([story]), data.distribution([story])
    assert weights is not None
    assert curves is not None
    assert dots is not None
    cells = weights["panels"][0]["values"]
    assert len(cells) * len(cells[0]) <= 40_000
    assert "mean over 8 rounds and 8 clients" in weights["note"]
    assert len(curves["series"][0]["round"]) <= 400
    assert curves["series"][0]["round"][-1] == 1000
    assert len(dots["groups"][0]["values"]) <= 403
    assert len(page([story])) < 1_000_000


def test_rows_that_arrive_later_are_added(tmp_path):
    from fedalloy.experiment.records.reading import read_run
    from fedalloy.results.summaries import Gatherer

    folder = write(tmp_path / "a", [row(1, [0], [1.0])], [])
    gatherer = Gatherer(read_run(folder)).read()
    gatherer.history.add(row(2, [1], [1.0], evaluation={"accuracy": summary(0, 0.5, 1)}))
    story = gatherer.run_summary()
    assert story.history.rounds == [1, 2]
    assert story.outcome.scores["mean"] == 0.5


def test_everything_is_json_even_of_a_run_that_has_only_begun(run):
    story = run([])
    charts = [data.curves([story]), data.losses([story]), data.distribution([story]), data.weights(story),
              data.info_charts([story]), data.participation([story]), data.heterogeneity([story]),
              data.cost_bars([story]), data.mixture([story]), data.pictures(story), data.result_rows([story]),
              data.fairness_rows([story]), data.cost_rows([story]), data.participation_rows([story])]  # fmt: skip
    json.dumps(charts, allow_nan=False)
    assert "Nothing was evaluated yet" in page([story])


def test_an_algorithm_whose_runs_all_failed_in_their_first_round_is_on_the_page_of_the_others(run):
    stories = [run([row(1, [0, 1], [0.5, 0.5])]), run([], name="broken")]
    (_, rounds) = data.participation(stories)
    assert [one["name"] for one in rounds["series"]] == ["mine"]
    assert "broken" in page(stories)


def test_a_reliability_diagram_that_cannot_be_made_says_why(run):
    last = [scores(1, [0.5]), scores(1, [0.6], model="personal")]
    story = run([row(1, [0], [1.0], evaluation={"accuracy": summary(0, 0, 0)})], last)
    assert story.personal
    charts, missing = reliabilities([story])
    assert charts == []
    assert len(missing) == 1
    assert missing[0].startswith("mine: ")
    assert "No reliability diagram for mine" in page([story])


def decoded(uri: str) -> np.ndarray:
    """The pixels of a PNG made by this package: one IDAT, no filters."""
    raw = base64.b64decode(uri.partition(",")[2])
    width, height, _, kind = struct.unpack(">IIBB", raw[16:26])
    size = struct.unpack(">I", raw[33:37])[0]
    lines = np.frombuffer(zlib.decompress(raw[41 : 41 + size]), np.uint8)
    return lines.reshape(height, -1)[:, 1:].reshape(height, width, 1 if kind == 0 else 3)


@pytest.mark.parametrize("shape", [(8, 8), (1, 8, 8), (3, 8, 8), (8, 8, 3), (64,)])
def test_pictures_by_class_and_round(run, shape):
    story = run([row(1, [0], [1.0])])
    for round in (1, 20):
        snapshots.save(story.outcome.folder, round, torch.randn(6, *shape), torch.tensor([0, 0, 1, 1, 1, 2]))
    chart = data.pictures(story)
    assert chart is not None
    assert (chart["rounds"], chart["classes"], len(chart["cells"])) == ([1, 20], [0, 1, 2], 6)
    shown = decoded(chart["cells"][1]["image"])
    assert shown.shape == (8, 24, 3 if 3 in shape else 1)
    assert 'data-chart="pictures-0"' in page([story])


def test_a_png_holds_the_pixels_it_was_given():
    pixels = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    assert (decoded(data_uri(pixels)) == pixels).all()


def test_two_experiments_of_one_name_are_not_averaged(tmp_path):
    for place in ("first", "second"):
        write(tmp_path / place / "mine" / "seed-0", [row(1, [0], [1.0])], [])
    write(tmp_path / "second" / "mine" / "seed-1", [row(1, [0], [1.0])], [], seed=1)
    write(tmp_path / "other", [row(1, [0], [1.0])], [], name="other")
    names = [(story.name, story.seed) for story in gather([tmp_path])]
    assert names == [("mine (first)", 0), ("mine (second)", 0), ("mine (second)", 1), ("other", 0)]


def test_places_without_runs_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="name run folders"):
        gather([tmp_path])

"""Readers of the same run folders, by a loss with a target, some seeds failed or unfinished, show the same numbers."""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from typer.testing import CliRunner

from fedalloy.cli.app import app
from fedalloy.experiment.callbacks import RunStart
from fedalloy.experiment.driver import RoundEvent, RunProgress
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.reading import name_of, read_run
from fedalloy.experiment.tracking import Tracking
from fedalloy.report import data
from fedalloy.report.live import answers
from fedalloy.report.live.runs import RunStore
from fedalloy.report.live.watch import Watch
from fedalloy.report.page import page
from fedalloy.report.plots import recorded
from fedalloy.report.plots.canvas import Options
from fedalloy.results.lines import STATISTICS
from fedalloy.results.outcome import read_outcome
from fedalloy.results.runs import read_outcomes
from fedalloy.results.statistics import Spread
from fedalloy.results.summaries import gather
from fedalloy.results.table import summarise
from fedalloy.studies.compare.comparing import Comparison
from fedalloy.studies.reproduce.judging import values_of
from fedalloy.studies.reproduce.pairing import differences, observed
from fedalloy.studies.reproduce.scoring import measure_run
from fedalloy.tasks.metrics import summary

CLIENTS, ROUNDS, TARGET = 6, 4, 1.0
STATES = {("zeta", 3): ("stopped", 2), ("alpha", 1): ("failed", 3)}
"""What did not come to its end, and where it ended."""


def losses(name: str, seed: int, round: int) -> list[float]:
    """What the clients lose: less from round to round, ``alpha`` more than ``zeta``."""
    high = 2.0 if name == "alpha" else 1.6
    return [high / round * (1 + 0.07 * client + 0.013 * seed * (client + 1)) for client in range(CLIENTS)]


def write(
    folder: Path, name: str, seed: int, state: str = "finished", rounds: int = ROUNDS, changed: Any = None,
    least: int | None = None, **run: Any,
) -> Path:  # fmt: skip
    recipe = {
        "name": name,
        "run": {"rounds": ROUNDS, "seeds": [seed], "target_metric": "loss", "target": TARGET, **run},
    }
    environment = {"python": "3", **({"parquet_from": least} if least else {})}
    made = RunFolder.create(folder, recipe, environment, {"clients": CLIENTS, "sizes": [5] * CLIENTS})
    with made.lock():
        for round in range(1, rounds + 1):
            values = losses(name, seed, round)
            found = summary.summarise(torch.tensor(values, dtype=torch.float64), higher_is_better=False)
            row: dict[str, Any] = {
                "round": round, "ids": [0, (round + seed) % 4], "weights": [0.25, 0.75], "train_loss": 1 / round,
                "bytes_up": 300, "bytes_down": 200, "dropped": {"5": "norm"} if round == 2 else {}, "info": {},
                "simulated_seconds": 2.0, "absent": [4], "late": [], "evaluation": {"loss": found},
                "global": {"loss": 0.5 / round},
            }  # fmt: skip
            row["ids"] = sorted(set(row["ids"]))
            row["weights"] = row["weights"][: len(row["ids"])]
            made.append("rounds", changed(row) if changed else row)
            scored = {"ids": list(range(CLIENTS)), "loss": values}
            made.append("clients", {"round": round, "split": "test", "model": "global", **scored})
            made.append("timings", {"round": round, "clients": 0.5, "server": 0.25})
        made.set_status(state, rounds, "diverged" if state == "failed" else "")  # type: ignore[arg-type]
    return folder


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("readers") / "runs"
    for name in ("zeta", "alpha"):
        for seed in range(4):
            state, rounds = STATES.get((name, seed), ("finished", ROUNDS))
            write(place / name / f"seed-{seed}", name, seed, state, rounds)
    (place / "comparison.json").write_text(json.dumps({"order": ["zeta", "alpha"]}))
    return place


def invoke(*arguments: object) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.output


def finished(name: str) -> list[int]:
    return [seed for seed in range(4) if (name, seed) not in STATES]


def expected(name: str, score: str = "mean") -> list[float]:
    """From the numbers that were written, without any reader."""
    take: Any = {"mean": statistics.fmean, "worst_served": max, "best_served": min}[score]
    return [take(losses(name, seed, ROUNDS)) for seed in finished(name)]


NAMES, SCORES = ("zeta", "alpha"), ("mean", "worst_served", "best_served")


def test_compare_has_the_numbers_that_were_written(compared):
    table = Comparison(compared, tuple(read_outcomes([compared])), ()).to_json()["table"]
    assert [row["name"] for row in table] == list(NAMES)
    for row in table:
        for score in SCORES:
            assert row[score]["mean"] == pytest.approx(statistics.fmean(expected(row["name"], score)))
            assert row[score]["deviation"] == pytest.approx(statistics.stdev(expected(row["name"], score)))
    apart = [mine - losses_of for mine, losses_of in zip(_at("alpha", (0, 2)), _at("zeta", (0, 2)), strict=True)]
    middle = statistics.median([*apart, math.inf])
    assert table[1]["difference"]["estimate"] == pytest.approx(middle), "by seed; a failure is worst"
    assert [row["coverage"] for row in table] == ["3 of 4 (1 stopped)", "3 of 4 (1 failed)"]


def _at(name: str, seeds: tuple[int, ...]) -> list[float]:
    return [statistics.fmean(losses(name, seed, ROUNDS)) for seed in seeds]


def test_report_command_line_and_latex_print_the_same_table(compared, tmp_path):
    rows = summarise(read_outcomes([compared]))
    text = page(gather([compared]))
    section = text[text.index('<section id="results"') : text.index('<section id="curves"')]
    in_report = [
        re.findall(r"<t[dh][^>]*>(?:<span[^>]*></span>)?([^<]*)</t[dh]>", line) for line in section.split("<tr>")
    ]
    apart, *in_report = [line for line in in_report if line and line[0] in NAMES]
    for row, line in zip(rows, in_report, strict=True):
        means = [one.text() for one in (row.mean, row.worst_served, row.gini) if one]
        assert line == [row.name, *means, row.target_text, row.coverage]
    assert rows[1].difference is not None
    assert apart[:4] == ["alpha", "no verdict yet", rows[1].difference.text(), ""], "a run of zeta was stopped"
    invoke("export", compared, "--format", "latex", "-o", tmp_path / "a.tex")
    lines = [line for line in (tmp_path / "a.tex").read_text().splitlines() if r"\pm" in line]
    for row, line in zip(rows, lines, strict=True):
        numbers = re.sub(r"\\mathbf\{([^}]*)\}", r"\1", line).replace("$", "").replace(r"\pm", "±")
        cells = [cell.strip(" \\") for cell in numbers.split("&")]
        assert cells[0] == f"{row.name}, {row.coverage} seeds"
        assert cells[1:-1] == [one.text() for one in (row.mean, row.worst_served, row.best_served, row.gini) if one]
        assert cells[-1] == (row.difference.text() if row.difference else "--")
    assert r"\mathbf" not in "".join(lines), "nothing is decided while a run is stopped"


def test_exported_shown_live_tracked_and_reproduced_runs_have_the_same_scores(compared, tmp_path):
    invoke("export", compared, "-o", tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(newline="") as file:
        exported = {row["run"]: row for row in csv.DictReader(file)}
    store = RunStore(compared)
    store.scan()
    for run, folder in store.folders.items():
        outcome, row = read_outcome(folder), exported[folder.as_posix()]
        shown = json.loads(invoke("show", folder, "--json"))
        assert (shown["scores"], shown["reached"]) == (outcome.scores, outcome.reached)
        for score in SCORES:
            assert float(row[score]) == outcome.scores[score]
        assert (row["state"], row["reached"]) == (outcome.state, str(outcome.reached or ""))
        live = store.summary(run)
        assert live["score"] == outcome.scores["mean"]
        assert [live[key] for key in ("name", "seed", "state", "round")] == [
            outcome.name, outcome.seed, outcome.state, outcome.round]  # fmt: skip
        told = tracked(folder)
        assert told["name"] == outcome.name
        assert told["evaluation/loss/mean"] == outcome.scores["mean"]
        measured = measure_run(folder, "case", outcome.name, ["mean", "worst10", "rounds"])
        if outcome.finished:
            assert measured.scores["mean"] == pytest.approx(outcome.scores["mean"])
            assert measured.scores["worst10"] == pytest.approx(outcome.scores["worst_served"])
            assert measured.scores["rounds"] == outcome.reached
        else:
            assert measured.scores == {}


def tracked(folder: Path) -> dict[str, Any]:
    """What a tracker is told of a run's beginning and of its last round."""
    heard: dict[str, Any] = {}

    class Listening:
        def begin(self, told: Any) -> None:
            heard["name"] = told.name

        def log(self, round: int, values: Any) -> None:
            heard.update(values)

    record = read_run(folder)
    callback = Tracking(Listening())  # type: ignore[arg-type]
    callback.on_run_begin(RunStart(name_of(record.recipe), record.recipe, folder))
    for row in record.rounds():
        callback.on_round_end(RoundEvent(row, RunProgress(), 9, None, {}))
    return heard


def test_a_reproduction_averages_and_pairs_as_a_comparison_does(compared):
    rows = summarise(read_outcomes([compared]))
    runs = {
        name: [measure_run(compared / name / f"seed-{seed}", "case", name, ["mean"]) for seed in range(4)]
        for name in NAMES
    }
    for row in rows:
        assert Spread.of(values_of(runs[row.name], "mean")) == row.mean
    mine, theirs = (observed(runs[name], "mean", False) for name in ("alpha", "zeta"))
    apart = [value for _, value in differences(mine, theirs)]
    assert rows[1].difference is not None
    assert statistics.median(apart) == pytest.approx(rows[1].difference.estimate)
    assert len(apart) == rows[1].difference.pairs == 3


def test_curves_of_the_report_and_of_a_picture_end_at_the_numbers_of_the_table(compared):
    stories, rows = gather([compared]), summarise(read_outcomes([compared]))
    chart, sheet = data.curves(stories), Figure().add_subplot()
    assert chart is not None
    recorded.draw_curves(sheet, [compared], Options())
    drawn = {str(line.get_label()): np.array(line.get_data()) for line in sheet.get_lines()}
    for row, series in zip(rows, chart["series"], strict=True):
        assert row.mean is not None
        of_report = series["values"]["loss"]["mean"]
        assert series["round"] == drawn[row.name][0].tolist() == [1, 2, 3, 4]
        assert of_report["y"] == pytest.approx(drawn[row.name][1].tolist(), rel=1e-4)
        assert of_report["y"][-1] == pytest.approx(row.mean.mean, rel=1e-4)


def live(place: Path, run: str) -> dict[str, Any]:
    store = RunStore(place)
    store.scan()
    watch = Watch(store)
    try:
        return answers.details(store, run, watch.index(run))
    finally:
        watch.close()


def test_the_live_page_counts_and_adds_up_as_the_report_does(compared):
    for story, row in zip(gather([compared]), data.participation_rows(gather([compared])), strict=True):
        told = live(compared, f"{story.name}/seed-{story.seed}")
        found = told["participation"]
        assert (found["least"], found["most"]) == (row["fewest"], row["most"]) == (0, story.outcome.round)
        assert (found["counted"], found["absent"], found["dropped"]) == (
            row["contributions"], row["absent"], row["refused"])  # fmt: skip
        assert found["rarely"][0][1] == 0, "those who were never heard come first"
        assert told["seconds"]["total"] == sum(story.clock.seconds.values())
        assert told["points"]["evaluation/loss/mean"]["y"][-1] == pytest.approx(story.outcome.scores["mean"], rel=1e-4)
        chart = data.distribution([story])
        assert chart is not None
        group = chart["groups"][0]
        assert [told["clients"][key] for key in ("labels", "values", "median")] == [
            group[key] for key in ("labels", "values", "median")]  # fmt: skip
        weights = data.weights(story)
        assert weights is not None
        assert told["weights"]["panels"][0]["values"] == weights["panels"][0]["values"]


def test_a_run_that_is_judged_on_the_global_test_set_shows_that_everywhere(tmp_path):
    folder = write(tmp_path / "runs" / "one", "one", 0, target_on="global")
    assert read_outcome(folder).scores["mean"] == 0.5 / ROUNDS
    assert live(tmp_path / "runs", "one")["score"] == 0.5 / ROUNDS
    assert data.result_rows(gather([folder]))[0]["mean"]["mean"] == 0.5 / ROUNDS


def overflowed(row: dict[str, Any]) -> dict[str, Any]:
    """Somebody's loss was not finite in the last round, which records write as null."""
    if row["round"] == ROUNDS:
        row["evaluation"]["loss"] |= {"mean": None, "worst_served": None, "best": None}
    return row


def test_no_line_goes_through_the_better_seeds_alone(tmp_path):
    place = tmp_path / "runs"
    write(place / "seed-0", "mine", 0)
    write(place / "seed-1", "mine", 1, changed=overflowed)
    (row,) = summarise(read_outcomes([place]))
    assert row.mean is not None
    assert row.mean.mean == math.inf
    chart, sheet = data.curves(gather([place])), Figure().add_subplot()
    assert chart is not None
    found = chart["series"][0]["values"]["loss"]
    assert (found["mean"]["y"][-1], found["mean"]["high"][-1]) == (None, None)
    assert found["mean"]["y"][-2] is not None
    assert found["best_served"]["y"][-1] is not None, "who was served best is known"
    recorded.draw_curves(sheet, [place], Options())
    assert np.isnan(np.array(sheet.get_lines()[0].get_ydata())[-1])
    assert set(found) <= set(STATISTICS)


def test_two_experiments_of_one_name_are_told_apart_in_every_table(tmp_path):
    for place in ("a", "b"):
        write(tmp_path / "runs" / place / "seed-0", "mine", 0)
    names = [story.name for story in gather([tmp_path / "runs"])]
    assert names == ["mine (a)", "mine (b)"]
    invoke("export", tmp_path / "runs", "--format", "latex", "-o", tmp_path / "a.tex")
    text = (tmp_path / "a.tex").read_text()
    assert all(name in text for name in names)


def test_weights_by_element_are_averaged_over_leaves_then_layers(tmp_path):
    def finer(row: dict[str, Any]) -> dict[str, Any]:
        count = len(row["ids"])
        return row | {"weights": {"fc.weight": [0.2] * count, "fc.bias": [0.4] * count, "out.weight": [0.9] * count}}

    write(tmp_path / "runs" / "one", "one", 0, changed=finer)
    (story,) = gather([tmp_path / "runs"])
    panels = {name: float(grid.means()[0, 0]) for name, grid in story.history.weights.items()}
    assert panels == {"fc": pytest.approx(0.3), "out": 0.9}
    shown = live(tmp_path / "runs", "one")["weights"]["panels"][0]["values"]
    assert shown[0][0] == pytest.approx(0.6), "layers count alike, however many leaves they have"


def test_regret_is_of_the_whole_population(tmp_path):
    estimate, cohort = [0.0, 1.0, 0.5], [1.0]

    def decided(row: dict[str, Any]) -> dict[str, Any]:
        told = {"decision_loss": -math.log1p(0.5), "responses": cohort, "estimate": estimate, "p": [1 / 3] * 3}
        return row | {"info": told}

    folder = write(tmp_path / "runs" / "one", "one", 0, changed=decided)
    measured = measure_run(folder, "case", "one", ["regret"])
    (chart,) = [one for one in data.info_charts(gather([folder])) if one["id"].startswith("regret")]
    assert measured.scores["regret"] == pytest.approx(math.log(2) - math.log(1.5))
    assert chart["series"][0]["y"][-1] == pytest.approx(ROUNDS * measured.scores["regret"], rel=1e-4)


def test_regret_is_not_judged_by_a_cohort(tmp_path):
    def decided(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"info": {"decision_loss": -0.4, "responses": [1.0], "p_present": [0.5]}}

    folder = write(tmp_path / "runs" / "one", "one", 0, changed=decided)
    assert measure_run(folder, "case", "one", ["regret", "objective"]).scores == {"objective": pytest.approx(-1.6)}


def test_no_reader_sees_how_the_scores_of_clients_are_kept(tmp_path, monkeypatch):
    """Pages, tables and the live page of runs whose scores are in files are those of runs with lines, to the byte."""
    shown: list[dict[str, Any]] = []
    for form, least in (("lines", None), ("files", CLIENTS)):
        (tmp_path / form).mkdir()
        monkeypatch.chdir(tmp_path / form)
        for name in ("zeta", "alpha"):
            for seed in range(3):
                write(Path("runs") / name / f"seed-{seed}", name, seed, least=least, changed=without_tails)
        told = {
            table: invoke("export", "runs", "--table", table, "-o", f"{table}.csv") for table in ("results", "clients")
        }
        told |= {table: Path(f"{table}.csv").read_text() for table in told}
        told["page"] = page(gather([Path("runs")]))
        told["one"], told["gains"] = invoke("show", "runs/zeta/seed-0"), str(gather([Path("runs")])[0].clients)
        store = RunStore(Path("runs"))
        store.scan()
        watch = Watch(store)
        with watch.page(["zeta/seed-0"]):
            details = answers.details(store, "zeta/seed-0", watch.index("zeta/seed-0"))
        told["live"] = json.dumps({**details, "environment": {}})
        shown.append(told)
    assert len(list(Path("runs").rglob("*.parquet"))) == 6 * ROUNDS
    for name, told in shown[0].items():
        assert shown[1][name] == told, name


def without_tails(row: dict[str, Any]) -> dict[str, Any]:
    """As earlier versions wrote it, so that readers have to look at the clients."""
    summaries = {metric: {name: one for name, one in of.items() if not name.endswith("_served")}
                 for metric, of in row["evaluation"].items()}  # fmt: skip
    return {**row, "evaluation": summaries}

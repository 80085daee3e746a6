"""Results in a notebook: short texts, small self-contained HTML, tables, pictures, callbacks, the stop button."""

from __future__ import annotations

import logging
import re
import signal
import sys
import types
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import fedalloy
from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.experiment.callbacks import HOOKS
from fedalloy.experiment.records.reading import read_status
from fedalloy.testing import small_task


@pytest.fixture(scope="module")
def task():
    return fedalloy.task("synthetic", "logistic", clients=4)


def fit(task, rounds=3, **settings):
    return fedalloy.fit("fedavg", task, rounds=rounds, engine="loop", **settings)


@pytest.fixture(scope="module")
def shown(task, tmp_path_factory):
    """One of everything that is shown in a cell."""
    place = tmp_path_factory.mktemp("shown")
    kept = fit(task, folder=place / "one")
    compared = fedalloy.compare(task, ["fedavg", "fedprox"], place / "two", seeds=[0, 1], rounds=2)
    return {
        "result": fit(task), "kept": kept, "record": fedalloy.read_run(place / "one"), "comparison": compared,
        "task": task,
    }  # fmt: skip


class Tags(HTMLParser):
    """Checks that every tag is closed, and collects them."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.seen = list[str](), list[str]()

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)


def test_the_text_of_everything_is_a_line_or_two(shown, task):
    public = {
        **shown, "algorithm": fedalloy.algorithms.superfed_mm() if hasattr(fedalloy.algorithms, "superfed_mm")
        else fedalloy.algorithms.fedavg(), "key": fedalloy.Key.of(3), "ending": shown["kept"].ending,
        "config": shown["kept"].trained.fed.config, "federation": shown["kept"].trained.fed,
        "rows": shown["result"].recorder, "trained": shown["kept"].trained, "pool": task.train,
        "manifest": task.manifest,
        "outcome": shown["comparison"].outcomes[0], "row": shown["comparison"].rows[1],
        "gains": shown["comparison"].gains[0], "block": task.everyone("train"), "early": fedalloy.EarlyStopping(),
        "small": small_task().block, "description": task.describe(),
    }  # fmt: skip
    for name, one in public.items():
        text = repr(one)
        assert len(text) <= 240, (name, text)
        assert text.count("\n") <= 1, (name, text)
    assert "fedavg, seed 0: finished in round 3, accuracy" in repr(shown["result"])


@pytest.mark.parametrize("name", ["result", "kept", "record", "comparison", "task"])
def test_a_cell_shows_a_table_and_a_picture_without_scripts(name, shown):
    html = shown[name]._repr_html_()
    parsed = Tags()
    parsed.feed(html)
    assert parsed.open == []
    assert {"table", "svg"} <= set(parsed.seen)
    assert not {"script", "link", "img", "iframe"} & set(parsed.seen)
    said = html.replace('xmlns="http://www.w3.org/2000/svg"', "")  # a name, which nothing loads
    assert not re.search(r"https?:|\bon\w+=|nan|None", said)
    assert len(html.splitlines()) <= 40
    assert len(html) < 20_000


def test_names_in_html_are_text(task, tmp_path):
    done = fedalloy.compare(task, {"<script>alert(1)</script>": "fedavg"}, tmp_path, rounds=1)
    assert "<script" not in done._repr_html_()


def test_a_run_of_a_comparison_by_name(shown):
    compared = shown["comparison"]
    assert compared.run("fedprox", 1).recipe["run"]["seeds"] == [1]
    assert compared.run("fedprox").recipe["run"]["seeds"] == [0]
    with pytest.raises(SpecError, match="'fedpro' was not compared: did you mean 'fedprox'"):
        compared.run("fedpro")
    with pytest.raises(SpecError, match="no run with seed 7: its seeds are 0, 1"):
        compared.run("fedprox", 7)


def test_runs_of_others_in_the_folder_are_not_shown_and_the_order_stays(task, tmp_path):
    settings: dict[str, Any] = {"seeds": [0], "rounds": 1}
    fedalloy.compare(task, ["qfedavg"], tmp_path, **settings)
    done = fedalloy.compare(task, ["fedprox", "fedavg"], tmp_path, **settings)
    assert sorted(done.to_pandas()["name"]) == ["fedavg", "fedprox"]
    labels = [line.get_label() for line in done.plot(ax=Figure().subplots()).get_lines()]
    told = [label for label in labels if not label.startswith("_")]
    assert [label.partition(",")[0] for label in told] == list(dict.fromkeys(["fedprox", "fedavg"]))
    html = done._repr_html_()
    assert "qfedavg" not in html
    assert html.rindex("fedprox") < html.rindex("fedavg")


def test_why_runs_failed_is_shown(shown):
    done = shown["comparison"]
    failed = replace(done.outcomes[-1], state="failed", reason="a <fault> of this rule")
    html = replace(done, outcomes=(*done.outcomes[:-1], failed))._repr_html_()
    assert html.count("<div>a &lt;fault&gt; of this rule</div>") == 1
    assert "<fault>" not in html


def test_tables_of_pandas(shown):
    kept, compared = shown["kept"], shown["comparison"]
    assert list(kept.to_pandas()["round"]) == [1, 2, 3]
    memory = shown["result"].to_pandas()
    assert memory["evaluation/accuracy/mean"].tolist() == kept.to_pandas()["evaluation/accuracy/mean"].tolist()
    assert len(kept.to_pandas("clients")) == 3 * 4
    assert len(compared.to_pandas()) == 4
    assert set(compared.to_pandas()["name"]) == {"fedavg", "fedprox"}
    for table in ("clients", "weights"):
        kept_table = kept.to_pandas(table).drop(columns="run")
        assert shown["result"].to_pandas(table).equals(kept_table), "the same without a folder"
    with pytest.raises(SpecError, match="give fit a folder"):
        shown["result"].to_pandas("results")
    with pytest.raises(SpecError, match="did you mean 'rounds'"):
        kept.to_pandas("round")


def test_pictures_are_axes_of_matplotlib(shown):
    for name in ("result", "kept", "record", "comparison"):
        axes = shown[name].plot(ax=Figure().add_subplot())
        assert isinstance(axes, Axes)
        assert len(axes.get_lines()) >= 2
    assert isinstance(shown["comparison"].plot("clients", ax=Figure().add_subplot()), Axes)
    with pytest.raises(SpecError, match="give fit a folder"):
        shown["result"].plot("clients", ax=Figure().add_subplot())


def test_a_picture_of_a_metric_without_scores_is_refused(task, shown, tmp_path):
    for result in (shown["result"], shown["comparison"]):
        with pytest.raises(SpecError, match="'acuracy': did you mean 'accuracy'"):
            result.plot(metric="acuracy")
    with pytest.raises(CheckpointError, match="is a folder: name the file of the page"):
        shown["comparison"].report(tmp_path)


def test_the_page_of_a_comparison(shown, tmp_path):
    assert "fedprox" in shown["comparison"].report(tmp_path / "page.html").read_text(encoding="utf-8")
    with pytest.raises(SpecError, match="give fit a folder"):
        shown["result"].report(tmp_path / "other.html")


class Recording(fedalloy.Callback):
    """Writes down what is called, in its order."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def on_run_begin(self, start):
        self.called.append(f"begin {start.name} {start.round}/{start.rounds}")

    def on_evaluate(self, event):
        self.called.append(f"evaluate {event.progress.round}")

    def on_round_end(self, event):
        self.called.append(f"round {event.progress.round}")

    def on_checkpoint(self, round):
        self.called.append(f"checkpoint {round}")

    def on_run_end(self, state, reason):
        self.called.append(f"end {state} {reason}".strip())


def test_callbacks_are_called_in_order(task, tmp_path):
    heard = Recording()
    fit(task, 2, evaluate_every=2, folder=tmp_path, callbacks=[heard])
    assert heard.called == [
        "begin fedavg 0/2", "round 1", "evaluate 2", "round 2", "checkpoint 2", "end finished",
    ]  # fmt: skip
    assert {hook for hook in HOOKS if hasattr(heard, hook)} == set(HOOKS)


def test_early_stopping_finishes_a_run_and_a_longer_one_goes_on(task, tmp_path):
    stopping = fedalloy.EarlyStopping(patience=2, least=1.0)
    done = fit(task, 9, folder=tmp_path, callbacks=[stopping])
    assert (done.status, done.ending.progress.round) == ("finished", 3)
    assert done.ending.reason == "no better accuracy in 2 evaluations"
    assert fit(task, 9, folder=tmp_path, resume=True).ending.progress.round == 3, "it is finished"
    assert fit(task, 10, folder=tmp_path, resume=True).ending.progress.round == 10


def test_a_loss_is_better_when_it_falls(task):
    falling = fedalloy.EarlyStopping(patience=1, metric="loss")
    assert fit(task, 4, callbacks=[falling]).ending.progress.round == 4
    with pytest.raises(SpecError, match=r"not scored by 'los'.*did you mean 'loss'"):
        fit(task, 1, callbacks=[fedalloy.EarlyStopping(metric="los")])


def test_a_callback_can_stop_a_run_and_save_it(task, tmp_path):
    class Stopping:
        def on_round_end(self, event):
            if event.progress.round == 2:
                event.stop("enough")

    heard = Recording()
    done = fit(task, 5, folder=tmp_path, callbacks=[Stopping(), fedalloy.Checkpoints(every=1), heard])
    assert (done.status, done.ending.reason) == ("stopped", "enough")
    assert "checkpoint 1" in heard.called
    assert read_status(tmp_path)["state"] == "stopped"
    assert fit(task, 5, folder=tmp_path, resume=True).status == "finished"


def test_a_tracker_is_a_callback_and_an_error_in_a_callback_is_not_hidden(task, tmp_path):
    class Tracker:
        heard = 0

        def begin(self, run): ...

        def log(self, round, values):
            Tracker.heard += 1

        def end(self, state, reason): ...

    class Broken:
        def on_evaluate(self, event):
            raise ZeroDivisionError("mine")

    fit(task, 2, folder=tmp_path / "a", callbacks=[Tracker()])
    assert Tracker.heard == 4
    with pytest.raises(ZeroDivisionError, match="mine"):
        fit(task, 2, callbacks=[Broken()])


def test_what_would_never_be_called_is_refused(task):
    class Misspelt:
        def on_round_ends(self, event): ...

    with pytest.raises(SpecError, match=r"Misspelt\.on_round_ends is never called: did you mean 'on_round_end'"):
        fit(task, 1, callbacks=[Misspelt()])
    with pytest.raises(SpecError, match="is no callback"):
        fit(task, 1, callbacks=[print])
    with pytest.raises(SpecError, match=r"EarlyStopping is a class: give an object of it, EarlyStopping\(\)"):
        fedalloy.fit("fedavg", task, rounds=1, callbacks=[fedalloy.EarlyStopping])
    with pytest.raises(SpecError, match=r"callbacks must be a list of objects, .*write \[EarlyStopping\(\)\]"):
        fedalloy.fit("fedavg", task, rounds=1, callbacks=fedalloy.EarlyStopping())  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="Checkpoints needs the folder of the run"):
        fit(task, 1, callbacks=[fedalloy.Checkpoints()])
    wrong: list[Any] = ["runs", 0, 0.5]
    for value in wrong:
        with pytest.raises(SpecError, match="must be 1 or more"):
            fedalloy.Checkpoints(value)
        with pytest.raises(SpecError, match="must be 1 or more"):
            fedalloy.EarlyStopping(value)


def test_rounds_are_logged(task, caplog):
    caplog.set_level(logging.INFO, "fedalloy")
    fit(task, 1, callbacks=[fedalloy.LogRounds()])
    assert "round 1 of 1: accuracy" in caplog.text


@pytest.fixture
def notebook(monkeypatch):
    """A kernel that keeps what is displayed."""
    displayed: list[str] = []

    class Handle:
        def update(self, html):
            displayed.append(html)

    def display_new(html, display_id):
        displayed.append(html)
        return Handle()

    display = types.SimpleNamespace(HTML=str, display=display_new)
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell, display=display))
    return displayed


def pressing(round):
    def press(event):
        if event.progress.round == round:
            signal.raise_signal(signal.SIGINT)

    return press


def test_the_stop_button_of_a_notebook_ends_a_run_with_what_it_has(task, notebook, tmp_path):
    done = fit(task, 9, folder=tmp_path, watcher=pressing(2))
    assert (done.status, done.ending.progress.round) == ("stopped", 2)
    assert len(list(done.rounds())) == 2
    assert "stopped" in notebook[-1]
    assert 'value="2" max="9"' in notebook[-1]


def test_elsewhere_ctrl_c_is_still_an_interrupt(task):
    with pytest.raises(KeyboardInterrupt):
        fit(task, 9, watcher=pressing(1))


def test_the_stop_button_ends_a_comparison_with_the_runs_so_far(task, notebook, tmp_path):
    def press(news):
        if news.kind == "ended":
            raise KeyboardInterrupt

    done = fedalloy.compare(task, ["fedavg", "fedprox"], tmp_path, seeds=[0], rounds=1, processes=1, watcher=press)
    assert [(run.name, run.finished, run.reason) for run in done.outcomes] == [
        ("fedavg", True, ""), ("fedprox", False, "it has not begun"),
    ]  # fmt: skip
    assert done.conclusion == "No verdict yet: 1 run of 2 did not finish."
    assert repr(done) == f"<fedavg, fedprox: 1 of 2 runs finished; folder {tmp_path}>"
    assert "it has not begun" in done._repr_html_()
    assert len(done.to_pandas()) >= 1
    assert done.report(tmp_path / "report.html").stat().st_size
    assert [one.name for one in done.gains] == ["fedprox"]
    again = fedalloy.compare(task, ["fedavg", "fedprox"], tmp_path, seeds=[0], rounds=1, processes=1)
    assert again.outcomes[1].finished
    assert "2/2" in notebook[-1]


def test_the_stop_button_ends_a_comparison_that_is_still_tuning(task, notebook, tmp_path):
    def press(news):
        if news.kind == "ended":
            raise KeyboardInterrupt

    more: dict[str, Any] = {"grid": {"algorithm.lr": [0.1, 0.2]}, "tuning_seeds": [5], "watcher": press}
    done = fedalloy.compare(task, ["fedavg", "fedprox"], tmp_path, seeds=[0, 1], rounds=1, processes=1, **more)
    assert {run.reason for run in done.outcomes} == {"it has not begun"}
    assert done.conclusion == "No verdict yet: 4 runs of 4 did not finish."
    assert "0 of 4 runs finished" in repr(done)
    assert "it has not begun" in done._repr_html_()


def test_a_bar_in_a_terminal_is_one_line(task, capsys):
    fit(task, 2, progress=True)
    assert "2/2" in capsys.readouterr().err
    fit(task, 2)
    assert capsys.readouterr().err == ""

"""The notebooks: two of them run here, all with ``make docs``; what is committed is what came out."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest

pytest.importorskip("nbclient", reason="notebooks need nbclient (make env)")

from scripts import notebooks

NAMES = ["language-model", "regression", "segmentation", "text-adapters", "your-arrays", "your-weighting"]


def texts(output) -> dict[str, str]:
    return {"stream": output.text} if output.output_type == "stream" else dict(output.data)


@pytest.mark.slow
@pytest.mark.parametrize("name", notebooks.FAST)
def test_a_notebook_shows_what_comes_out(name):
    committed = notebooks.read(name)
    assert notebooks.differences(committed, notebooks.execute(committed)) == []


def test_there_are_six():
    assert notebooks.names() == NAMES
    assert sum(path.stat().st_size for path in notebooks.FOLDER.iterdir()) < 1_500_000


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_was_run_from_top_to_bottom_and_its_outputs_are_short(name):
    committed = notebooks.read(name)
    cells = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert notebooks.bare(committed).cells[0].source.startswith("# "), "it has a title"
    assert committed.metadata["fedalloy"].keys() >= {"torch", "arithmetic"}
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type in ("stream", "display_data", "execute_result")
            for kind, text in texts(output).items():
                assert "Warning" not in text
                assert str(notebooks.ROOT) not in text
                assert kind.startswith("image/") or len(text) < 20_000
            assert len(output.get("data", {}).get("text/plain", "").splitlines()) <= 40


def test_everything_that_a_notebook_offers_appears_in_one():
    code = "\n".join(cell.source for name in NAMES for cell in notebooks.read(name).cells)
    for word in (".plot(", ".report(", ".predict(", ".save(", "fedalloy.load(", ".to_pandas(", "read_run(", "# hub:",
                 "EarlyStopping", "check_rule(", "save_pretrained(", "stop button"):  # fmt: skip
        assert word in code, word
    shown = [texts(one).get("text/html", "") for name in NAMES for cell in notebooks.read(name).cells
             if cell.cell_type == "code" for one in cell.outputs]  # fmt: skip
    for part in ("<progress", "<polyline", "task of ", "finished in round"):
        assert any(part in html for html in shown), part


@pytest.fixture
def pair():
    """A notebook twice."""
    committed = notebooks.read("your-arrays")
    committed.metadata["fedalloy"] = notebooks.made_with(committed)
    return committed, copy.deepcopy(committed)


def outputs(notebook, kind):
    return [one for cell in notebook.cells if cell.cell_type == "code" for one in cell.outputs if kind in texts(one)]


def test_a_changed_text_number_or_picture_is_noticed(pair):
    committed, done = pair
    assert notebooks.differences(committed, done) == []
    html = outputs(done, "text/html")[1].data
    html["text/html"] = html["text/html"].replace("0.", "1.", 1)
    assert notebooks.differences(committed, done)
    committed, done = copy.deepcopy(committed), copy.deepcopy(committed)
    other = outputs(notebooks.read("your-weighting"), "image/png")[0].data["image/png"]
    outputs(done, "image/png")[0].data["image/png"] = other
    assert [line for line in notebooks.differences(committed, done) if line.endswith("picture 0 differs")]
    outputs(done, "text/html")[0].data.pop("text/html")
    assert len(notebooks.differences(committed, done)) > 1


def test_times_addresses_and_folders_are_masked_and_results_are_not():
    one = notebooks.masked(
        "15/15 accuracy 0.666, 371.6 rounds/s at 0x7f00aa11bb in /tmp/fedalloy-notebook-ab_1/work, 3.1 s"
    )
    other = notebooks.masked(
        "15/15 accuracy 0.666, 2.0 rounds/s at 0x7f99aa11bb in /tmp/fedalloy-notebook-zz/work, 12 s"
    )
    assert one == other
    assert notebooks.masked("accuracy 0.666") != notebooks.masked("accuracy 0.667")


def test_elsewhere_only_the_kinds_of_outputs_are_compared_and_that_is_said(pair, monkeypatch, capsys):
    committed, done = pair
    committed.metadata["fedalloy"]["torch"] = "1.0"
    html = outputs(done, "text/html")[1].data
    html["text/html"] = html["text/html"].replace("0.", "1.", 1)
    assert notebooks.differences(committed, done) == []
    assert "torch was 1.0 and is" in notebooks.made_elsewhere(committed)
    monkeypatch.setattr(notebooks, "read", lambda name: committed)
    monkeypatch.setattr(notebooks, "execute", lambda notebook: done)
    assert notebooks.main(["--check", "your-arrays"]) == 0
    assert "numbers not compared, as torch was 1.0" in capsys.readouterr().out
    done.cells[-1].outputs = []
    assert notebooks.main(["--check", "your-arrays"]) == 1


def test_data_that_had_to_be_fetched_are_remembered(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDALLOY_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plays = notebooks.read("language-model")
    assert plays.metadata["fedalloy"]["tinyshakespeare_roles.npz"] == "here"
    assert notebooks.made_with(plays)["tinyshakespeare_roles.npz"] == "absent"
    assert os.environ["FEDALLOY_DATA"] == str(notebooks.data_folder())


def test_a_cell_that_fails_is_named(monkeypatch, capsys, tmp_path):
    import nbformat

    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    nbformat.write(broken, tmp_path / "broken.ipynb")
    monkeypatch.setattr(notebooks, "FOLDER", Path(tmp_path))
    assert notebooks.main(["--check"]) == 1
    assert "broken: ZeroDivisionError: division by zero" in capsys.readouterr().out

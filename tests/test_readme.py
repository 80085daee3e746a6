"""The README's demo: its sentence and table are those of the stored runs, and nothing of them is typed."""

from __future__ import annotations

import pytest

from fedalloy.results.conclusion import conclusion
from fedalloy.results.table import summarise
from scripts import readme


def test_the_readme_shows_the_stored_demo():
    assert readme.main(["--check"]) == 0
    runs = readme.stored()
    text = readme.PAGE.read_text()
    assert conclusion(runs) in text
    for row in summarise(runs)[1:]:
        assert row.difference is not None
        assert f"{row.difference.text()}" in text, "with its interval"


@pytest.mark.parametrize(("old", "new"), [("| 0.953 ±", "| 0.954 ±"), ("No method beats", "Every method beats")])
def test_a_figure_or_sentence_that_was_typed_is_found(old, new, tmp_path, monkeypatch, capsys):
    changed = tmp_path / "README.md"
    changed.write_text(readme.PAGE.read_text().replace(old, new, 1))
    monkeypatch.setattr(readme, "PAGE", changed)
    assert readme.main(["--check"]) == 1
    assert "run 'python scripts/readme.py'" in capsys.readouterr().err
    assert readme.main([]) == 0
    assert readme.main(["--check"]) == 0


def test_what_is_stored_is_what_was_read(tmp_path, monkeypatch):
    runs = readme.stored()
    monkeypatch.setattr(readme, "STORE", tmp_path / "demo.json")
    readme.store(runs)
    assert readme.stored() == runs

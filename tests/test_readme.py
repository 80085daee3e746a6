"""The README's demo: its sentence and table are those of the stored runs, and nothing of them is typed."""

from __future__ import annotations

import re
import shutil

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
    shutil.copy(readme.FIRST, tmp_path)
    monkeypatch.setattr(readme, "FIRST", tmp_path / "index.md")
    assert readme.main(["--check"]) == 1
    assert "README.md differs" in capsys.readouterr().err
    assert readme.main([]) == 0
    assert readme.main(["--check"]) == 0


def test_a_count_that_was_typed_on_the_first_page_of_the_site_is_found(tmp_path, monkeypatch, capsys):
    typed, number = tmp_path / "index.md", re.compile(r"\d+ methods, made of")
    typed.write_text(number.sub("99 methods, made of", readme.FIRST.read_text()))
    monkeypatch.setattr(readme, "FIRST", typed)
    assert readme.main(["--check"]) == 1
    assert capsys.readouterr().err == "index.md differs from the code or demo.json: run 'python scripts/readme.py'\n"


def test_both_first_pages_say_for_whom_it_is_and_where_it_is_ahead_and_where_not():
    pages = [readme.PAGE.read_text(), readme.FIRST.read_text().replace("](", "](docs/")]
    whom = re.compile(r"\*\*For you if\*\*.*?(?=\(\[more\])", re.DOTALL)
    said = [re.sub(r"\]\([^)]*\)", "]", found[0]) for page in pages if (found := whom.search(page))]
    assert len(said) == 2
    assert said[0] == said[1]
    for begin, end in (readme.COUNTS, ("<!-- speed:", "<!-- end of speed -->")):
        blocks = [page.partition(begin)[2].partition(end)[0] for page in pages]
        assert blocks[0] == blocks[1]
        assert re.search(r"\d", blocks[0])
    assert all("\n## Where it is not the right tool\n" in page for page in pages)


def test_what_is_stored_is_what_was_read(tmp_path, monkeypatch):
    runs = readme.stored()
    monkeypatch.setattr(readme, "STORE", tmp_path / "demo.json")
    readme.store(runs)
    assert readme.stored() == runs

"""Recipes can bring code: from the current folder only when that was allowed, and never while they are checked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedalloy.cli.importing import forget_current_folder

MODULE = """
import pathlib

pathlib.Path("mark").touch()

def clients(key):
    import torch

    x = torch.randn(30, 4, generator=key.generator())
    return [(x, (x[:, 0] > 0).long())] * 3

def net(inputs, classes):
    import torch

    return torch.nn.Linear(inputs, classes)
"""
WAYS = {
    "imports": 'imports = ["planted"]\n[partition]\nclients = 2\n[run]\nrounds = 1\n',
    "dataset": '[task]\ndataset = { kind = "callable", function = "planted:clients" }\n[run]\nrounds = 1\n',
    "model": '[task]\nmodel = "planted:net"\n[partition]\nclients = 2\n[run]\nrounds = 1\n',
}


@pytest.fixture(params=WAYS)
def recipe(request, tmp_path) -> Path:
    (tmp_path / "planted.py").write_text(MODULE)
    (tmp_path / "mine.toml").write_text(WAYS[request.param])
    return tmp_path / "mine.toml"


def test_the_current_folder_is_imported_from_only_when_that_is_allowed(cli, recipe, tmp_path):
    refused = cli.run("run", recipe, cwd=tmp_path)
    assert refused.code in (1, 2)
    assert "--allow-imports" in refused.err
    assert not (tmp_path / "mark").exists()
    done = cli.run("run", recipe, "--allow-imports", cwd=tmp_path)
    assert done.code == 0, done.err
    assert (tmp_path / "mark").exists()


def test_a_comparison_passes_it_on_to_its_processes(cli, tmp_path):
    (tmp_path / "planted.py").write_text(MODULE)
    (tmp_path / "mine.toml").write_text(WAYS["model"])
    done = cli.run("compare", tmp_path / "mine.toml", "--allow-imports", "--jobs", "1", cwd=tmp_path)
    assert done.code == 0, done.err


def test_checking_imports_nothing_even_what_could_be_found(cli, recipe, tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"sys.argv = ['fedalloy', 'recipe', 'check', {str(recipe)!r}]\nfrom fedalloy.cli import main\nmain()"
    )
    done = cli.wait(cli.start(cwd=tmp_path, code=code))
    assert done.code == 0, done.err
    assert "planted" in done.out
    assert "not checked" in done.out
    assert not (tmp_path / "mark").exists()


def test_python_m_does_not_look_into_the_current_folder_either(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/elsewhere"])
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    forget_current_folder()
    assert sys.path == ["/elsewhere"]
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/elsewhere"])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    forget_current_folder()
    assert sys.path == [str(tmp_path), "/elsewhere"], "who puts it on PYTHONPATH means it"


def test_a_recipe_is_checked_as_a_whole(cli, tmp_path):
    (tmp_path / "r.toml").write_text("[partition]\nclients = 4\n[run]\nrounds = 1\n")
    done = cli.run("recipe", "check", tmp_path / "r.toml", "--set", "sampling.cohort=4", cwd=tmp_path)
    assert (done.code, "fine, 1 x 1 runs" in done.out, "not checked" in done.out) == (0, True, False), done.err
    done = cli.run("recipe", "check", tmp_path / "r.toml", "--set", "sampling.cohort=5", cwd=tmp_path)
    assert (done.code, "number of clients (4), got 5" in done.err) == (2, True)

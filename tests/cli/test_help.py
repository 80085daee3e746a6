"""The help of every command: no word is lost, and its example runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from typer import rich_utils
from typer.main import get_command
from typer.testing import CliRunner

from fedalloy.cli.app import app
from fedalloy.cli.helping import BEFORE, EXAMPLES

ROOT = Path(__file__).resolve().parents[2]
CHEAP = ["run", "compare", "reproduce", "list", "show", "report", "export", "plot", "doctor", "data list", "data where",
         "data describe", "recipe schema", "recipe check", "unseen", "unfold", "synth export",
         "synth grid"]  # fmt: skip
"""In an order in which each finds what it needs."""


def commands(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        return [one for name, inner in command.commands.items() for one in commands(inner, (*path, name))]
    return [(" ".join(path), command)]


COMMANDS = dict(commands(get_command(app)))


def words(text: str) -> str:
    """The text without frames and line breaks."""
    return re.sub(r"[\s│╭╮╰╯─]+", "", text)


def as_wide_as(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of so many columns; typer reads TERMINAL_WIDTH once, when its first help is shown."""
    monkeypatch.setattr(rich_utils, "MAX_WIDTH", columns)
    monkeypatch.setenv("COLUMNS", str(columns))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_prints_every_word_of_its_source(name, monkeypatch):
    as_wide_as(200, monkeypatch)
    shown = words(CliRunner().invoke(app, [*name.split(), "--help"]).output)
    command = COMMANDS[name]
    texts = [command.help or "", EXAMPLES[name], *(getattr(one, "help", None) or "" for one in command.params)]
    sought = [part for text in texts for part in re.split(r"\n|\f", text) if part.strip()]
    hidden = [getattr(one, "help", "") for one in command.params if getattr(one, "hidden", False)]
    assert [part for part in sought if words(part) not in shown and part not in hidden] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_lines_of_help_are_broken_where_the_terminal_ends(name, monkeypatch):
    as_wide_as(1000, monkeypatch)
    shown = CliRunner().invoke(app, [*name.split(), "--help"]).output
    source = COMMANDS[name].help or ""
    for paragraph in source.replace("\f", "\n\n").split("\n\n"):
        if "\n  " not in paragraph:
            assert " ".join(paragraph.split()) in shown


def test_every_command_has_an_example_of_itself():
    assert EXAMPLES.keys() == COMMANDS.keys()
    for name, example in EXAMPLES.items():
        assert example.startswith(f"fedalloy {name.replace('newcomers', 'unseen')}")
        assert all((ROOT / word).exists() for word in example.split() if word.startswith("recipes/")), example


def test_cheap_examples_run_as_they_stand(tmp_path, monkeypatch):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    before = dict.fromkeys(BEFORE[name] for name in CHEAP if name in BEFORE)
    for line in (*before, *(EXAMPLES[name] for name in CHEAP)):
        arguments = shlex.split(line)[1:]
        done = CliRunner().invoke(app, arguments if arguments[0] != "compare" else [*arguments, "-j", "1"])
        assert done.exit_code == 0, (line, done.output[-800:])
    assert {"samples/samples.npz", "samples.png", "weights.json"} <= {
        str(file.relative_to(tmp_path)) for file in tmp_path.glob("**/*")
    }


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in CHEAP])
def test_the_other_examples_are_understood(name):
    """Arguments and options exist; nothing runs."""
    command, *arguments = COMMANDS[name], *shlex.split(EXAMPLES[name])[1 + len(name.split()) :]
    context = command.make_context(name, list(arguments))
    assert context.params

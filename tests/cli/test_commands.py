"""What the commands print, and the codes they exit with."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_help_answers_at_once_and_loads_nothing_heavy():
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-m", "fedalloy", "--help"], env=env, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0
    assert "Exit codes" in done.stdout
    # Processor time, not the clock: the promise is about our work, not about what else the machine does.
    assert min(spent) < 0.5, spent
    program = "import sys, fedalloy.cli.app; print({'torch', 'numpy', 'pydantic', 'sklearn'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_run_writes_plain_lines_and_is_reproduced_by_the_recipe_it_leaves(cli, recipe, tmp_path):
    first = cli.run("run", recipe, "-o", tmp_path / "a", "--seed", 1, "--profile")
    assert first.code == 0, first.err
    assert "tiny, seed 1, 4 rounds" in first.out
    assert "round 4/4  accuracy" in first.out
    assert "clients" in first.out
    again = cli.run("run", tmp_path / "a" / "recipe.toml", "-o", tmp_path / "b", "--json")
    told = json.loads(again.out)
    assert (told["state"], told["seed"], told["round"]) == ("finished", 1, 4)
    for name in ("rounds.jsonl", "clients.jsonl", "recipe.toml", "manifest.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    shown = cli.run("show", tmp_path / "a")
    assert "tiny, seed 1: finished after round 4" in shown.out
    longer = cli.run("run", tmp_path / "b", "--resume", "--set", "run.rounds=5", "--json")
    assert (longer.code, json.loads(longer.out)["round"]) == (0, 5)


def test_a_run_in_which_nobody_counted_ends_with_code_1(cli, recipe, tmp_path):
    done = cli.run("run", recipe, "-o", tmp_path / "a", "--set", "devices.success=0.0")
    assert done.code == 1
    assert "failed in round 4: no client contributed in any of 4 rounds" in done.out


def test_a_folder_that_holds_a_run_is_not_overwritten_and_default_folders_are_numbered(cli, recipe, tmp_path):
    assert cli.run("run", recipe, "--quick", "--json", cwd=tmp_path).code == 0
    assert cli.run("run", recipe, "--quick", "--json", cwd=tmp_path).code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["tiny", "tiny-2"]
    refused = cli.run("run", recipe, "-o", "runs/tiny", cwd=tmp_path)
    assert refused.code == 1
    assert "holds a run already" in refused.err
    other = cli.run("run", recipe, "-o", "runs/tiny", "--resume", "--set", "run.rounds=9", cwd=tmp_path)
    assert other.code == 1
    assert "evaluate.every is 3 there, 1 here" in other.err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("run.ronds=3", "run.ronds: unknown key; did you mean 'rounds'?"),
        ("run.rounds=many", "run.rounds: got 'many'; should be a whole number"),
        ("algorithm.name=fedprx", "algorithm.name: unknown algorithm 'fedprx': did you mean 'fedprox'?"),
        ("partition.alpah=1", "unknown argument 'alpah'; did you mean 'alpha'?"),
        ("task.dataset=digit", "unknown dataset 'digit': did you mean 'digits'?"),
        ("rounds", "'rounds' sets nothing: write a.b=value"),
    ],
)
def test_a_misspelt_recipe_is_one_clear_line(cli, recipe, tmp_path, change, said):
    done = cli.run("run", recipe, "-o", tmp_path / "run", "--set", change)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "run" / "recipe.toml").exists()


def test_debug_shows_the_traceback_wherever_it_stands(cli, recipe):
    done = cli.run("run", recipe, "--set", "run.ronds=3", "--debug")
    assert "Traceback" in done.err


def test_a_diverged_run_fails_with_its_round(cli, recipe, tmp_path):
    done = cli.run("run", recipe, "-o", tmp_path / "run", "--json", "--set", "algorithm.lr=1e38")
    told = json.loads(done.out)
    assert done.code == 1
    assert told["state"] == "failed"
    assert told["reason"]


def test_unknown_commands_and_rules_are_wrong_usage(cli):
    assert cli.run("rum").code == 2
    done = cli.run("show", "sampels")
    assert done.code == 2
    assert "did you mean 'samples'?" in done.err


def test_list_show_doctor_data_and_schema(cli):
    listed = json.loads(cli.run("list", "--json").out)
    assert {"fedavg", "scaffold"} <= set(listed["algorithms"])
    assert all(line for rules in listed.values() for line in rules.values()), "a rule without a line about it"
    shown = json.loads(cli.run("show", "dirichlet", "--json").out)
    assert {"name": "alpha", "kind": "number", "default": "0.5"} in shown[0]["arguments"]
    assert "allowed" in cli.run("show", "shards").out
    assert cli.run("doctor", "--json").code == 0
    assert "digits" in cli.run("data", "list").out
    assert cli.run("data", "where").code == 0
    assert json.loads(cli.run("recipe", "schema").out)["properties"]["run"]


def test_conform_exits_by_what_it_found(cli, tmp_path):
    vectors = ROOT / "tests" / "vectors"
    fine = cli.run("conform", vectors / "fednova.json", "--json")
    assert fine.code == 0, fine.err
    assert json.loads(fine.out)["exit_code"] == 0
    changed = json.loads((vectors / "fednova.json").read_text())
    changed["group"] = "nobody built this"
    (tmp_path / "unbuilt.json").write_text(json.dumps(changed))
    assert cli.run("conform", tmp_path / "unbuilt.json").code == 3
    assert cli.run("conform", tmp_path / "missing.json").code == 2


def test_compare_says_which_entries_a_change_does_not_reach(cli, tmp_path):
    entries = '[[compare]]\nname = "fedavg"\nset = { "algorithm.lr" = 0.1 }\n[[compare]]\nname = "scaffold"\n'
    entries += '[[compare]]\nname = "fedprox"\n[compare.set.algorithm]\nlr = 0.3\n'
    recipe = tmp_path / "several.toml"
    recipe.write_text(f"[partition]\nclients = 3\n{entries}")
    done = cli.run("compare", recipe, "--quick", "--set", "algorithm.lr=0.2", "-o", tmp_path / "out", "-j", 1)
    assert done.code == 0, done.err
    assert "'fedavg' keeps its own algorithm.lr = 0.1; --set does not reach it" in done.err
    assert "'fedprox' keeps its own algorithm.lr = 0.3" in done.err
    assert "'scaffold' keeps" not in done.err


def test_compare_reuses_what_is_there_and_report_makes_a_page_of_it(cli, recipe, tmp_path):
    line = ["compare", recipe, "--algorithms", "fedavg,scaffold", "-o", tmp_path / "out"]
    done = cli.run(*line, "-j", 2)
    assert done.code == 0, done.err
    assert "rounds to target" in done.out
    assert sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").glob("*/seed-*")) == [
        "fedavg/seed-0", "fedavg/seed-1", "scaffold/seed-0", "scaffold/seed-1",
    ]  # fmt: skip
    again = cli.run(*line)
    assert again.err.count("already there") == 4
    assert again.out.startswith("No verdict over 2 seeds: one needs at least 3.")
    page = tmp_path / "pages" / "report.html"
    assert cli.run("report", tmp_path / "out", "-o", page).code == 0
    assert "scaffold" in page.read_text()


def test_the_reference_page_is_up_to_date(cli):
    done = cli.wait(cli.start(cwd=ROOT, code="import sys\nfrom fedalloy.docs import main\nsys.exit(main(['--check']))"))
    assert done.code == 0, done.err

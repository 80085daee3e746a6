"""One new file in a room is all a new rule needs: it is listed, held to the conformance table, and runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
TOY = '''
"""Everyone counts by the logarithm of its examples."""
from dataclasses import dataclass
from fedalloy.core.protocols import Weighting
from fedalloy.core.registry import register

@register("weighting", "toy_log")
@dataclass(frozen=True)
class ToyLog(Weighting):
    """Weights by log(base + n)."""
    base: float = 2.0

    def weigh(self, cohort, state, ctx):
        scores = (cohort.stats["num_examples"].double() + self.base).log()
        return scores / scores.sum(), state, {}
'''
CONFORMANCE = """
import json
from fedalloy.testing import conformance_table, run_row
rows = [row for row in conformance_table() if row.name == "toy_log"]
print(json.dumps({"checks": len(rows), "problems": [run_row(row) for row in rows]}))
"""


def test_a_toy_weighting_in_one_file_is_everywhere(nurseries, recipe, tmp_path):
    copy = tmp_path / "src"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "fedalloy" / "methods" / "weightings" / "toy_log.py").write_text(TOY)
    cli = nurseries(copy, tmp_path)
    assert (
        json.loads(cli.run("list", "weightings", "--json").out)["weightings"]["toy_log"] == "Weights by log(base + n)."
    )
    table = json.loads(cli.python(CONFORMANCE).out)
    assert table["checks"] > 0
    assert not any(table["problems"])
    recipe.write_text(recipe.read_text() + '[weighting]\nkind = "toy_log"\nbase = 3.0\n')
    done = cli.run("run", recipe, "-o", tmp_path / "run", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["state"] == "finished"
    row = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[0])
    plain = cli.run("run", recipe, "-o", tmp_path / "other", "--json", "--set", "weighting={kind='samples'}")
    assert plain.code == 0, plain.err
    assert row["weights"] != json.loads((tmp_path / "other" / "rounds.jsonl").read_text().splitlines()[0])["weights"]

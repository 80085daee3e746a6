"""What `fedalloy advise` chose on the federations of the page, knowing nothing of the one that it was asked about, and
what that choice costs by the page's own tables."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.stored import Federation, regret_of_random
from fedalloy.studies.advise.call import METHODS

NAMES = {"fedavg_ft": "fedavg fine-tuned"}
"""Methods whose entry has another name."""
_ALWAYS = ("fedavg", "fedavg fine-tuned")
"""What a user could do without asking."""


@dataclass(frozen=True)
class Answer:
    """The advice for one federation: what was asked, and what was said."""

    federation: str
    command: str
    method: str
    first: str
    rounds: int
    seeds: int
    stages: tuple[str, ...]

    @property
    def entry(self) -> str:
        """The advised method by its name in the tables."""
        return NAMES.get(self.method, self.method)


def gather(place: Path, to: Path) -> str:
    """Keep the answer in the folder of an advice; returns what to print."""
    found = json.loads((place / "advice.json").read_text(encoding="utf-8"))
    record = found["pilot"]
    kept = {
        "federation": place.name, "command": _command(place, record["asked"]), "method": found["method"],
        "first": found["first"], "rounds": record["rounds"], "seeds": len(record["report"]["seeds"]),
        "stages": [f"{', '.join(one['methods'])}: trials {one['trials']}" for one in record["stages"]],
    }  # fmt: skip
    to.mkdir(parents=True, exist_ok=True)
    file = to / f"{place.name}.json"
    file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return f"{file}: {found['method']}"


def _command(place: Path, asked: dict[str, Any]) -> str:
    """What was asked, its seeds included: they must be others than those of the tables."""
    run, recipe = asked["recipe"]["run"], f"recipes/side-by-side/{place.name}.toml"
    seeds = [f"--set run.{name}={json.dumps(run[name], separators=(',', ':'))}" for name in ("seeds", "tuning_seeds")]
    budget = [f"--minutes {asked['minutes']:g}", *([f"--most {asked['most']}"] if asked["most"] != METHODS else [])]
    without = [f"--without {name}" for name in asked["without"]]
    return " ".join(["fedalloy advise", recipe, *seeds, *budget, *without, "-o", f"runs/advise/{place.name}"])


def answers(folder: Path) -> list[Answer]:
    """The kept answers, by federation."""
    tables = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    return [Answer(**{**one, "stages": tuple(one["stages"])}) for one in tables]


def regrets(told: Sequence[Answer], federations: Sequence[Federation]) -> list[list[str]]:
    """A row for every way of choosing: regret and rank on every federation with an answer, and the mean regret."""
    by_name = {one.federation: one for one in told}
    asked = [each for each in federations if each.name in by_name]
    ways = {"`fedalloy advise`": [by_name[each.name].entry for each in asked]}
    ways |= {f"always {name}, tuned": [name] * len(asked) for name in _ALWAYS}
    rows = [_row(way, names, asked) for way, names in ways.items()]
    drawn = regret_of_random(asked)
    middle = [f"{(len(each.entries) + 1) / 2:.1f}" for each in asked]
    cells = [f"{one:.1f} (rank {rank})" for one, rank in zip(drawn, middle, strict=True)]
    return [*rows, ["a method drawn at random", *cells, f"{statistics.fmean(drawn):.1f}"]]


def _row(way: str, names: Sequence[str], asked: Sequence[Federation]) -> list[str]:
    found = [each.regret(name) for name, each in zip(names, asked, strict=True)]
    cells = [_cell(name, one, each) for name, one, each in zip(names, found, asked, strict=True)]
    mean = statistics.fmean(found)
    return [way, *cells, f"{mean:.1f}" if math.isfinite(mean) else "-"]


def _cell(name: str, regret: float, each: Federation) -> str:
    """The regret and the rank; a method that the page does not compare has neither."""
    if each.entry(name) is None:
        return f"{name}: not compared here"
    shown = f"{regret:.1f}" if math.isfinite(regret) else "failed"
    return f"{shown} (rank {each.rank(name)} of {len(each.entries)})"

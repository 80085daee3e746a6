"""The round that the design page walks through is the one that runs: the same functions, in the same order."""

from __future__ import annotations

import inspect
import itertools
import pkgutil
import re
import sys
from types import FrameType

import fedalloy
from fedalloy.testing import small_task
from scripts.docs.blocks import ROOT
from tests.site.test_names import DOTTED, spans

ELSEWHERE = {"cli.run.run", "experiment.recipe.resolving.resolve", "core.idle.left_out"}
"""Functions of the walk that plain FedAvg from Python does not need."""


def steps(text: str) -> list[str]:
    """The functions named in the numbered steps, in the order in which they are first named."""
    walk = text.partition("\n## One round")[2].partition("\n**The same round over Flower")[0]
    numbered = "\n".join(re.findall(r"^\d+\. .*(?:\n +.*)*", walk, re.MULTILINE))
    names = dict.fromkeys(name for name in spans(numbered) if DOTTED.fullmatch(name))
    return [name for name in names if inspect.isfunction(pkgutil.resolve_name(f"fedalloy.{name}"))]


def last_calls(folder) -> dict[str, int]:
    """When each function was called last in a run of one round."""
    calls: dict[str, int] = {}
    count = itertools.count()

    def note(frame: FrameType, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("fedalloy."):
            calls[f"{module.removeprefix('fedalloy.')}.{frame.f_code.co_qualname}"] = next(count)

    task, before = small_task("linear"), sys.getprofile()
    sys.setprofile(note)
    try:
        fedalloy.fit("fedavg", task, rounds=1, engine="loop", folder=folder)
    finally:
        sys.setprofile(before)
    return calls


def test_the_walk_is_the_way(tmp_path):
    named = [name for name in steps((ROOT / "docs" / "design.md").read_text()) if name not in ELSEWHERE]
    calls = last_calls(tmp_path / "run")
    assert len(named) > 20
    assert [name for name in named if name not in calls] == []
    assert named == sorted(named, key=calls.__getitem__)

"""What the seeds of a comparison redraw, from the records of its runs.

Seeds that each draw another split of the same examples into training and test part are not independent: each run is
tested on examples that others train on. The data are then too small to have a test set of their own, and the spread
over seeds is corrected (:mod:`fedalloy.results.evidence`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedalloy.experiment.records.reading import seed_of

_MODEL = "the initial model"


@dataclass(frozen=True)
class Drawn:
    """What one run drew: hashes of its partition, its examples and its test rows; empty where nothing is recorded.

    ``reused`` is the ratio of test to training examples, 0 where the score is taken on a test set that comes with the
    data. ``chances`` are the other draws, as its recipe shows them. ``start`` is a hash of its initial model, empty
    where it is not known.
    """

    seed: int
    partition: str
    examples: str
    test_rows: str
    reused: float
    chances: tuple[str, ...]
    start: str = ""


@dataclass(frozen=True)
class Redrawn:
    """What differs between the seeds, and the ratio that corrects for examples that they share (0: no correction)."""

    chances: tuple[str, ...]
    partition: bool
    examples: bool
    split: bool
    reused: float

    @property
    def text(self) -> str:
        """The sentence under a table."""
        data = ["the examples themselves"] * self.examples + ["which client has which examples"] * self.partition
        data += ["which of them are for testing"] * self.split
        said = f"A seed redraws {_listed([*self.chances, *data])}."
        if self.reused:
            said += (
                " As these splits share their examples, the intervals are widened after Nadeau and Bengio (2003), with "
                f"{self.reused:.2f} test examples per training example, and ranks give no verdict."
            )
        return said


def drawn_by(recipe: Mapping[str, Any], manifest: Mapping[str, Any], on_global: bool) -> Drawn:
    """What a run drew. Without a record of the split, every seed of a recipe is taken to draw another one."""
    task = recipe.get("task")
    split: Mapping[str, Any] = manifest.get("split", {})
    test = float(split.get("test", task.get("test_fraction", 0.2) if task else 0.0))
    train = float(split.get("train", 1 - test - (task or {}).get("valid_fraction", 0.0)))
    own = on_global and bool(split.get("common_test", False))
    return Drawn(
        seed_of(recipe),
        str(manifest.get("digest", "")),
        str(split.get("labels", "")),
        str(split.get("rows", "")),
        0.0 if own or not train else test / train,
        _chances(recipe),
    )


def redrawn(runs: Iterable[Drawn | None]) -> Redrawn | None:
    """What the seeds of an algorithm's runs redraw; None where there are no records, or one seed."""
    drawn = [one for one in runs if one is not None]
    if len({one.seed for one in drawn}) < 2:
        return None
    examples = _differ([one.examples for one in drawn])
    rows = [one.test_rows for one in drawn]
    split = not examples and (_differ(rows) or not any(rows)) and any(one.reused for one in drawn)
    partition = _differ([one.partition for one in drawn]) and not examples
    chances = tuple(one for one in drawn[0].chances if one != _MODEL or not _same_start(drawn))
    return Redrawn(chances, partition, examples, split, max(one.reused for one in drawn) if split else 0.0)


def _same_start(drawn: Sequence[Drawn]) -> bool:
    """Whether all seeds begin with one model, as with a module that was built before."""
    return {one.start for one in drawn} != {""} and not _differ([one.start for one in drawn])


def _chances(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    """The draws of every run, and those that the recipe asks for."""
    sampling, devices = recipe.get("sampling", {}), recipe.get("devices", {})
    cohorts = sampling.get("kind") != "list" and sampling.get("cohort") not in (None, 1.0)
    links = any(devices.get(name, 1.0) != 1.0 for name in ("success", "availability"))
    asked = {"the cohorts": cohorts, "failing links": links, "wrong labels": "noise" in recipe}
    return _MODEL, "the order of batches", *(name for name, wanted in asked.items() if wanted)


def _differ(values: Sequence[str]) -> bool:
    return len(set(values)) > 1


def _listed(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]

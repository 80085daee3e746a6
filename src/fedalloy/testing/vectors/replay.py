"""Replay one file of golden vectors in float64; every expected field is pass, fail or not built.

Every group has one function, registered under the group's name in its own file:

    @register("conform", "fednova")
    def fednova(case: VectorCase) -> Iterator[Fields]: ...

It yields, round by round, the fields it can compute with fedalloy's rules. A field it leaves out, a case it
ends early and a group that is not registered are *not built*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from fedalloy.core import registry
from fedalloy.testing.vectors.files import Recorded, VectorCase, flatten, numbers, read

Fields = Mapping[str, Any]
"""Computed values by name: tensors or numbers, ``Within`` around those with a larger tolerance, nested mappings of
them."""
Replayer = Callable[[VectorCase], Iterator[Fields]]
Status = Literal["pass", "fail", "not built"]

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Within:
    """A computed value with a larger tolerance (1e-7 for quadratic programs)."""

    tolerance: float
    value: Any


@dataclass(frozen=True)
class FieldComparison:
    """One expected field of one round; ``error`` is None when nothing was computed, infinite for another shape."""

    case: int
    round: int
    error: float | None
    tolerance: float = TOLERANCE


@dataclass(frozen=True)
class FieldResult:
    """One expected field over all cases and rounds of a file."""

    name: str
    comparisons: tuple[FieldComparison, ...]

    @property
    def status(self) -> Status:
        """A mismatch anywhere fails; a field passes when it was computed everywhere."""
        if any(one.error is not None and one.error > one.tolerance for one in self.comparisons):
            return "fail"
        return "not built" if any(one.error is None for one in self.comparisons) else "pass"

    @property
    def worst(self) -> FieldComparison | None:
        """The comparison with the largest error; None when there was none."""
        made = [one for one in self.comparisons if one.error is not None]
        return max(made, key=lambda one: one.error or 0.0, default=None)

    @property
    def error(self) -> float | None:
        """The largest absolute error; None when nothing was computed."""
        return self.worst.error if self.worst else None

    @property
    def tolerance(self) -> float:
        """The tolerance of the comparison with the largest error."""
        return self.worst.tolerance if self.worst else TOLERANCE


@dataclass(frozen=True)
class Report:
    """The result of replaying one file."""

    path: Path
    group: str
    fields: list[FieldResult]

    @property
    def exit_code(self) -> int:
        """0 when all fields pass, 1 on any mismatch, 3 when all others pass but some are not built."""
        found = {field.status for field in self.fields}
        return 1 if "fail" in found else 3 if "not built" in found else 0


def replay(path: str | Path) -> Report:
    """Replay one file; an unreadable or malformed one is a ``SpecError``."""
    path = Path(path)
    vectors = read(path)
    replayer = registry.everything("conform").get(vectors.group)
    found: dict[str, list[FieldComparison]] = {}
    for number, recorded in enumerate(vectors.records, 1):
        try:
            for name, comparison in _compare(replayer, recorded, number):
                found.setdefault(name, []).append(comparison)
        except Exception as error:
            error.add_note(f"while replaying case {number} of {path}")
            raise
    return Report(path, vectors.group, [FieldResult(name, tuple(all_of_it)) for name, all_of_it in found.items()])


def exit_code(reports: Iterable[Report]) -> int:
    """The exit code of several files: a mismatch outweighs what is not built, which outweighs success."""
    codes = {report.exit_code for report in reports}
    return next((code for code in (1, 3) if code in codes), 0)


def distance(expected: Tensor, computed: Tensor) -> float:
    """The largest absolute difference; infinite for other shapes and where only one side is NaN.

    >>> import torch
    >>> distance(torch.tensor([1.0, torch.nan]), torch.tensor([1.5, torch.nan]))
    0.5
    """
    if expected.shape != computed.shape:
        return inf
    same = (expected == computed) | (expected.isnan() & computed.isnan())
    gaps = (expected - computed)[~same].abs()
    return float(gaps.nan_to_num(nan=inf, posinf=inf).max()) if gaps.numel() else 0.0


def _compare(replayer: Replayer | None, recorded: Recorded, case: int) -> Iterator[tuple[str, FieldComparison]]:
    rounds = iter(replayer(recorded.case)) if replayer else iter(())
    for number, expected in enumerate(recorded.expected, 1):
        computed = flatten(next(rounds, {}))
        for name, wanted in expected.items():
            yield name, _comparison(wanted, name, computed, case, number)


def _comparison(wanted: Tensor, name: str, computed: Fields, case: int, round: int) -> FieldComparison:
    if name not in computed:
        return FieldComparison(case, round, None)
    found = computed[name]
    within = found if isinstance(found, Within) else Within(TOLERANCE, found)
    return FieldComparison(case, round, distance(wanted, numbers(within.value, f"computed {name}")), within.tolerance)

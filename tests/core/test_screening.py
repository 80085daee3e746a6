"""Contributions are checked before they count."""

from __future__ import annotations

import pytest
import torch

from fedalloy.core.screening import misfit, screen
from fedalloy.core.statistics import STATISTICS, SizeLimits, Statistic
from fedalloy.core.types import Cohort, Part

SHARED = {"params": {"w": torch.zeros(2), "b": torch.zeros(1)}, "buffers": {"n": torch.tensor(3)}}
PARTS = {"delta": Part(), "buffers": Part("samples", like="buffers")}


def fitting() -> dict[str, dict[str, torch.Tensor]]:
    return {"delta": {"w": torch.ones(2), "b": torch.ones(1)}, "buffers": {"n": torch.tensor(4)}}


def test_what_fits_has_no_misfit():
    assert misfit(fitting(), PARTS, SHARED) is None


@pytest.mark.parametrize(
    ("part", "leaves", "message"),
    [
        ("delta", {"w": torch.ones(2)}, "part 'delta' lacks b"),
        ("delta", {"w": torch.ones(2), "b": torch.ones(1), "c": torch.ones(1)}, "part 'delta' has unexpected c"),
        ("delta", {"w": torch.ones(3), "b": torch.ones(1)}, "part 'delta': w has shape (3,) instead of (2,)"),
        ("delta", {"w": torch.ones(2, 1), "b": torch.ones(1)}, "w has shape (2, 1) instead of (2,)"),
        ("delta", {"w": torch.ones(2).double(), "b": torch.ones(1)}, "dtype torch.float64 instead of torch.float32"),
        ("buffers", {"n": torch.tensor(4.0)}, "part 'buffers': n has dtype torch.float32 instead of torch.int64"),
        ("control", {}, "sent the parts buffers, control, delta instead of buffers, delta"),
    ],
)  # fmt: skip
def test_a_misfit_is_told_by_name(part, leaves, message):
    reason = misfit({**fitting(), part: leaves}, PARTS, SHARED)
    assert reason is not None
    assert message in reason


def test_a_missing_part():
    assert misfit({"delta": fitting()["delta"]}, PARTS, SHARED) == "sent the parts delta instead of buffers, delta"


def cohort(**changes: torch.Tensor) -> Cohort:
    leaves = {"w": torch.ones(4, 2), "b": torch.zeros(4, 1), **changes}
    payload = {"delta": {"w": leaves["w"], "b": leaves["b"]}, "buffers": {"n": torch.arange(4)}}
    return Cohort(torch.tensor([1, 4, 6, 9]), payload, {"num_examples": torch.tensor([1.0, 2.0, 3.0, 4.0])})


def test_a_clean_cohort_passes_untouched():
    given = cohort()
    kept, dropped = screen(given, "delta", 10.0)
    assert kept is given
    assert dropped == {}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("leaf", ["w", "b"])
def test_numbers_that_are_not_finite_are_dropped_and_named(bad, leaf):
    values = torch.ones(4, 2 if leaf == "w" else 1)
    values[1, 0] = bad
    kept, dropped = screen(cohort(**{leaf: values}), "delta", 10.0)
    assert dropped == {4: "not finite"}
    assert kept.ids.tolist() == [1, 6, 9]
    assert kept.stats["num_examples"].tolist() == [1.0, 3.0, 4.0]
    assert kept.payload["buffers"]["n"].tolist() == [0, 2, 3]
    assert bool(kept.payload["delta"]["w"].isfinite().all())


def test_infinities_that_cancel_are_still_seen():
    values = torch.ones(4, 2)
    values[2] = torch.tensor([torch.inf, -torch.inf])
    assert screen(cohort(w=values), "delta")[1] == {6: "not finite"}


def test_large_finite_numbers_whose_sum_overflows_are_kept():
    values = torch.ones(4, 2)
    values[3] = 3e38
    kept, dropped = screen(cohort(w=values), "delta")
    assert dropped == {}
    assert len(kept) == 4


def test_a_part_that_is_no_update_must_be_finite_too():
    given = cohort()
    wrong = {**given.payload["buffers"], "m": torch.tensor([0.0, 0.0, torch.nan, 0.0])}
    given = given.with_payload({**given.payload, "buffers": wrong})
    assert screen(given, "delta")[1] == {6: "not finite"}


def test_the_norm_is_taken_over_the_whole_update():
    values = torch.ones(4, 2)
    values[2] = torch.tensor([3.0, 4.0])
    given = cohort(w=values, b=torch.tensor([[0.0], [0.0], [12.0], [0.0]]))
    kept, dropped = screen(given, "delta", 12.9)
    assert dropped == {6: "norm 13 above the limit 12.9"}
    assert kept.ids.tolist() == [1, 4, 9]
    assert screen(given, "delta", 13.0)[1] == {}


def test_nobody_is_left():
    kept, dropped = screen(cohort(w=torch.full((4, 2), torch.nan)), "delta")
    assert len(kept) == 0
    assert list(dropped) == [1, 4, 6, 9]


def test_an_empty_cohort():
    empty = Cohort(torch.zeros(0, dtype=torch.int64), {}, {})
    assert screen(empty, "delta", 1.0) == (empty, {})


@pytest.mark.parametrize("other", ["sizes", "declarations"])
def test_the_limits_are_those_of_the_question(other):
    """The last question's are kept, and another run of the process may ask another."""
    cohort = Cohort(torch.tensor([0]), {"delta": {}}, {"num_examples": torch.tensor([7.0], dtype=torch.float64)})
    cohort.stats["accuracy_after"] = torch.tensor([1.0], dtype=torch.float64)
    strict = {**STATISTICS, "accuracy_after": Statistic("a share", 0, 0.5)}
    for _ in range(2):
        assert screen(cohort, "delta", sizes=SizeLimits(10.0))[1] == {}
        if other == "sizes":
            assert list(screen(cohort, "delta", sizes=SizeLimits(5.0))[1]) == [0]
        else:
            assert list(screen(cohort, "delta", sizes=SizeLimits(10.0), declared=strict)[1]) == [0]

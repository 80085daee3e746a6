"""Fractions of counts are what decimal numbers say, whatever binary numbers make of them."""

from __future__ import annotations

import math
from decimal import Decimal

import torch

from fedalloy.core.fraction import fraction_of, fractions_of
from fedalloy.experiment.sampling import cohort_size
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.wires.topk import TopK
from fedalloy.tasks.splits import part_sizes

FRACTIONS = [number / 100 for number in range(1, 100)] + [number / 1000 for number in range(5, 1000, 10)]
COUNTS = [*range(1, 101), 150, 190, 325, 950, 1000, 12345]


def _exact(count: int, fraction: float) -> Decimal:
    return Decimal(str(fraction)) * count


def test_the_floor_of_a_fraction_is_that_of_decimals() -> None:
    wrong = [(f, n) for f in FRACTIONS for n in COUNTS if math.floor(fraction_of(n, f)) != math.floor(_exact(n, f))]
    assert not wrong
    assert math.floor(0.29 * 100) == 28, "the plain product is one too few"


def test_many_counts_at_once_are_the_same() -> None:
    for fraction in FRACTIONS:
        assert fractions_of(torch.tensor(COUNTS), fraction).tolist() == [fraction_of(n, fraction) for n in COUNTS]


def test_a_third_of_three_is_one() -> None:
    assert fraction_of(3, 1 / 3) == 1.0
    assert fraction_of(3 * 10**9, 1 / 3) == 1e9


def test_top_k_keeps_the_stated_fraction() -> None:
    wrong = [(f, n) for f in FRACTIONS for n in COUNTS if TopK(f).kept(n) != max(1, math.floor(_exact(n, f)))]
    assert not wrong
    assert TopK(0.29).kept(100) == 29


def test_a_milestone_is_passed_after_its_round() -> None:
    for number in range(1, 100):
        solver = Sgd(lr=1.0, milestones=(number / 100,))
        rates = [solver.lr_at(round, 100) for round in range(1, 101)]
        assert rates.count(1.0) == number, f"milestone {number / 100} of 100 rounds"


def test_a_cohort_is_the_nearest_number_with_halves_upwards() -> None:
    for fraction in FRACTIONS:
        for count in (10, 40, 100, 200, 1000):
            wanted = math.floor(_exact(count, fraction) + Decimal("0.5"))
            assert cohort_size(fraction, count) == max(1, wanted), (fraction, count)


def test_parts_of_clients_are_the_nearest_number_with_halves_to_even() -> None:
    sizes = torch.tensor([count for count in COUNTS if count > 20])
    for fraction in (0.09, 0.15, 0.3, 0.33, 0.59):
        wanted = [round(_exact(int(size), fraction)) for size in sizes]
        assert part_sizes(sizes, fraction, 0.0)[2].tolist() == wanted, fraction


def test_parts_of_large_clients_are_counted_in_full() -> None:
    size = 3 * 2**24 + 2
    assert part_sizes(torch.tensor([size]), 0.5, 0.0)[2].tolist() == [size // 2]

"""The six distribution functions and the responses made with them."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core.errors import AlgorithmError
from fedalloy.methods.weightings.cdf import Cdf, CdfName, relative, respond

NAMES = get_args(CdfName)
LOSSES = st.lists(st.floats(0, 1e6), min_size=1, max_size=9)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("cdf", "formula"),
    [
        (Cdf("weibull", scale=2.0, shape=3.0), lambda x: 1 - math.exp(-((x / 2) ** 3))),
        (Cdf("frechet", scale=0.5, shape=2.0), lambda x: math.exp(-((x / 0.5) ** -2))),
        (Cdf("gumbel", location=0.3, scale=0.7), lambda x: math.exp(-math.exp(-(x - 0.3) / 0.7))),
        (Cdf("exponential", scale=1.5), lambda x: 1 - math.exp(-x / 1.5)),
        (Cdf("logistic", location=2.0, scale=0.4), lambda x: 1 / (1 + math.exp(-(x - 2) / 0.4))),
        (Cdf("normal", location=0.8, scale=1.3), lambda x: (1 + math.erf((x - 0.8) / 1.3 / math.sqrt(2))) / 2),
        (Cdf("weibull"), lambda x: 1 - math.exp(-(x**2))),
        (Cdf("normal", variant="affine_erfc"), lambda x: (1 + math.erfc((x - 1) / math.sqrt(2))) / 2),
        (Cdf("normal", variant="erfc"), lambda x: math.erfc((x - 1) / math.sqrt(2))),
    ],
)
def test_each_is_its_formula(cdf, formula):
    points = [0.1, 0.7, 1.0, 1.9, 4.0]
    assert cdf(doubles(*points)).tolist() == pytest.approx([formula(x) for x in points], abs=1e-14)


@given(st.sampled_from(NAMES), LOSSES, st.floats(0, 2), st.floats(0.01, 3))
def test_responses_are_bounded_and_grow_with_the_loss(name, losses, low, width):
    found = respond(doubles(*losses), name, low, low + width)
    assert bool((found >= low).all())
    assert bool((found <= low + width + 1e-12).all())
    ordered = found[doubles(*losses).argsort(stable=True)]
    assert bool((ordered.diff() >= -1e-12).all())


@given(st.sampled_from(NAMES), st.lists(st.floats(0.1, 100), min_size=1, max_size=9), st.floats(1e-3, 1e3))
def test_only_ratios_of_losses_matter(name, losses, factor):
    one, other = respond(doubles(*losses), name, 0.0, 1.0), respond(factor * doubles(*losses), name, 0.0, 1.0)
    assert torch.allclose(one, other, atol=1e-12)


def test_equal_and_zero_losses_are_equal():
    assert relative(doubles(0, 0, 0)).tolist() == [1, 1, 1]
    for name in NAMES:
        assert len(set(respond(doubles(5, 5, 5), name, 0.0, 1.0).tolist())) == 1
    assert respond(doubles(0, 2), "frechet", 0.0, 1.0)[0] == 0


def test_the_public_code_of_the_normal_one_decreases():
    points = doubles(0.2, 1.0, 3.0)
    assert bool((Cdf("normal", variant="affine_erfc")(points).diff() < 0).all())
    assert bool((Cdf("normal")(points).diff() > 0).all())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "weibul"}, "did you mean 'weibull'"),
        ({"kind": "weibull", "location": 1.0}, "has no location; it has: scale, shape"),
        ({"kind": "gumbel", "shape": 1.0}, "has no shape"),
        ({"kind": "exponential", "scale": 0.0}, "above 0"),
        ({"kind": "normal", "scale": math.inf}, "finite"),
        ({"kind": "normal", "location": math.nan}, "finite"),
        ({"kind": "logistic", "variant": "erfc"}, "belongs to the normal"),
        ({"kind": "normal", "variant": "erf"}, "did you mean 'erfc'"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ValueError, match=message):
        Cdf(**settings)


def test_bounds_that_leave_no_room():
    with pytest.raises(AlgorithmError, match="C1 below C2"):
        respond(doubles(1, 2), "weibull", 0.5, 0.5)

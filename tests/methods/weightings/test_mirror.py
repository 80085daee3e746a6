"""One mirror step against the formulas of the methods it unifies."""

from __future__ import annotations

from itertools import pairwise
from math import exp, inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context
from fedalloy.methods.weightings.mirror import Mirror, dr, propfair, qffl, term, tilted
from fedalloy.methods.weightings.samples import Samples

CTX = Context(1, 20, Key.of(0))
RULES = {
    "qffl": qffl(2.0),
    "dr": dr(0.5),
    "term": term(3.0),
    "propfair": propfair(2.0),
    "tilted down": term(-1.0),
    "uniform": Mirror("log_gap", "uniform", 0.5),
}
LOSSES = st.lists(st.floats(0, 1e6), min_size=1, max_size=8)


def cohort(losses, sizes=None, name="loss_before") -> Cohort:
    sizes = [1.0] * len(losses) if sizes is None else sizes
    stats = {"num_examples": torch.tensor(sizes, dtype=torch.float64), name: torch.tensor(losses, dtype=torch.float64)}
    return Cohort(torch.arange(len(losses)), {}, stats)


def weights(rule: Mirror, given: Cohort) -> list[float]:
    found, state, _ = rule.weigh(given, rule.init(20), CTX)
    assert isinstance(found, torch.Tensor)
    assert state == {}
    return found.tolist()


def shares(values) -> list[float]:
    return [value / sum(values) for value in values]


def test_every_method_has_its_published_formula():
    losses, sizes = [0.5, 1.0, 2.5], [10, 20, 5]
    given = cohort(losses, sizes)
    pairs = list(zip(sizes, losses, strict=True))
    assert weights(qffl(2), given) == pytest.approx(shares([n * f**2 for n, f in pairs]))
    assert weights(dr(1), given) == pytest.approx(shares([n * f**2 for n, f in pairs]))
    assert weights(dr(0.5), given) == pytest.approx(shares([n * f**1.5 for n, f in pairs]))
    assert weights(term(0.7), given) == pytest.approx(shares([n * exp(0.7 * f) for n, f in pairs]))
    assert weights(term(0.7, "uniform"), given) == pytest.approx(shares([exp(0.7 * f) for f in losses]))
    assert weights(propfair(3.0), given) == pytest.approx(shares([n / (3 - f) for n, f in pairs]))


def test_without_a_response_all_are_fedavg():
    given = cohort([0.5, 1.0, 2.5], [10, 20, 5])
    plain, _, _ = Samples().weigh(given, {}, CTX)
    assert isinstance(plain, torch.Tensor)
    for rule in (Mirror("none"), qffl(0), term(0)):
        assert weights(rule, given) == pytest.approx(plain.tolist())
        assert rule.requires == {"num_examples"}


def test_the_gap_is_floored_and_losses_above_the_limit_give_fedavg():
    assert weights(propfair(2.0, 0.5), cohort([1.0, 1.9, 7.0])) == pytest.approx(shares([1, 2, 2]))
    assert weights(propfair(2.0), cohort([9.0, 8.0], [1, 3])) == pytest.approx([0.25, 0.75])


def test_the_running_loss_replaces_the_mean_loss_in_official_mode():
    rule = dr(1.0, official=True)
    assert rule.requires == {"num_examples", "running_loss"}
    assert weights(rule, cohort([1.0, 3.0], name="running_loss")) == pytest.approx([0.1, 0.9])


def test_a_loss_of_zero_weighs_nothing_and_all_zero_gives_the_prior():
    assert weights(qffl(1), cohort([0.0, 2.0])) == [0.0, 1.0]
    assert weights(qffl(1), cohort([0.0, 0.0], [1, 3])) == [0.25, 0.75]
    assert weights(qffl(1), cohort([0.0, 0.0], [0, 0])) == [0.0, 0.0]


@pytest.mark.parametrize("lost", [nan, inf, -inf])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_a_loss_that_overflowed_counts_as_the_largest_and_does_not_decide_alone(rule, lost):
    assert weights(rule, cohort([0.5, lost, 1.5])) == weights(rule, cohort([0.5, 1.5, 1.5]))


def test_where_no_loss_is_a_number_the_prior_decides():
    assert weights(term(1.0), cohort([nan, inf], [1, 3])) == pytest.approx([0.25, 0.75])
    assert weights(dr(1.0), cohort([nan, nan], [1, 1])) == [0.5, 0.5]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@given(losses=LOSSES, seed=st.integers(0, 99))
def test_weights_are_a_distribution_that_follows_its_clients(rule, losses, seed):
    order = torch.randperm(len(losses), generator=torch.Generator().manual_seed(seed))
    sizes = [1.0 + (k * 7 + seed) % 5 for k in range(len(losses))]
    given = cohort(losses, sizes)
    found = torch.tensor(weights(rule, given), dtype=torch.float64)
    assert bool((found >= 0).all())
    assert float(found.sum()) == pytest.approx(1)
    assert weights(rule, given.take(order)) == pytest.approx(found[order].tolist())


@pytest.mark.parametrize("rule", [qffl(1.0), dr(), term(2.0), propfair(5.0)])
@given(losses=st.lists(st.floats(0.01, 4.0), min_size=2, max_size=6))
def test_larger_losses_never_weigh_less(rule, losses):
    found = weights(rule, cohort(sorted(losses)))
    assert all(one <= other + 1e-12 for one, other in pairwise(found))


def test_one_client_has_all_of_it_and_equal_clients_share():
    for rule in RULES.values():
        assert weights(rule, cohort([0.3])) == pytest.approx([1.0])
        assert weights(rule, cohort([0.3] * 4)) == pytest.approx([0.25] * 4)


def test_responses_are_told():
    _, _, info = propfair(3.0).weigh(cohort([2.0]), {}, CTX)
    assert info["response"].tolist() == [0.0]


def test_tilted_survives_any_scale():
    assert tilted(torch.tensor([1.0, 1.0]), torch.tensor([1e300, -1e300])).tolist() == [1.0, 0.0]
    assert tilted(torch.tensor([0.0, 2.0]), torch.tensor([50.0, 0.0])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mirror(zeta=0.0), "zeta"),
        (lambda: qffl(-1), "q must be 0 or more"),
        (lambda: dr(-0.5), "q must be 0 or more"),
        (lambda: propfair(1.0, 0.0), "gap"),
        (lambda: propfair(-1.0), "gap"),
    ],
)
def test_senseless_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

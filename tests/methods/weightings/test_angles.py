"""FedAdp and FedLayerWise: angles, their memory, and what becomes of them."""

from __future__ import annotations

from math import exp, pi

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context, State
from fedalloy.methods.weightings.fedadp import Angles, angles_to_mean

CTX = Context(1, 9, Key.of(0))


def cohort(delta, ids=None, sizes=None) -> Cohort:
    delta = {name: torch.tensor(leaf, dtype=torch.float64) for name, leaf in delta.items()}
    count = len(next(iter(delta.values())))
    stats = {"num_examples": torch.tensor(sizes or [1.0] * count, dtype=torch.float64)}
    return Cohort(torch.tensor(ids or list(range(count))), {"delta": delta}, stats)


def gompertz(theta: float, alpha: float = 5.0) -> float:
    return alpha * (1 - exp(-exp(-alpha * (theta - 1))))


def test_one_of_three_goes_another_way():
    given = cohort({"w": [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]}, sizes=[1, 1, 2])
    weights, state, info = Angles().weigh(given, Angles().init(9), CTX)
    assert isinstance(weights, torch.Tensor)
    assert info["instant_angle"].tolist() == pytest.approx([pi / 4] * 3)
    assert weights.tolist() == pytest.approx([0.25, 0.25, 0.5])
    assert state["count"].tolist() == [1.0, 1.0, 1.0, *[0.0] * 6]


def test_weights_are_sizes_times_the_exponential_of_the_gompertz_function():
    given = cohort({"w": [[1.0, 0.0], [1.0, 0.0], [-1.0, 0.5]]}, sizes=[3, 1, 1])
    weights, _, info = Angles(alpha=2.0).weigh(given, Angles().init(9), CTX)
    assert isinstance(weights, torch.Tensor)
    raw = [n * exp(gompertz(theta, 2.0)) for n, theta in zip([3, 1, 1], info["smoothed_angle"].tolist(), strict=True)]
    assert weights.tolist() == pytest.approx([value / sum(raw) for value in raw])


def test_angles_are_averaged_over_the_rounds_a_client_was_there():
    rule, state = Angles(), Angles().init(9)
    together = cohort({"w": [[1.0, 0.0], [1.0, 0.0]]}, ids=[2, 5])
    across = cohort({"w": [[1.0, 0.0], [0.0, 1.0]]}, ids=[2, 7])
    _, state, _ = rule.weigh(together, state, CTX)
    _, state, info = rule.weigh(across, state, CTX)
    assert info["smoothed_angle"].tolist() == pytest.approx([pi / 8, pi / 4])
    assert state["angle"][""].tolist() == pytest.approx([0, 0, pi / 8, 0, 0, 0, 0, pi / 4, 0])
    _, state, info = rule.weigh(together, state, CTX)
    assert info["smoothed_angle"].tolist() == pytest.approx([pi / 12, 0.0], abs=1e-7)
    assert state["count"].tolist() == [0, 0, 3, 0, 0, 2, 0, 1, 0]
    assert float(state["angle"][""][7]) == pytest.approx(pi / 4)


def test_layers_have_angles_of_their_own_and_a_layer_is_a_module():
    delta = {
        "a.weight": [[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]],
        "a.bias": [[0.0], [0.0], [0.0]],
        "b.weight": [[1.0], [1.0], [1.0]],
    }
    rule = Angles("layer")
    weights, state, info = rule.weigh(cohort(delta), rule.init(9), CTX)
    assert isinstance(weights, dict)
    assert list(weights) == ["a.weight", "a.bias", "b.weight"]
    assert weights["a.weight"] is weights["a.bias"]
    assert info["smoothed_angle.a"].tolist() == pytest.approx([0.0, pi, 0.0])
    raw = [exp(gompertz(theta)) for theta in (0.0, pi, 0.0)]
    assert weights["a.weight"].tolist() == pytest.approx([value / sum(raw) for value in raw])
    assert weights["b.weight"].tolist() == pytest.approx([1 / 3] * 3)
    assert set(state["angle"]) == {"a", "b"}


def test_a_model_of_one_layer_gets_the_same_weights_at_both_levels():
    delta = {"a.weight": [[1.0, 2.0], [-1.0, 0.5], [3.0, 0.1]], "a.bias": [[0.2], [0.9], [-2.0]]}
    by_client, _, _ = Angles("client").weigh(cohort(delta), Angles().init(9), CTX)
    by_layer, _, _ = Angles("layer").weigh(cohort(delta), Angles().init(9), CTX)
    assert isinstance(by_client, torch.Tensor)
    assert isinstance(by_layer, dict)
    assert by_layer["a.bias"].tolist() == by_client.tolist()


def test_updates_of_length_zero_stand_at_right_angles():
    still = Cohort(torch.arange(2), {"delta": {"w": torch.zeros(2, 3)}})
    assert angles_to_mean(still, torch.tensor([0.5, 0.5]), {"": ["w"]})[""].tolist() == [pi / 2] * 2
    mixed = cohort({"w": [[0.0, 0.0], [1.0, 0.0]]})
    _, _, info = Angles().weigh(mixed, Angles().init(9), CTX)
    assert info["instant_angle"].tolist() == [pi / 2, 0.0]
    opposed = cohort({"w": [[1.0], [-1.0]]})
    _, _, info = Angles().weigh(opposed, Angles().init(9), CTX)
    assert info["instant_angle"].tolist() == [pi / 2] * 2


def test_cosines_above_one_by_rounding_are_clipped():
    leaf = torch.full((3, 1000), 0.1, dtype=torch.float32)
    alike = Cohort(torch.arange(3), {"delta": {"w": leaf}})
    angles = angles_to_mean(alike, torch.tensor([0.2, 0.3, 0.5]), {"": ["w"]})[""]
    assert bool((angles < 1e-3).all())


def test_the_length_of_updates_does_not_matter():
    given = cohort({"w": [[1.0, 2.0], [3.0, -1.0]]})
    longer = cohort({"w": [[100.0, 200.0], [300.0, -100.0]]})
    one, _, _ = Angles().weigh(given, Angles().init(9), CTX)
    other, _, _ = Angles().weigh(longer, Angles().init(9), CTX)
    assert isinstance(one, torch.Tensor)
    assert isinstance(other, torch.Tensor)
    assert one.tolist() == pytest.approx(other.tolist())


@pytest.mark.parametrize("level", ["client", "layer"])
@given(clients=st.integers(1, 6), seed=st.integers(0, 999), alpha=st.floats(0.1, 50))
def test_weights_are_a_distribution_that_follows_its_clients(level, clients, seed, alpha):
    random = torch.Generator().manual_seed(seed)
    delta = {name: torch.randn(clients, 3, generator=random, dtype=torch.float64) for name in ("a.w", "a.b", "c.w")}
    stats = {"num_examples": torch.randint(1, 9, (clients,), generator=random).double()}
    given, order = Cohort(torch.arange(clients), {"delta": delta}, stats), torch.randperm(clients, generator=random)
    state: State = Angles().init(9)
    rule = Angles(level, alpha)
    weights, after, _ = rule.weigh(given, state, CTX)
    turned, turned_after, _ = rule.weigh(given.take(order), state, CTX)
    for name in delta:
        one = weights if isinstance(weights, torch.Tensor) else weights[name]
        other = turned if isinstance(turned, torch.Tensor) else turned[name]
        assert float(one.sum()) == pytest.approx(1)
        assert bool((one >= 0).all())
        assert other.tolist() == pytest.approx(one[order].tolist())
    for group, angles in after["angle"].items():
        assert turned_after["angle"][group].tolist() == pytest.approx(angles.tolist(), abs=1e-7)
    assert state["angle"] == {}


def test_alpha_must_be_positive():
    with pytest.raises(ValueError, match="alpha must be above 0"):
        Angles(alpha=0.0)

"""A weight per client and sample."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core import tree
from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context, Info
from fedalloy.methods.weightings.energies import Energies

CTX = Context(1, 9, Key.of(0))


def cohort(factors: torch.Tensor, sizes: list[float]) -> Cohort:
    slopes = Key.of(1).normal(*factors.shape, 2, dtype=torch.float64)
    sent = {"energy_grad": {"x": slopes}, "factors": {"x": factors}}
    return Cohort(torch.arange(len(factors)), sent, {"num_examples": torch.tensor(sizes)})


def weigh(found: Cohort) -> tuple[torch.Tensor, Info]:
    weights, _, info = Energies().weigh(found, {}, CTX)
    assert isinstance(weights, torch.Tensor)
    return weights, info


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 2**20))
def test_every_sample_has_weights_of_its_own_that_sum_to_one(clients, samples, seed):
    factors = Key.of(seed).normal(clients, samples, dtype=torch.float64).sign().exp()
    sizes = (1 + Key.of(seed).fold("n").uniform(clients) * 50).round().tolist()
    found = cohort(factors, sizes)
    weights, info = weigh(found)
    assert weights.shape == (clients, samples)
    assert torch.allclose(weights.sum(0), torch.ones(samples, dtype=torch.float64))
    for sample in range(samples):
        shares = torch.tensor(sizes, dtype=torch.float64) * factors[:, sample]
        expected = (shares / shares.sum()) @ found.payload["energy_grad"]["x"][:, sample]
        combined = tree.combine(found.payload["energy_grad"], weights)["x"][sample]
        assert torch.allclose(combined, expected)
    assert torch.equal(info["factors"], factors)


def test_a_sure_client_counts_e_squared_times_an_unsure_one():
    weights, _ = weigh(cohort(torch.tensor([[1.0], [-1.0]]).exp(), [5.0, 5.0]))
    assert torch.allclose(weights[0] / weights[1], torch.tensor([torch.e**2], dtype=torch.float64))


def test_samples_nobody_speaks_for_get_no_weight():
    weights, _ = weigh(cohort(torch.tensor([[0.0, 1.0], [0.0, 1.0]]), [5.0, 0.0]))
    assert weights.tolist() == [[0.0, 1.0], [0.0, 0.0]]

"""Two phases of local work in one plan."""

from __future__ import annotations

import torch

from fedalloy.core.keys import Key
from fedalloy.methods.solvers.ditto import Ditto
from fedalloy.methods.solvers.sgd import Sgd


def test_the_first_epochs_are_those_of_a_plan_without_a_second_phase():
    sizes, epochs, keys = torch.tensor([7, 3, 5]), torch.tensor([-1, 1, 0]), Key.of(0).each(torch.arange(3))
    whole = Ditto(epochs=2, personal_epochs=3, batch_size=2).plan(sizes, epochs, keys)
    first = Sgd(epochs=2, batch_size=2).plan(sizes, epochs, keys)
    assert whole.steps.tolist() == [4 * 5, 2 * 4, 0]
    assert [int((whole.phase[row, : whole.steps[row]] == 0).sum()) for row in range(3)] == first.steps.tolist()
    for row, steps in enumerate(first.steps.tolist()):
        taken = whole.mask[row, :steps]
        assert torch.equal(taken, first.mask[row, :steps])
        assert torch.equal(whole.index[row, :steps][taken], first.index[row, :steps][taken])


def test_a_second_phase_of_nothing_is_none():
    assert not Ditto(personal_epochs=0).plan(torch.tensor([7]), torch.tensor([-1]), Key.of(0)).phase.any()

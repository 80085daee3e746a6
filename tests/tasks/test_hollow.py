"""A model without the values it was built with: the same results, and no memory for them."""

from __future__ import annotations

import torch
from torch import nn

from fedalloy.core.keys import Key
from fedalloy.tasks.objective import ModuleObjective


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def test_it_computes_the_same_and_holds_nothing():
    x, y, draw = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor(7)
    for trainable in (None, ("3.*",)):
        plain, hollow = (ModuleObjective(model, trainable=trainable, example=x) for _ in range(2))
        assert hollow.hollowed() is hollow
        params, buffers = plain.init(Key.of(3))
        again, _ = hollow.init(Key.of(3))
        assert all(torch.equal(leaf, again[name]) for name, leaf in params.items()), "a new start is still possible"
        one, new = plain.loss(params, buffers, x, y, draw=draw)
        other, same = hollow.loss(params, buffers, x, y, draw=draw)
        assert torch.equal(one, other)
        assert all(torch.equal(leaf, same[name]) for name, leaf in new.items())
        assert torch.equal(plain.outputs(params, buffers, x), hollow.outputs(params, buffers, x))
        assert {part: {name: leaf.shape for name, leaf in leaves.items()} for part, leaves in plain.forms.items()} == {
            part: {name: leaf.shape for name, leaf in leaves.items()} for part, leaves in hollow.forms.items()
        }
        held = {leaf.untyped_storage().nbytes() for leaf in hollow.structure.parameters()}
        assert held == {4}

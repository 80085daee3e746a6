"""The server optimizers against their formulas."""

from __future__ import annotations

import pytest
import torch

from fedalloy.core.keys import Key
from fedalloy.core.types import Context
from fedalloy.methods.servers.momentum import Momentum
from fedalloy.methods.servers.sgd import ServerSgd

CTX = Context(1, 10, Key.of(0))


def test_the_server_adds_the_update():
    moved, state, _ = ServerSgd(0.5).apply({"w": torch.tensor([2.0])}, {}, {"w": torch.tensor([1.0])}, CTX)
    assert moved["w"].tolist() == [2.0]
    assert state == {}


def test_momentum_gathers_speed_and_keeps_it_without_updates():
    rule, target = Momentum(lr=0.5, beta=0.5), {"w": torch.zeros(1)}
    state, places = rule.init(target), []
    for update in (1.0, 1.0, 0.0):
        target, state, _ = rule.apply({"w": torch.tensor([update])}, state, target, CTX)
        places.append(float(target["w"]))
    assert places == [0.5, 0.5 + 0.75, 0.5 + 0.75 + 0.375]


def test_momentum_without_memory_is_plain():
    update, target = {"w": torch.tensor([2.0])}, {"w": torch.tensor([1.0])}
    moved, _, _ = Momentum(0.5, 0.0).apply(update, Momentum().init(target), target, CTX)
    assert moved["w"].tolist() == ServerSgd(0.5).apply(update, {}, target, CTX)[0]["w"].tolist()


@pytest.mark.parametrize("make", [lambda: ServerSgd(0.0), lambda: Momentum(lr=-1.0), lambda: Momentum(beta=1.0)])
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="must"):
        make()

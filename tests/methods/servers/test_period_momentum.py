"""FedFa's server: momentum gathered always, followed now and then."""

from __future__ import annotations

import pytest
import torch

from fedalloy.core.keys import Key
from fedalloy.core.types import Context, State, Tree
from fedalloy.methods.servers.period_momentum import PeriodMomentum
from fedalloy.methods.servers.sgd import ServerSgd


def play(server: PeriodMomentum, updates) -> list[float]:
    w: Tree = {"w": torch.zeros(1, dtype=torch.float64)}
    state: State = server.init(w)
    path = []
    for number, update in enumerate(updates, 1):
        step = {"w": torch.tensor([update], dtype=torch.float64)}
        w, state, info = server.apply(step, state, w, Context(number, 3, Key.of(0)))
        assert float(info["momentum_followed"]) == float(number % server.period == 0)
        path.append(float(w["w"]))
    return path


def test_it_follows_the_momentum_in_every_round():
    assert play(PeriodMomentum(gamma=0.5), [1.0, 1.0, 0.0]) == [1.0, 2.5, 3.25]


def test_in_other_rounds_it_takes_the_average_but_keeps_gathering():
    # m = 0.7, then 0.5 * 0.7 + 0.7 * 2 = 1.75; round 1 takes the average.
    assert play(PeriodMomentum(lr=0.7, gamma=0.5, period=2), [1.0, 2.0, 1.0]) == pytest.approx([1.0, 2.75, 3.75])


def test_without_momentum_it_is_the_average():
    w, update = {"w": torch.tensor([1.0])}, {"w": torch.tensor([0.25])}
    server, ctx = PeriodMomentum(gamma=0.0), Context(1, 3, Key.of(0))
    assert server.apply(update, server.init(w), w, ctx)[0] == ServerSgd().apply(update, {}, w, ctx)[0]


def test_it_walks_towards_the_average_of_a_quadratic():
    """The printed sign walks away: twenty rounds towards a goal at 1 tell them apart."""
    server, w = PeriodMomentum(gamma=0.5), {"w": torch.zeros(1, dtype=torch.float64)}
    state = server.init(w)
    for number in range(1, 21):
        update = {"w": 0.5 * (1.0 - w["w"])}
        w, state, _ = server.apply(update, state, w, Context(number, 3, Key.of(0)))
    assert float(w["w"]) == pytest.approx(1.0, abs=1e-2)


@pytest.mark.parametrize("settings", [{"lr": 0.0}, {"gamma": 1.0}, {"gamma": -0.1}, {"period": 0}])
def test_senseless_settings_are_refused(settings):
    with pytest.raises(ValueError, match="must"):
        PeriodMomentum(**settings)

"""Rules that keep one number per client, in rounds that some clients miss."""

from __future__ import annotations

import torch

from fedalloy.methods.weightings.attendance import among, everyone, imputed, usable

NAN, INF = torch.nan, torch.inf


def test_absent_clients_get_the_mean_of_those_present():
    assert everyone(torch.tensor([4.0, 1.0]), torch.tensor([3, 1]), 5).tolist() == [2.5, 1.0, 2.5, 4.0, 2.5]


def test_weights_are_renormalised_and_nothing_becomes_equal_shares():
    p = torch.tensor([0.5, 0.0, 0.0, 0.5])
    assert among(p, torch.tensor([0, 1])).tolist() == [1, 0]
    assert among(p, torch.tensor([1, 2])).tolist() == [0.5, 0.5]


def test_the_record_names_who_was_made_up():
    assert imputed(torch.arange(3), 3) == {}
    assert imputed(torch.tensor([2, 0]), 4)["imputed"].tolist() == [1, 3]


def test_a_loss_that_is_no_number_counts_as_the_largest_one():
    assert usable(torch.tensor([1.0, NAN, 3.0, INF, -INF])).tolist() == [1, 3, 3, 3, 3]
    assert usable(torch.tensor([NAN, INF])).tolist() == [0, 0]

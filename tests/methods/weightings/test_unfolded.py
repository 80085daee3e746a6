"""A learned table as a weighting: rows by round, never renormalised, sizes afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedalloy.core.errors import AlgorithmError
from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context
from fedalloy.methods.weightings.nova import Nova
from fedalloy.methods.weightings.unfolded import Unfolded
from fedalloy.testing import check_rule

TABLE = ((0.1, 0.2, 0.7), (0.5, 0.4, 0.1))
STATS = {
    "num_examples": torch.tensor([2.0, 6.0]),
    "step_norm": torch.tensor([2.0, 4.0]),
    "effective_steps": torch.tensor([2.0, 4.0]),
}
HERE = Cohort(torch.tensor([0, 2]), {}, STATS)


def weights(rule: Unfolded, round: int, cohort: Cohort = HERE):
    return rule.weigh(cohort, rule.init(3), Context(round, 3, Key.of(0)))[0]


def test_those_present_keep_the_weight_of_their_row():
    assert weights(Unfolded(TABLE), 1).tolist() == [0.1, 0.7]
    assert weights(Unfolded(TABLE), 2).tolist() == [0.5, 0.1]


def test_after_the_last_row_sizes_count():
    assert weights(Unfolded(TABLE), 3).tolist() == [0.25, 0.75]


def test_normalised_shares_are_those_of_fednova():
    rule = Unfolded(((0.25, 0.0, 0.75),), normalise=True)
    nova = Nova().weigh(HERE, {}, Context(1, 3, Key.of(0)))[0]
    assert isinstance(nova, torch.Tensor)
    torch.testing.assert_close(weights(rule, 1), nova.double())
    torch.testing.assert_close(weights(rule, 2), nova.double())
    still = HERE.with_stats({"step_norm": torch.tensor([0.0, 4.0])})
    assert weights(rule, 1, still)[0] == 0


def test_layers_count_for_themselves():
    leaves = {"a.weight": torch.ones(2, 3), "a.bias": torch.ones(2), "b.weight": torch.ones(2, 1)}
    rule = Unfolded((((0.1, 0.9), (0.2, 0.8), (0.7, 0.3)),), layers=("a", "b"))
    found = weights(rule, 1, replace(HERE, payload={"delta": leaves}))
    assert {name: values.tolist() for name, values in found.items()} == {
        "a.weight": [0.1, 0.7],
        "a.bias": [0.1, 0.7],
        "b.weight": [0.9, 0.3],
    }
    with pytest.raises(AlgorithmError, match="layers a, b, the model has b"):
        weights(rule, 1, replace(HERE, payload={"delta": {"b.weight": torch.ones(2, 1)}}))


def test_wrong_tables_are_refused():
    with pytest.raises(AlgorithmError, match="3 clients, this federation has 4"):
        Unfolded(TABLE).init(4)
    with pytest.raises(AlgorithmError, match=r"no table 'later\.json' yet"):
        Unfolded("later.json").init(3)
    with pytest.raises(AlgorithmError, match="client 2 has 6 examples"):
        weights(Unfolded(TABLE, sizes=(2, 4, 5)), 1)
    assert weights(Unfolded(TABLE, sizes=(2, 4, 6)), 1).tolist() == [0.1, 0.7]
    with pytest.raises(ValueError, match="axes rounds x clients"):
        Unfolded((((0.1, 0.9),),))
    with pytest.raises(ValueError, match="2 layers are named"):
        Unfolded((((0.1,),),), layers=("a", "b"))
    with pytest.raises(ValueError, match="sizes"):
        Unfolded(TABLE, sizes=(1, 2))


def test_a_table_keeps_what_all_weightings_promise():
    rows = tuple(tuple((1 + round + 2 * k) / 100 for k in range(8)) for round in range(2))
    assert check_rule("weighting", Unfolded(rows)) == []
    assert check_rule("weighting", Unfolded(rows, normalise=True)) == []
    by_layer = tuple(tuple((share, 2 * share) for share in row) for row in rows)
    assert check_rule("weighting", Unfolded(by_layer, layers=("hidden", "output"))) == []

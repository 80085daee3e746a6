"""A last batch of a single example: BatchNorm over vectors cannot be trained on it, so it joins the batch before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedalloy import algorithms
from fedalloy.core.algorithm import data_spec_of
from fedalloy.core.errors import FedalloyError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.spec import algorithm_from_spec, algorithm_to_spec
from fedalloy.experiment.fit import fit
from fedalloy.methods.solvers.epoch_plans import epoch_plan
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.testing import small_task
from fedalloy.testing.comparing import differences

SIZES = (9, 5, 4, 1, 6, 2)  # in batches of 4: two with a leftover of one, one with a single example in all
ENGINES: list[dict[str, Any]] = [{"engine": "batched"}, {"engine": "auto"}, {"engine": "workers"}]


def batches(sizes, epochs=1, width=4, leftover="keep", keys=None):
    plan = epoch_plan(torch.tensor(sizes), torch.tensor([epochs] * len(sizes)), width, keys, leftover)
    return [
        [row[mask].tolist() for row, mask in zip(*one, strict=True) if mask.any()]
        for one in zip(plan.index, plan.mask, strict=True)
    ]


def test_a_single_example_joins_the_batch_before_it():
    assert batches([5, 9, 4, 1], leftover="merge") == [
        [[0, 1, 2, 3, 4]],
        [[0, 1, 2, 3], [4, 5, 6, 7, 8]],
        [[0, 1, 2, 3]],
        [],
    ]


def test_or_is_left_out():
    assert batches([5, 9, 4, 1], leftover="drop") == [[[0, 1, 2, 3]], [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3]], []]


def test_every_epoch_has_an_order_of_its_own_and_everybody_in_it():
    keys = Key.of(3).each(torch.arange(2))
    for one, size in zip(batches([9, 6], 3, leftover="merge", keys=keys), (9, 6), strict=True):
        flat = [place for batch in one for place in batch]
        assert [sorted(flat[start : start + size]) for start in range(0, 3 * size, size)] == [list(range(size))] * 3


@pytest.mark.parametrize("leftover", ["merge", "drop"])
def test_without_such_a_batch_the_plan_is_the_same_to_the_last_bit(leftover):
    sizes, epochs, keys = torch.tensor([8, 3, 0, 6]), torch.tensor([2, 1, 1, 3]), Key.of(1).each(torch.arange(4))
    plain, other = (epoch_plan(sizes, epochs, 4, keys, how) for how in ("keep", leftover))
    assert all(torch.equal(getattr(plain, name), getattr(other, name)) for name in ("index", "mask", "phase"))


@pytest.mark.parametrize("leftover", ["merge", "drop"])
def test_a_client_has_the_same_batches_alone_and_in_a_block(leftover):
    block = batches([9, 5, 4, 1, 6, 2], 2, leftover=leftover)
    assert block == [batches([size], 2, leftover=leftover)[0] for size in SIZES]


def named(name="fedavg", **more):
    return algorithms.named(name, **{"lr": 0.1, "batch_size": 4, **more})


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedper", "ditto", "superfed_mm"])
def test_a_run_goes_on_and_every_engine_agrees(name):
    task, local = small_task("batchnorm", SIZES), {"names": ["output.*"]} if name == "fedper" else {}
    expected = fit(named(name, **local), task, rounds=2, engine="loop")
    assert expected.status == "finished"
    steps = next(expected.rounds())["num_steps"]
    assert steps[:3] == [2, 1, 1] if name in ("fedavg", "scaffold") else steps
    for settings in ENGINES[: 3 if name == "fedavg" else 1]:
        found = fit(named(name, **local), task, rounds=2, **settings)
        assert list(differences(found.model, expected.model, 1e-9)) == []


def test_what_was_chosen_is_done_and_keep_fails_as_it_must():
    task = small_task("batchnorm", (9, 5, 6))
    merged, dropped = (fit(named(leftover=how), task, rounds=1, engine="loop") for how in ("merge", "drop"))
    assert list(differences(merged.model, dropped.model)) != []
    assert list(differences(merged.model, fit(named(), task, rounds=1, engine="loop").model)) == []
    with pytest.raises(FedalloyError, match="more than 1 value per channel"):
        fit(named(leftover="keep"), task, rounds=1, engine="loop")


def test_batches_of_one_are_refused_before_the_first_round():
    with pytest.raises(SpecError, match=r"batch_size = 1.*choose 2 or more"):
        fit(named(batch_size=1), small_task("batchnorm"), rounds=1)


def test_models_that_can_be_trained_on_one_example_keep_their_plans():
    pictures = ModuleObjective(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    )
    assert pictures.needs_full_batches
    assert pictures.trains_on_one(torch.zeros(1, 1, 4, 4))
    rows = small_task("batchnorm").objective
    assert not rows.trains_on_one(torch.zeros(1, 4))
    for model in ("mlp", "linear", "dropout"):
        assert named().bind(small_task(model)) == named()


def test_what_was_decided_travels_to_nodes():
    """Nodes get the algorithm as the server fitted it, so both count the same steps."""
    bind = named().bind(small_task("batchnorm"))
    assert algorithm_from_spec(algorithm_to_spec(bind)).solver.leftover == "merge"  # type: ignore[attr-defined]
    assert "leftover" not in algorithm_to_spec(named())["solver"]
    assert not data_spec_of(small_task("batchnorm"), Key.of(0)).alone


def test_the_argument_is_checked():
    with pytest.raises((SpecError, ValueError), match="leftover"):
        Sgd(leftover="throw")  # type: ignore[arg-type]

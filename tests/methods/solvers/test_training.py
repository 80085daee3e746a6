"""What all solvers share: batches, step sizes, local optimizers, the length of an update."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core.blocks import _known_steps, _steps_of
from fedalloy.core.keys import Key
from fedalloy.core.types import Context
from fedalloy.methods.solvers.descent import descend, descend_start
from fedalloy.methods.solvers.epoch_plans import epoch_plan
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.solvers.training import update_length

BLOCKS = st.lists(st.tuples(st.integers(0, 13), st.integers(0, 3)), min_size=1, max_size=6)
BATCHES = st.one_of(st.none(), st.integers(1, 15))


def test_a_plan_that_is_written_to_changes_no_other():
    sizes, epochs = torch.tensor([7, 7]), torch.tensor([1, 1])
    first = epoch_plan(sizes, epochs, 3, None)
    kept = first.mask.clone(), first.phase.clone()
    first.mask[:, 0] = False
    first.phase.add_(1)
    again = epoch_plan(sizes, epochs, 3, None)
    assert torch.equal(again.mask, kept[0])
    assert torch.equal(again.phase, kept[1])


def test_steps_are_counted_anew_where_a_mask_was_written_to():
    mask, everyone = torch.ones(2, 3, 4, dtype=torch.bool), torch.ones(2, dtype=torch.bool)
    assert _steps_of(mask, everyone).running == [2, 2, 2]
    mask[1, 2] = False
    assert _steps_of(mask, everyone).running == [2, 2, 1]
    assert _steps_of(mask, torch.tensor([True, False])).running == [1, 1, 1]


def test_steps_are_forgotten_with_their_mask():
    before, everyone = len(_known_steps), torch.ones(2, dtype=torch.bool)
    for _ in range(3):
        _steps_of(torch.ones(2, 3, 4, dtype=torch.bool), everyone)
    gc.collect()
    assert len(_known_steps) <= before


def batches(plan, row: int) -> list[list[int]]:
    taken = plan.mask[row].any(-1).nonzero().flatten().tolist()
    return [plan.index[row, step][plan.mask[row, step]].tolist() for step in taken]


@given(BLOCKS, BATCHES, st.booleans(), st.integers(0, 100))
def test_every_example_enters_once_per_epoch(block, batch, shuffle, seed):
    sizes, epochs = (torch.tensor(column) for column in zip(*block, strict=True))
    keys = Key.of(seed).each(torch.arange(len(block)))
    plan = epoch_plan(sizes, epochs, batch, keys if shuffle else None)
    for row, (size, wanted) in enumerate(block):
        found = batches(plan, row)
        per_epoch = -(-size // (batch or max(size, 1)))
        assert len(found) == int(plan.steps[row]) == per_epoch * wanted
        assert bool(plan.mask[row].any(-1)[: len(found)].all()), "steps are taken first, padding comes last"
        for epoch in range(wanted):
            chosen = found[epoch * per_epoch : (epoch + 1) * per_epoch]
            assert Counter(example for one in chosen for example in one) == Counter(range(size))
            lengths = [len(one) for one in chosen]
            assert all(length == (batch or size) for length in lengths[:-1]), "only the last batch may be partial"


@given(BLOCKS, BATCHES, st.integers(0, 100))
def test_a_client_has_the_same_batches_alone_and_in_a_block(block, batch, seed):
    sizes, epochs = (torch.tensor(column) for column in zip(*block, strict=True))
    plan = epoch_plan(sizes, epochs, batch, Key.of(seed).each(torch.arange(len(block))))
    for row in range(len(block)):
        key = Key.of(seed).each(torch.tensor([row]))
        alone = epoch_plan(sizes[row : row + 1], epochs[row : row + 1], batch, key)
        assert batches(plan, row) == batches(alone, 0)


def test_epochs_are_shuffled_anew_and_in_order_without_shuffling():
    sizes, epochs = torch.tensor([8]), torch.tensor([3])
    shuffled = batches(epoch_plan(sizes, epochs, None, Key.of(0).each(torch.tensor([0]))), 0)
    assert len({tuple(one) for one in shuffled}) == 3
    assert batches(epoch_plan(sizes, epochs, 5, None), 0) == [[0, 1, 2, 3, 4], [5, 6, 7]] * 3


def test_a_block_of_very_different_clients_stays_small():
    """A client of one example next to one of many needs permutations of its own epochs only."""
    sizes = torch.tensor([1] * 50 + [20_000])
    plan = epoch_plan(sizes, torch.full((51,), 2), 10, Key.of(0).each(torch.arange(51)))
    assert plan.steps.tolist() == [2] * 50 + [4000]


def test_a_plan_keeps_the_solvers_epochs_unless_told_otherwise():
    plan = Sgd(epochs=2, batch_size=2).plan(
        torch.tensor([4, 4, 4]), torch.tensor([-1, 0, 5]), Key.of(0).each(torch.arange(3))
    )
    assert plan.steps.tolist() == [4, 0, 10]


# ---------------------------------------------------------------------------------------------- step sizes


def test_the_step_decays_by_round_and_at_milestones():
    decayed = Sgd(lr=1.0, decay=0.5, decay_every=2)
    assert [decayed.lr_at(round) for round in range(1, 6)] == [1, 1, 0.5, 0.5, 0.25]
    stepped = Sgd(lr=1.0, milestones=(1 / 3, 2 / 3))
    assert [stepped.lr_at(round, 9) for round in (1, 3, 4, 6, 7, 9)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert stepped.lr_at(9) == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr must be above 0"),
        ({"epochs": -1}, "epochs must be 0 or more"),
        ({"batch_size": 0}, "batch_size must be 1 or more"),
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\)"),
        ({"nesterov": True}, "nesterov needs momentum"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum = 0.9 is for optimizer 'sgd' and 'rmsprop', not for 'adam'"),
        ({"betas": (0.5, 0.9)}, "is for optimizer 'adam' and 'adamw', not for 'sgd'"),
        ({"eps": 0.1}, "eps = 0.1 is for optimizer 'adam'"),
        ({"smoothing": 0.5}, "smoothing = 0.5 is for optimizer 'rmsprop', not for 'sgd'"),
        ({"optimizer": "adagrad", "amsgrad": True}, "not for 'adagrad'"),
        ({"dampening": 0.5}, "dampening must be 0 or more, and needs momentum"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0"),
        ({"accumulate": 0}, "accumulate must be 1 or more"),
        ({"loss_scale": 8.0}, "loss_scale = 8.0 is for precision 'fp16'"),
        ({"schedule": {"kind": "cosine"}, "decay": 0.5}, "both change the step size"),
        ({"schedule": {"kind": "cosine", "every": 3}}, "every is for the schedules step, not for 'cosine'"),
        ({"schedule": {"kind": "milestones"}}, "needs milestones"),
        ({"schedule": {"kind": "cosines"}}, "cosine"),
        ({"decay_every": 0}, "decay_every must be 1 or more"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sgd(**settings)


# ---------------------------------------------------------------------------------------------- local optimizers

OPTIMIZERS = {
    "plain": (Sgd(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "decayed": (Sgd(lr=0.1, weight_decay=0.3), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.3)),
    "momentum": (
        Sgd(lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    ),
    "nesterov": (
        Sgd(lr=0.1, momentum=0.8, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
    ),
    "adam": (
        Sgd(lr=0.1, optimizer="adam", betas=(0.8, 0.95), eps=1e-4, weight_decay=0.2),
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.2),
    ),
    "dampening": (
        Sgd(lr=0.1, momentum=0.8, dampening=0.3, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, dampening=0.3, weight_decay=0.1),
    ),
    "amsgrad": (
        Sgd(lr=0.1, optimizer="adam", amsgrad=True, betas=(0.5, 0.6)),
        lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, betas=(0.5, 0.6)),
    ),
    "adamw": (
        Sgd(lr=0.1, optimizer="adamw", weight_decay=0.2, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2, amsgrad=True),
    ),
    "rmsprop": (
        Sgd(lr=0.1, optimizer="rmsprop", smoothing=0.7, weight_decay=0.2),
        lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.7, weight_decay=0.2),
    ),
    "rmsprop_centered": (
        Sgd(lr=0.1, optimizer="rmsprop", momentum=0.6, centered=True, eps=1e-3),
        lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.6, centered=True, eps=1e-3),
    ),
    "adagrad": (
        Sgd(lr=0.1, optimizer="adagrad", lr_decay=0.2, accumulator=0.5, eps=1e-10, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.2, initial_accumulator_value=0.5, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_local_optimizer_is_that_of_torch(name):
    settings, make = OPTIMIZERS[name]
    ours = {"a": Key.of(0).normal(3, 2, dtype=torch.float64), "b": Key.of(1).normal(2, dtype=torch.float64)}
    theirs = [leaf.clone().requires_grad_() for leaf in ours.values()]
    optimizer, memory = make(theirs), descend_start(settings, ours)
    ctx = Context(1, 1, Key.of(0), local_lr=settings.lr)
    for step in range(6):
        grads = {
            name: Key.of(2).fold(name, step).normal(*leaf.shape, dtype=torch.float64) for name, leaf in ours.items()
        }
        for leaf, gradient in zip(theirs, grads.values(), strict=True):
            leaf.grad = gradient.clone()
        optimizer.step()
        ours, memory = descend(settings, ours, grads, memory, {}, ctx)
    for leaf, expected in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(leaf, expected.detach(), rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------- update lengths

STEPS = torch.arange(0, 12, dtype=torch.float64)


def test_the_length_of_plain_steps_is_their_number():
    assert torch.equal(update_length(STEPS), STEPS)


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.9])
def test_the_length_with_momentum_has_the_closed_form(rho):
    closed = (STEPS - rho * (1 - rho**STEPS) / (1 - rho)) / (1 - rho)
    torch.testing.assert_close(update_length(STEPS, momentum=rho), closed)


@pytest.mark.parametrize("pull", [0.01, 0.3, 1.0])
def test_the_length_with_a_proximal_term_has_the_closed_form(pull):
    torch.testing.assert_close(update_length(STEPS, pull=pull), (1 - (1 - pull) ** STEPS) / pull)


@pytest.mark.parametrize(("momentum", "nesterov", "pull"), [(0.7, False, 0.0), (0.7, True, 0.0), (0.6, True, 0.05)])
def test_the_length_is_how_far_unit_gradients_carry_a_client(momentum, nesterov, pull):
    """Whatever the combination: descend along gradients of -1 and measure the way."""
    settings = Sgd(lr=1.0, momentum=momentum, nesterov=nesterov)
    place = {"w": torch.zeros((), dtype=torch.float64)}
    memory, ctx = descend_start(settings, place), Context(1, 1, Key.of(0), local_lr=1.0)
    for step in range(1, 8):
        gradient = {"w": -1 + pull * place["w"]}
        place, memory = descend(settings, place, gradient, memory, {}, ctx)
        length = update_length(torch.tensor([float(step)], dtype=torch.float64), momentum, nesterov, pull)
        torch.testing.assert_close(length[0], place["w"])


def test_lengths_of_nobody():
    assert update_length(torch.zeros(0)).shape == (0,)

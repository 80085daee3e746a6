import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedalloy.core.keys import Key
from fedalloy.core.types import Block, Examples
from fedalloy.tasks import evaluation
from fedalloy.tasks.evaluation import evaluate_clients, evaluate_models, evaluate_pool
from fedalloy.tasks.objective import ModuleObjective

METRICS = ("accuracy", "loss", "top2", "ece", "mce")
OBJECTIVE = ModuleObjective(lambda: nn.Linear(4, 3), dtype=torch.float64)
PARAMS, BUFFERS = OBJECTIVE.init(Key.of(0))


def pool(rows: int) -> Examples:
    key = Key.of(5)
    return Examples(key.normal(rows, 4, dtype=torch.float64), (key.fold("y").bits(rows) & 1) + (key.bits(rows) & 1))


def block(examples: Examples, start: list[int], size: list[int]) -> Block:
    return Block(examples.x, examples.y, torch.tensor(start), torch.tensor(size))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10)), min_size=1, max_size=6), st.integers(1, 9))
@example([(0, 4), (4, 5)], 3)
@example([(10, 20), (0, 10)], 7)  # the whole pool, but not in its order
def test_every_client_gets_what_it_would_get_alone(segments, chunk):
    """Segments may leave gaps, come in any order, overlap, be empty, or be only the beginning of the pool."""
    clients = block(pool(30), [begin for begin, _ in segments], [size for _, size in segments])
    together = evaluate_clients(OBJECTIVE, PARAMS, BUFFERS, clients, METRICS, chunk=chunk)
    for row in range(len(segments)):
        alone = evaluate_pool(OBJECTIVE, PARAMS, BUFFERS, clients.client(row), METRICS)
        for name in METRICS:
            assert float(together[name][row]) == pytest.approx(alone[name], abs=1e-12, nan_ok=True), name


def test_only_owned_rows_are_read():
    seen: list[int] = []

    class Counting(ModuleObjective):
        def outputs(self, params, buffers, x: Tensor) -> Tensor:
            seen.append(len(x))
            return super().outputs(params, buffers, x)

    counting = Counting(lambda: nn.Linear(4, 3), dtype=torch.float64)
    evaluate_clients(counting, PARAMS, BUFFERS, block(pool(100), [90, 3], [5, 7]), ["accuracy"], chunk=8)
    assert seen == [8, 4]


def test_a_whole_pool_is_the_size_weighted_mean_of_its_clients():
    examples = pool(40)
    clients = evaluate_clients(OBJECTIVE, PARAMS, BUFFERS, block(examples, [0, 10], [10, 30]), ["accuracy", "loss"])
    whole = evaluate_pool(OBJECTIVE, PARAMS, BUFFERS, examples, ["accuracy", "loss"])
    for name, values in clients.items():
        assert values.shape == (2,)
        assert whole[name] == pytest.approx((10 * values[0] + 30 * values[1]).item() / 40)
    assert clients["accuracy"][0] != clients["accuracy"][1]


def test_a_client_with_one_class_has_no_auroc():
    binary = ModuleObjective(lambda: nn.Linear(4, 1), "binary", dtype=torch.float64)
    params, buffers = binary.init(Key.of(1))
    examples = Examples(Key.of(2).normal(6, 4, dtype=torch.float64), torch.tensor([1, 1, 1, 0, 1, 0]))
    values = evaluate_clients(binary, params, buffers, block(examples, [0, 3], [3, 3]), ["auroc", "accuracy", "ece"])
    assert values["auroc"].isnan().tolist() == [True, False]
    assert not values["accuracy"].isnan().any()
    logits = binary.outputs(params, buffers, examples.x).squeeze(1)
    confidence = torch.maximum(logits.sigmoid(), 1 - logits.sigmoid())
    assert bool((confidence >= 0.5).all())
    assert values["accuracy"][0] == ((logits[:3] > 0) == (examples.y[:3] > 0)).double().mean()


def test_no_examples_give_no_numbers():
    empty = evaluate_pool(OBJECTIVE, PARAMS, BUFFERS, Examples(torch.zeros(0, 4), torch.zeros(0).long()), METRICS)
    assert all(math.isnan(value) for value in empty.values())
    assert set(empty) == set(METRICS)


def test_a_regression_has_a_loss_but_no_accuracy():
    objective = ModuleObjective(lambda: nn.Linear(4, 1), "mse", dtype=torch.float64)
    params, buffers = objective.init(Key.of(1))
    examples = Examples(pool(6).x, Key.of(9).normal(6, dtype=torch.float64))
    result = evaluate_pool(objective, params, buffers, examples, ["accuracy", "loss"])
    expected = (objective.outputs(params, buffers, examples.x).squeeze(1) - examples.y).square().mean()
    assert math.isnan(result["accuracy"])
    assert result["loss"] == pytest.approx(float(expected))


def test_evaluation_builds_no_graph():
    params = {name: leaf.clone().requires_grad_() for name, leaf in PARAMS.items()}
    assert not evaluate_clients(OBJECTIVE, params, BUFFERS, block(pool(5), [0], [5]), ["loss"])["loss"].requires_grad


# ---------------------------------------------------------------------------------------------- a model per client


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10)), min_size=1, max_size=6), st.integers(1, 40))
def test_every_client_is_scored_with_its_own_model_however_it_is_done(segments, chunk):
    metrics = (*METRICS, "ece_batch")
    clients = block(pool(30), [begin for begin, _ in segments], [size for _, size in segments])
    models = [OBJECTIVE.init(Key.of(row)) for row in range(len(segments))]
    together = evaluation._side_by_side(OBJECTIVE, models, clients, metrics, chunk)
    singly = evaluation._one_by_one(OBJECTIVE, models, clients, metrics, chunk)
    for row, model in enumerate(models):
        alone = evaluate_pool(OBJECTIVE, *model, clients.client(row), metrics)
        for name in metrics:
            expected = pytest.approx(alone[name], abs=1e-12, nan_ok=True)
            assert float(together[name][row]) == expected, name
            assert float(singly[name][row]) == expected, name


def test_what_vmap_cannot_take_is_scored_one_by_one(monkeypatch):
    class Stubborn(ModuleObjective):
        def outputs(self, params, buffers, x: Tensor) -> Tensor:
            return super().outputs(params, buffers, x) * float(x.sum() != 1e9)  # a number cannot be asked for in vmap

    stubborn = Stubborn(lambda: nn.Linear(4, 3), dtype=torch.float64)
    models = [stubborn.init(Key.of(row)) for row in range(2)]
    clients = block(pool(30), [0, 10], [10, 20])
    expected = evaluate_models(OBJECTIVE, models, clients, METRICS)
    found = evaluate_models(stubborn, models, clients, METRICS)
    for name in METRICS:
        assert torch.allclose(found[name], expected[name], rtol=0, atol=1e-12)


def test_a_model_that_fails_says_so():
    broken = ModuleObjective(lambda: nn.Linear(5, 3), dtype=torch.float64)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        evaluate_models(broken, [broken.init(Key.of(0))] * 2, block(pool(30), [0, 10], [10, 20]))

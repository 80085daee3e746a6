"""A task in one call: values, names and specs mean the same, defaults fit the data, the seed decides the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedalloy
from fedalloy.core.errors import FedalloyError, SpecError
from fedalloy.core.keys import Key
from fedalloy.tasks.assembly import as_factory, make_task
from fedalloy.tasks.datasets.base import Dataset, from_clients
from fedalloy.tasks.datasets.digits import Digits
from fedalloy.tasks.making import task
from fedalloy.tasks.partitions.dirichlet import Dirichlet


def digest(task) -> str:
    return task.manifest.digest


def images(side: int, classes: int = 3) -> Dataset:
    return Dataset(torch.zeros(30, 1, side, side), torch.arange(30) % classes, classes)


def test_values_names_and_specs_are_the_same():
    by_spec = make_task("digits", "logistic", {"kind": "dirichlet", "alpha": 0.3}, 5, seed=3)
    by_value = make_task(Digits(), "logistic", Dirichlet(0.3), 5, seed=3)
    assert digest(by_spec) == digest(by_value)
    assert digest(make_task("digits", "logistic", Dirichlet(0.3), 5, seed=4)) != digest(by_value)


def test_the_federation_does_not_depend_on_the_model():
    tasks = [make_task(model=model, clients=5, seed=1) for model in ("logistic", {"kind": "mlp", "hidden": [4]})]
    assert digest(tasks[0]) == digest(tasks[1])


def test_defaults_follow_the_data():
    own = from_clients([(torch.rand(6, 2), [0, 1] * 3), (torch.rand(9, 2), [0, 1, 1] * 3)], ["a", "b"])
    natural = make_task(own)
    assert (natural.population, natural.names) == (2, ("a", "b"))
    assert make_task("digits").population == 10
    assert isinstance(as_factory(None, (1, 28, 28), 10)().get_submodule("conv1"), nn.Conv2d)
    assert [type(part) for part in as_factory(None, (1, 8, 8), 10)().children()] == [nn.Flatten, nn.Linear]
    numbers = make_task(Dataset(torch.rand(40, 2), torch.rand(40), 0), clients=2)
    params, _ = numbers.objective.init(Key.of(0))
    assert params["output.weight"].shape == (1, 2)
    binary = make_task(images(4, 2), clients=2, loss="binary")
    assert binary.objective.init(Key.of(0))[0]["output.weight"].shape == (1, 16)


def test_any_factory_works_and_gets_what_it_asks_for():
    def sized(inputs: int, classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))

    task = make_task(images(4), sized, clients=2, dtype="float64")
    params, _ = task.objective.init(Key.of(0))
    assert params["1.weight"].shape == (3, 16)
    assert params["1.weight"].dtype == task.train.x.dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dataset": "digts"}, "did you mean 'digits'"),
        ({"partition": {"kind": "dirichlet", "alpah": 1.0}}, "did you mean 'alpha'"),
        (
            {"partition": {"kind": "skewed", "label": "clases", "quantity": "iid"}},
            r"partition\.label.*did you mean 'classes'",
        ),
        ({"model": {"kind": "mlp", "hidden": "wide"}}, "expected a list"),
        ({"model": {"hidden": [3]}}, "needs a 'kind'"),
        ({"dtype": "float8"}, "dtype 'float8'"),
    ],
)
def test_what_cannot_be_meant_is_told(arguments, said):
    with pytest.raises(FedalloyError, match=said):
        make_task(**arguments)


def test_the_top_package_has_it_all():
    assert fedalloy.task is task
    assert set(fedalloy.__all__) <= set(dir(fedalloy))
    assert all(getattr(fedalloy, name) is not None for name in [*fedalloy.__all__, "__version__"])
    with pytest.raises(AttributeError, match="no attribute 'tasc'"):
        _ = fedalloy.tasc  # type: ignore[attr-defined]
    result = fedalloy.fit("fedavg", fedalloy.task(clients=3), rounds=1, cohort=2)
    assert result.status == "finished"


def test_a_client_selection_is_scored_where_asked():
    result = fedalloy.fit("fedavg", make_task(clients=6), rounds=2, cohort=2, evaluate_clients=3)
    scored = [row["ids"] for row in result.clients()]
    assert len(scored[0]) == 3
    assert scored[0] == scored[1]
    with pytest.raises(SpecError):
        make_task(test_fraction=1.0)

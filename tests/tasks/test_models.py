import pytest
import torch
from torch import nn

from fedalloy.core import registry
from fedalloy.core.errors import RegistryError, SpecError
from fedalloy.core.keys import Key
from fedalloy.tasks.models.build import build
from fedalloy.tasks.objective import ModuleObjective

COUNTS = [
    ("twonn", (1, 28, 28), 10, 238_800),
    ("cnn", (1, 28, 28), 10, 582_026),
    ("cnn", (784,), 10, 582_026),
    ("duw_mlp", (784,), 10, 118_282),
    ("logistic", (60,), 10, 610),
    ("logistic", (28, 28), 10, 7_850),
    ("logistic", (15,), 1, 16),
]


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "shape", "classes", "parameters"), COUNTS)
def test_parameter_counts_are_the_published_ones(name, shape, classes, parameters):
    assert count(build(name, shape, classes)) == parameters


def test_the_cnn_is_made_of_the_published_layers():
    model = build("cnn", (1, 28, 28), 10)
    sizes = [count(layer) for layer in model.children() if count(layer)]
    assert sizes == [832, 51_264, 524_800, 5_130]


def test_twonn_has_no_bias():
    assert all(name.endswith("weight") for name, _ in build("twonn", (784,), 10).named_parameters())


@pytest.mark.parametrize("name", sorted(set(registry.names("model")) & {"logistic", "mlp", "twonn", "cnn", "duw_mlp"}))
def test_flat_and_image_inputs_give_the_same_answer(name):
    model = build(name, (1, 28, 28), 7)
    x = Key.of(1).normal(3, 1, 28, 28)
    assert model(x).shape == (3, 7)
    torch.testing.assert_close(model(x), model(x.reshape(3, 784)))


@pytest.mark.parametrize("name", ["logistic", "mlp", "twonn", "cnn", "duw_mlp"])
def test_models_train_under_vmap(name):
    objective = ModuleObjective(lambda: build(name, (256,), 3))
    params, buffers = objective.init(Key.of(0))
    x, y = Key.of(1).normal(2, 4, 256), torch.zeros(2, 4, dtype=torch.int64)

    def gradient(x, y):
        return torch.func.grad(lambda p: objective.loss(p, buffers, x, y)[0])(params)

    together = torch.func.vmap(gradient)(x, y)
    alone = gradient(x[1], y[1])
    for leaf, expected in alone.items():
        torch.testing.assert_close(together[leaf][1], expected, rtol=1e-4, atol=1e-5)


def test_given_arguments_win_over_the_data():
    model = build("mlp", (8, 8), 10, hidden=(5,), classes=3, activation="tanh")
    assert count(model) == 64 * 5 + 5 + 5 * 3 + 3
    assert any(isinstance(part, nn.Tanh) for part in model.modules())


def own_model(inputs: int, classes: int, depth: int = 1) -> nn.Module:
    return nn.Sequential(*[nn.Linear(inputs, inputs) for _ in range(depth)], nn.Linear(inputs, classes))


def test_a_dotted_path_is_a_model_too():
    """Any importable function will do; ``torch.nn:Linear`` takes neither shape nor classes from the data."""
    assert count(build("torch.nn:Linear", (9,), 2, in_features=9, out_features=2)) == 20


def test_any_factory_becomes_an_objective():
    params, _ = ModuleObjective(lambda: own_model(4, 2, depth=2)).init(Key.of(0))
    assert set(params) == {"0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("mlp", {"hiden": (3,)}, "did you mean 'hidden'"),
        ("mlp", {"activation": "rellu"}, "did you mean 'relu'"),
        ("nowhere.at_all:model", {}, "cannot be imported"),
        ("torch.nn:Linaer", {}, "did you mean 'Linear'"),
        ("torch:pi", {}, "not a function"),
        ("builtins:dict", {}, "returns an nn.Module"),
        ("cnn", {}, "at least 16 x 16"),
        ("cnn", {"input_shape": (7,)}, "is no image"),
    ],
)
def test_errors_say_what_to_do(name, args, message):
    with pytest.raises(SpecError, match=message):
        build(name, (8, 8), 10, **args)


def test_an_unknown_name_lists_the_models():
    with pytest.raises(RegistryError, match="did you mean 'logistic'"):
        build("logistc", (8, 8), 10)

"""Chains of linear layers: logistic regression, the MLP, and two published MLPs."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.registry import register

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "elu": nn.ELU,
}


@register("model", "logistic")
def logistic(inputs: int, classes: int, bias: bool = True) -> nn.Module:
    """Logistic regression: one linear layer (``classes=1`` gives the single logit of the binary loss)."""
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), output=nn.Linear(inputs, classes, bias=bias)))


@register("model", "mlp")
def mlp(
    inputs: int, classes: int, hidden: tuple[int, ...] = (200, 200), activation: str = "relu", bias: bool = True
) -> nn.Module:
    """A multilayer perceptron with one hidden layer per entry of ``hidden``."""
    if activation not in ACTIVATIONS:
        raise SpecError(f"model 'mlp': unknown activation '{activation}': {nearest(activation, ACTIVATIONS)}")
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = inputs
    for number, units in enumerate(hidden, start=1):
        layers[f"hidden{number}"] = nn.Linear(width, units, bias=bias)
        layers[f"{activation}{number}"] = ACTIVATIONS[activation]()
        width = units
    layers["output"] = nn.Linear(width, classes, bias=bias)
    return nn.Sequential(layers)


@register("model", "twonn")
def twonn(inputs: int = 784, classes: int = 10, width: int = 200) -> nn.Module:
    """TwoNN of the personalisation experiments: three hidden layers without biases, 238 800 parameters on MNIST.

    The last two linear layers are the ``classifier``, the block that FedPer and similar methods keep local or share.
    """
    features = OrderedDict(
        flatten=nn.Flatten(),
        hidden1=nn.Linear(inputs, width, bias=False),
        relu1=nn.ReLU(),
        hidden2=nn.Linear(width, width, bias=False),
        relu2=nn.ReLU(),
    )
    classifier = OrderedDict(
        hidden3=nn.Linear(width, width, bias=False), relu3=nn.ReLU(), output=nn.Linear(width, classes, bias=False)
    )
    return nn.Sequential(OrderedDict(features=nn.Sequential(features), classifier=nn.Sequential(classifier)))


@register("model", "duw_mlp")
def duw_mlp(inputs: int = 784, classes: int = 10) -> nn.Module:
    """The perceptron of the deep-unfolding experiments: 784-128-128-10, 118 282 parameters on MNIST."""
    return mlp(inputs, classes, hidden=(128, 128))

"""Synthetic(alpha, beta): logistic-regression data whose models and inputs differ between devices.

For device k: u_k ~ N(0, alpha), W_k and b_k ~ N(u_k, 1), B_k ~ N(0, beta), v_k ~ N(B_k, 1) per feature,
x ~ N(v_k, diag(j^-1.2)), y = argmax(x W_k + b_k), n_k = int(lognormal(4, 2)) + 50. alpha and beta are
*standard deviations*, and u_k serves both W_k and b_k. The iid variant has one W and b, and v_k = 0.

The generator is kept as published, with its quirk: u_k is one number added to all weights and biases of a device. It
raises all logits equally, so alpha changes no label; models differ by their N(0, 1) parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.datasets.base import Dataset, DatasetLoader, from_clients

FEATURES, CLASSES = 60, 10


@register("dataset", "synthetic")
@dataclass(frozen=True)
class Synthetic(DatasetLoader):
    """Synthetic(alpha, beta): ``alpha`` shifts models (but no label, see above), ``beta`` shifts inputs."""

    alpha: float = 1.0
    beta: float = 1.0
    devices: int = 30

    summary: ClassVar[str] = "logistic-regression data drawn per device, 60 features, 10 classes, sizes lognormal"

    def __post_init__(self) -> None:
        if self.alpha < 0 or self.beta < 0:
            raise SpecError(f"synthetic: alpha = {self.alpha} and beta = {self.beta} must be 0 or more")
        _check_devices(self.devices)

    def load(self, key: Key) -> Dataset:
        """Every device is a function of the key and its own number."""
        return from_clients([self._device(key.fold("device", k)) for k in range(self.devices)], classes=CLASSES)

    def _device(self, key: Key) -> tuple[Tensor, Tensor]:
        centre = self.alpha * _normal(key.fold("u"))
        weight, bias = _model(key, centre)
        shift = self.beta * _normal(key.fold("B"))
        return _examples(key, weight, bias, shift + _normal(key.fold("v"), FEATURES))


@register("dataset", "synthetic_iid")
@dataclass(frozen=True)
class SyntheticIid(DatasetLoader):
    """The same generator with one model and one distribution of inputs for all devices."""

    devices: int = 30

    summary: ClassVar[str] = "logistic-regression data from one model, 60 features, 10 classes, sizes lognormal"

    def __post_init__(self) -> None:
        _check_devices(self.devices)

    def load(self, key: Key) -> Dataset:
        """Devices differ only in size."""
        weight, bias = _model(key.fold("model"), torch.zeros((), dtype=torch.float64))
        origin = torch.zeros(FEATURES, dtype=torch.float64)
        keys = [key.fold("device", k) for k in range(self.devices)]
        return from_clients([_examples(device, weight, bias, origin) for device in keys], classes=CLASSES)


def _model(key: Key, centre: Tensor) -> tuple[Tensor, Tensor]:
    return centre + _normal(key.fold("W"), FEATURES, CLASSES), centre + _normal(key.fold("b"), CLASSES)


def _examples(key: Key, weight: Tensor, bias: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    size = int(math.exp(4 + 2 * float(_normal(key.fold("size"))))) + 50
    spread = torch.arange(1, FEATURES + 1, dtype=torch.float64) ** -0.6  # the root of the variance j^-1.2
    x = mean + spread * _normal(key.fold("x"), size, FEATURES)
    return x, (x @ weight + bias).argmax(-1)


def _normal(key: Key, *shape: int) -> Tensor:
    return key.normal(*shape, dtype=torch.float64)


def _check_devices(devices: int) -> None:
    if devices < 1:
        raise SpecError(f"synthetic data need at least 1 device, not {devices}")

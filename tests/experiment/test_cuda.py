"""What a GPU does is what a CPU does: every published method, and the weights that are learned in advance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedalloy
from fedalloy import algorithms
from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# Those that make data train models of their own kind, by Adam, whose first steps have the sign of every gradient: what
# rounding does to a gradient near zero is seen there.
DATA_MAKERS = {"fedcgan": "acgan_rows", "fedcvae": "cvae_rows", "fedevg": "energy_mlp"}
SKEWED = {"kind": "classes", "per_client": 3}
OWN: dict[str, dict[str, Any]] = {
    "duw_fedavg": {"table": ((0.1, 0.2, 0.3, 0.4),) * 2},
    "duw_fednova": {"table": ((0.1, 0.2, 0.3, 0.4),) * 2},
    "fedbn": {"names": ("output.*",)},  # this model has no normalisation
    "superfed_mm": {"start": 0.0},
    "superfed_lm": {"start": 0.0},
}


def method(name: str) -> Algorithm:
    settings = {"lr": 0.001 if name in DATA_MAKERS else 0.2, "batch_size": 64}
    return algorithms.named(name, **settings, **OWN.get(name, {}))


def losses(name: str, device: str) -> list[float]:
    task = fedalloy.task("digits", model=DATA_MAKERS.get(name, "mlp"), clients=4, partition=SKEWED, valid_fraction=0.1)
    result = fedalloy.fit(method(name), task, rounds=2, device=device)
    return [row["evaluation"]["loss"]["mean"] for row in result.rounds()]


@pytest.mark.parametrize("name", registry.names("algorithm"))
def test_a_method_gives_the_same_on_a_gpu(name):
    assert losses(name, "cuda") == pytest.approx(losses(name, "cpu"), rel=2e-2 if name in DATA_MAKERS else 1e-3)


@pytest.mark.parametrize("gradient", ["first_order", "exact"])
def test_weights_learned_on_a_gpu_are_the_same(gradient):
    def learned(device: str) -> torch.Tensor:
        task = fedalloy.task("digits", clients=3)
        settings = {"rounds": 3, "iterations": 3, "lr": 0.05, "gradient": gradient}
        return fedalloy.unfold("fedavg", task, device=device, **settings).weights

    torch.testing.assert_close(learned("cuda").cpu(), learned("cpu"), rtol=1e-3, atol=1e-5)

"""The models of the four workloads; needs torch alone, so that every peer's environment can import it."""

from __future__ import annotations

from torch import nn

CLASSES = 10


def logistic(inputs: int) -> nn.Module:
    return nn.Linear(inputs, CLASSES)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, CLASSES)
    )  # fmt: skip


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, CLASSES),
    )  # fmt: skip


def model_of(workload: str) -> nn.Module:
    """The model of a workload by its name."""
    if workload in ("W2", "W3"):
        return mlp() if workload == "W2" else cnn()
    return logistic(784 if workload == "W1" else 60)

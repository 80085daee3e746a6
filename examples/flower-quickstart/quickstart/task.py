"""The model, the data and the training: softmax regression on clouds of points that differ from client to client."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FEATURES, CLASSES = 8, 4
Model = dict[str, NDArray[np.float32]]
Data = tuple[NDArray[np.float32], NDArray[np.int64]]


def new_model() -> Model:
    """Zeros: every class is equally likely."""
    return {"weight": np.zeros((FEATURES, CLASSES), np.float32), "bias": np.zeros(CLASSES, np.float32)}


def load_data(partition: int) -> tuple[Data, Data]:
    """Training and test data of one client. Later clients have fewer examples, and their classes overlap more."""
    draw = np.random.default_rng(partition)
    centres = 2.0 * np.random.default_rng(99).normal(size=(CLASSES, FEATURES))
    labels = draw.integers(CLASSES, size=240 // (1 + partition))
    points = centres[labels] + (1 + 2 * partition) * draw.normal(size=(len(labels), FEATURES))
    cut = len(labels) * 4 // 5
    points = points.astype(np.float32)
    return (points[:cut], labels[:cut]), (points[cut:], labels[cut:])


def chances(model: Model, points: NDArray[np.float32]) -> NDArray[np.float32]:
    """How likely every class is."""
    scores = points @ model["weight"] + model["bias"]
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def evaluate(model: Model, data: Data) -> tuple[float, float]:
    """Mean loss and accuracy."""
    found, labels = chances(model, data[0]), data[1]
    loss = -np.log(found[np.arange(len(labels)), labels] + 1e-9).mean()
    return float(loss), float((found.argmax(axis=1) == labels).mean())


def train(model: Model, data: Data, epochs: int, lr: float) -> Model:
    """Plain gradient descent on all data at once."""
    for _ in range(epochs):
        error = chances(model, data[0])
        error[np.arange(len(data[1])), data[1]] -= 1
        error /= len(error)
        model = {"weight": model["weight"] - lr * data[0].T @ error, "bias": model["bias"] - lr * error.sum(axis=0)}
    return {name: leaf.astype(np.float32) for name, leaf in model.items()}

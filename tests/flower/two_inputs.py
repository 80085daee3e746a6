"""A model with two inputs, whole numbers and measurements, which the nodes of a test import by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SHAPE = {"words": [5], "numbers": [3]}
MODEL, CALLED = (f"tests.flower.two_inputs:{name}" for name in ("TwoInputs", "share"))


class TwoInputs(nn.Module):
    """Sums an embedding and a linear layer, with dropout and BatchNorm."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.words, self.numbers = nn.Embedding(20, 8), nn.Linear(3, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, classes)

    def forward(self, numbers: Tensor, words: Tensor) -> Tensor:
        """The scores."""
        both = self.norm(self.numbers(numbers) + self.words(words).mean(1))
        scores: Tensor = self.head(nn.functional.dropout(torch.relu(both), 0.2, self.training))
        return scores


def share(client: int) -> Any:
    """The examples of a client, inputs in a tuple."""
    draw = np.random.default_rng(client)
    count = 21 + 8 * client
    words, numbers = draw.integers(0, 20, (count, 5)), draw.normal(size=(count, 3)).astype(np.float32)
    return (numbers, words), (words[:, 0] % 3).astype(np.int64)


def write_share(folder: Path, client: int) -> None:
    """The same in a file, inputs by name."""
    (numbers, words), y = share(client)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{client}.npz", words=words, numbers=numbers, y=y)

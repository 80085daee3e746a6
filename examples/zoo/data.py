"""Small data for the zoo: three clients whose sizes are no multiple of the batch, drawn from keys."""

from __future__ import annotations

import torch
from torch import Tensor

from fedalloy.core.keys import Key
from fedalloy.tasks.datasets.base import Dataset

SIZES = (9, 7, 10)
COUNT, LENGTH, WORDS, CLASSES = sum(SIZES), 6, 32, 3
OWNER = torch.repeat_interleave(torch.tensor(SIZES))
LENGTHS = 3 + torch.arange(COUNT) % (LENGTH - 2)
MASK = (torch.arange(LENGTH) < LENGTHS.unsqueeze(1)).long()
IGNORED = -100


def whole(below: int, *shape: int, name: str) -> Tensor:
    """Whole numbers from 0 to ``below - 1``."""
    return (Key.of(0).fold(name).bits(*shape) & 0xFFFF) % below


LABELS = whole(CLASSES, COUNT, name="labels")
TOKENS = torch.where(MASK.bool(), 1 + whole(WORDS - 1, COUNT, LENGTH, name="tokens"), 0)


def sentences() -> Dataset:
    """Padded sequences with their mask, and a class for each."""
    return Dataset({"input_ids": TOKENS, "attention_mask": MASK}, LABELS, CLASSES, OWNER)


def next_tokens() -> Dataset:
    """The same sequences; every token's target is the token itself, and padding does not count."""
    targets = torch.where(MASK.bool(), TOKENS, IGNORED)
    return Dataset({"input_ids": TOKENS, "attention_mask": MASK}, targets, WORDS, OWNER)


def words() -> Dataset:
    """Sequences as one tensor."""
    return Dataset(TOKENS, LABELS, CLASSES, OWNER)


def pictures(side: int = 16) -> Dataset:
    """Images and a class for each."""
    return Dataset(Key.of(0).fold("pictures").normal(COUNT, 3, side, side), LABELS, CLASSES, OWNER)


def maps(side: int = 8) -> Dataset:
    """Images and a class for every pixel."""
    x = Key.of(0).fold("maps").normal(COUNT, 3, side, side)
    return Dataset(x, (x.sum(1) > 0).long(), 2, OWNER)


def table() -> Dataset:
    """A frame of measurements with a column for the client."""
    import pandas as pd

    values = Key.of(0).fold("table").normal(COUNT, 5)
    frame = pd.DataFrame(values.numpy(), columns=[f"f{place}" for place in range(5)])
    frame = frame.assign(client=OWNER.numpy(), label=LABELS.numpy())
    x, y = (torch.from_numpy(frame[columns].to_numpy().copy()) for columns in (list(frame.columns[:5]), "label"))
    return Dataset(x, y, CLASSES, torch.from_numpy(frame["client"].to_numpy().copy()))

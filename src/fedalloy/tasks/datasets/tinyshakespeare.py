"""Tiny Shakespeare: prediction of the next character, with the roles of the plays as clients."""

from __future__ import annotations

import string
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.datasets.base import Dataset, DatasetDefaults, DatasetLoader
from fedalloy.tasks.datasets.reading import read_npz

VOCABULARY = len(string.printable)
"""100 characters; a character's number is its index in Python's ``string.printable``."""
_FILE = "tinyshakespeare_roles.npz"


@register("dataset", "tinyshakespeare")
@dataclass(frozen=True)
class TinyShakespeare(DatasetLoader):
    """The character after ``window`` others: 193 roles with at least 400 characters as clients, 100 classes.

    An example is ``[window]`` character numbers (one byte each); a role's examples start ``stride`` characters apart:
    20 gives about 50 thousand, 1 all 995844. The last share ``test_text`` of a role's target characters is held out,
    with the text before them as context, so no character is a target of both training and test (a task then does not
    use ``test_fraction``). With ``test_text = 0`` examples are split at random by ``test_fraction``: examples of both
    parts then overlap, and a model is tested on text that it was trained on.
    """

    window: int = 80
    stride: int = 20
    test_text: float = 0.2

    summary: ClassVar[str] = "a million characters by 193 roles of Shakespeare's plays: the next one out of 100"
    files: ClassVar[dict[str, str]] = {_FILE: "6b14e903f7c314da86edb4e8dcc48487f00cc4b915618c1e714b75bc264efa8b"}
    hint: ClassVar[str] = (
        "get it with 'fedalloy data fetch shakespeare', or make it from the public tinyshakespeare text: a block "
        "whose first line ends with a colon is a speech of that role, speeches joined by newlines, roles of 400 "
        "characters or more; text: uint8 codes, offset: int64 [roles + 1], role: names"
    )
    defaults: ClassVar[DatasetDefaults] = DatasetDefaults(model="char_lstm", metrics=("accuracy", "top5", "loss"))

    def __post_init__(self) -> None:
        if self.window < 1 or self.stride < 1 or not 0 <= self.test_text < 1:
            raise SpecError(
                f"tinyshakespeare: window {self.window}, stride {self.stride} and test_text {self.test_text}: "
                "allowed are 1 or more, 1 or more, and 0 up to, not including, 1"
            )

    def load(self, key: Key) -> Dataset:
        """The roles in the order of the file, each from its first speech to its last; nothing is drawn."""
        arrays = read_npz(_FILE, ("text", "offset", "role"), self.hint)
        text, offset = _numbered(torch.from_numpy(arrays["text"])), arrays["offset"].tolist()
        spans = list(pairwise(offset))
        places = [torch.arange(begin, max(begin, end - self.window), self.stride) for begin, end in spans]
        starts = torch.cat(places)
        if not len(starts):
            raise DataError(f"tinyshakespeare: no role has more than {self.window} characters: take a shorter window")
        owner = torch.repeat_interleave(torch.tensor([len(place) for place in places]))
        x = text.unfold(0, self.window, 1)[starts]
        y = text[starts + self.window].to(torch.int64)
        names = tuple(arrays["role"].tolist())
        return Dataset(x, y, VOCABULARY, owner, self._held_out(spans, starts, owner), names=names)

    def _held_out(self, spans: list[tuple[int, int]], starts: Tensor, owner: Tensor) -> Tensor | None:
        """Flags on the examples whose target is in the held-out end of the role's text."""
        if self.test_text == 0:
            return None
        first = [begin + (end - begin - self.window) * (1 - self.test_text) for begin, end in spans]
        return starts >= torch.tensor(first, dtype=torch.float64)[owner]


def _numbered(codes: Tensor) -> Tensor:
    """Character codes as places among the printable characters."""
    table = torch.full((256,), VOCABULARY, dtype=torch.uint8)
    table[torch.tensor([ord(character) for character in string.printable])] = torch.arange(100, dtype=torch.uint8)
    numbers = table[codes.to(torch.int64)]
    if int(numbers.max()) == VOCABULARY:
        strange = int(codes[numbers == VOCABULARY][0])
        raise DataError(f"{_FILE}: character code {strange} is not printable; compare it with `fedalloy data check`")
    return numbers

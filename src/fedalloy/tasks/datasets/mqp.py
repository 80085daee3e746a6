"""Medical question pairs (MQP): do two questions mean the same?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.datasets.base import TWO_CLASSES, Dataset, DatasetDefaults, DatasetLoader
from fedalloy.tasks.datasets.reading import read_csv
from fedalloy.tasks.datasets.words import tokens


@register("dataset", "mqp")
@dataclass(frozen=True)
class MedicalQuestionPairs(DatasetLoader):
    """Whether two questions to a doctor mean the same: 11 doctors as clients, one logit, scored by AUROC.

    An example is ``[2, length]`` token numbers, padded with 0. A word's number is a hash of its letters in
    ``1 .. vocabulary - 1``: the vocabulary is not learned from the text, so nothing of the test part leaks, and two
    words may share a number. This replaces the pretrained DistilBERT of the published experiment, whose weights are not
    included. For every first question a doctor wrote one with the same meaning and one with another, so a split by row
    often trains on one of the two pairs and tests on the other, which has the opposite label. ``test_questions`` is the
    share of a doctor's first questions that are held out with both pairs (a task then does not use
    ``test_fraction``); 0 gives the published split by row, with ``test_fraction``.
    """

    length: int = 48
    vocabulary: int = 4096
    test_questions: float = 0.2

    summary: ClassVar[str] = "3048 pairs of medical questions by 11 doctors as hashed words, 2 classes"
    files: ClassVar[dict[str, str]] = {"mqp.csv": "94ecd609a9ca9350e1cff2438aa55a034762f01c1a68732aaae3e4be7b03cf57"}
    hint: ClassVar[str] = (
        "get it with 'fedalloy data fetch mqp', or take mqp.csv of the public medical question pair data as it is "
        "(no header; doctor 1..11, question, question, label)"
    )
    defaults: ClassVar[DatasetDefaults] = replace(TWO_CLASSES, model="text_pair")

    def __post_init__(self) -> None:
        if self.length < 1 or self.vocabulary < 2:
            raise SpecError(
                f"mqp: length {self.length} and vocabulary {self.vocabulary}: allowed are 1 or more and 2 or more"
            )
        if not 0 <= self.test_questions < 1:
            raise SpecError(f"mqp: test_questions is {self.test_questions}; allowed: 0 up to, not including, 1")

    def load(self, key: Key) -> Dataset:
        """The pairs in the order of the file; which questions are held out depends on the key."""
        rows = read_csv("mqp.csv", ("doctor", "first", "second", "label"), self.hint, header=False)
        pairs = [[self._tokens(row[name]) for name in ("first", "second")] for row in rows]
        doctors = sorted({int(row["doctor"]) for row in rows})
        owner = torch.tensor([doctors.index(int(row["doctor"])) for row in rows])
        y = torch.tensor([int(row["label"]) for row in rows])
        held_out = self._held_out([row["first"] for row in rows], owner, key)
        names = tuple(f"doctor {number}" for number in doctors)
        return Dataset(torch.tensor(pairs), y, 2, owner, held_out, names=names)

    def _tokens(self, text: str) -> list[int]:
        return tokens(text, self.length, self.vocabulary)

    def _held_out(self, questions: Sequence[str], owner: Tensor, key: Key) -> Tensor | None:
        """Flags on both pairs of some first questions of every doctor."""
        if self.test_questions == 0:
            return None
        flagged: set[tuple[int, str]] = set()
        asked = list(zip(owner.tolist(), questions, strict=True))
        for doctor in range(int(owner.max()) + 1):
            mine = list(dict.fromkeys(one for one in asked if one[0] == doctor))
            chosen = key.fold("questions", doctor).permutation(len(mine))[: round(self.test_questions * len(mine))]
            flagged.update(mine[place] for place in chosen.tolist())
        return torch.tensor([one in flagged for one in asked])

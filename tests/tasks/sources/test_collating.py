"""Rows of different lengths and the function that pads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedalloy
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.tasks.sources.opening import open_source
from fedalloy.tasks.sources.options import SourceOptions

ROWS = [{"input_ids": [1, 2, 3][: 1 + place % 3], "labels": place % 2, "who": "ab"[place % 2]} for place in range(6)]


def pad(rows: list[Any]) -> dict[str, torch.Tensor]:
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": tokens, "attention_mask": tokens.ne(0).long(), "labels": labels}


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.rows[row]


def opened(source: Any, collate: Any = pad, **more: Any) -> Any:
    return open_source(source, SourceOptions(collate=collate, **more), Key.of(0))


def test_all_clients_get_the_length_of_the_longest_row():
    made = opened({"b": ROWS[:1], "a": ROWS[1:]})
    assert made.names == ("b", "a")
    assert made.owner.tolist() == [0, 1, 1, 1, 1, 1]
    assert made.x["input_ids"].tolist()[0] == [1, 0, 0]
    assert made.x["attention_mask"].sum(1).tolist() == [1, 2, 3, 1, 2, 3]
    assert made.classes == 2


@pytest.mark.parametrize("ids", ["who", lambda row: row["who"], ["a", "b", "a", "b", "a", "b"]])
def test_rows_of_a_dataset_belong_to_their_clients(ids):
    made = opened(Rows(ROWS), ids=ids)
    assert [made.names[one] for one in made.owner.tolist()] == [row["who"] for row in ROWS]


def test_a_test_set_gets_the_same_length():
    made = opened({"train": ROWS[:1], "test": ROWS[2:3]}, dealt=True)
    assert made.x["input_ids"].shape == made.test.x["input_ids"].shape == (1, 3)


@pytest.mark.parametrize(
    ("source", "collate", "more", "said"),
    [
        ([ROWS], lambda rows: pad(rows[1:]), {}, "made 5 examples of 6 rows"),
        ([ROWS], lambda rows: {"input_ids": pad(rows)["input_ids"]}, {}, "one of labels, label, y must be there"),
        ([ROWS], lambda rows: 1 / 0, {}, "collate <lambda>"),
        ([ROWS, []], pad, {}, "client 1 has no rows"),
        ((torch.zeros(2, 2), torch.zeros(2)), pad, {}, "a tuple has none"),
        (Rows(ROWS), pad, {"lazy": True}, "lazy=True"),
        (Rows(ROWS), pad, {"ids": ["a"]}, "1 client ids for 6 rows"),
    ],
)
def test_what_gives_no_examples_is_refused(source, collate, more, said):
    with pytest.raises((DataError, SpecError), match=said):
        opened(source, collate, **more)


def test_a_task_is_trained_on_collated_rows():
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(4, 4), nn.Linear(4, 2)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return self.head((self.words(input_ids) * attention_mask.unsqueeze(2)).sum(1))

    made = fedalloy.task([ROWS, ROWS[:4]], model=Mean, collate=pad, buckets=(2,), test_fraction=0.0)
    assert fedalloy.fit("fedavg", made, rounds=1, engine="loop").status == "finished"

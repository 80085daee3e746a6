"""Question pairs: tokens that depend on letters alone, and both pairs of a question on the same side."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedalloy
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.mqp import MedicalQuestionPairs
from fedalloy.tasks.datasets.words import token
from tests.tasks.real_data import use_real_data

KEY = Key.of(0)


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    use_real_data(MedicalQuestionPairs, monkeypatch)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    lines = [f'{doctor},"Q{number}, fever?",again {label},{label}'
             for doctor in (3, 8) for number in range(5) for label in (1, 0)]  # fmt: skip
    (tmp_path / "mqp.csv").write_bytes("\r\n".join(lines).encode())
    monkeypatch.setenv("FEDALLOY_DATA", str(tmp_path))
    return tmp_path


def test_the_published_counts(real):
    data = MedicalQuestionPairs().load(KEY)
    assert data.x.shape == (3048, 2, 48)
    assert data.x.dtype == torch.int64
    assert torch.bincount(data.y).tolist() == [1524, 1524]
    assert data.owner is not None
    assert torch.bincount(data.owner).tolist() == [130, 426, 280, 272, 276, 280, 278, 280, 280, 280, 266]
    assert data.names is not None
    assert data.names[10] == "doctor 11"
    assert 0 < int(data.x.max()) < 4096


def test_both_pairs_of_a_question_are_held_out_together(real):
    data = MedicalQuestionPairs().load(KEY)
    assert data.held_out is not None
    assert float(data.held_out.double().mean()) == pytest.approx(0.2, abs=0.005)
    # All first questions occur twice, next to each other and with both labels.
    assert torch.equal(data.held_out[::2], data.held_out[1::2])
    assert torch.bincount(data.y[data.held_out]).diff().item() == 0
    other = MedicalQuestionPairs().load(Key.of(1)).held_out
    assert other is not None
    assert not torch.equal(data.held_out, other)
    assert MedicalQuestionPairs(test_questions=0.0).load(KEY).held_out is None


def test_words_are_hashed_and_padded(small):
    data = MedicalQuestionPairs(length=3, vocabulary=100).load(KEY)
    first = data.x[0].tolist()
    assert first == [[token("q0", 100), token("fever", 100), 0], [token("again", 100), token("1", 100), 0]]
    assert data.x[2, 0, 1] == data.x[0, 0, 1]
    assert MedicalQuestionPairs(length=1).load(KEY).x.shape == (20, 2, 1)
    assert data.names == ("doctor 3", "doctor 8")


def test_tokens_are_the_same_everywhere():
    """Fixed numbers: a hash that depends on the process or the machine would part clients from their server."""
    assert [token(word, 4096) for word in ("fever", "cough")] == [1015, 1036]
    assert {token(str(number), 5) for number in range(100)} == {1, 2, 3, 4}


def test_a_short_row_is_named(small):
    (small / "mqp.csv").write_text("1,only one question\n")
    with pytest.raises(DataError, match=r"mqp\.csv cannot be read"):
        MedicalQuestionPairs().load(KEY)


@pytest.mark.parametrize("arguments", [{"length": 0}, {"vocabulary": 1}, {"test_questions": 1.0}])
def test_senseless_arguments_are_refused(arguments):
    with pytest.raises(SpecError, match="allowed"):
        MedicalQuestionPairs(**arguments)


def test_token_numbers_are_not_standardised(small):
    with pytest.raises(SpecError, match="no measurements"):
        make_task("mqp", standardise="client")


def test_federated_averaging_learns_it(real):
    task = make_task("mqp", {"kind": "text_pair", "vocabulary": 1024, "width": 16})
    result = fedalloy.fit(fedalloy.algorithms.fedavg(lr=0.5, batch_size=20), task, rounds=3, evaluate_every=3)
    assert result.last("auroc")["mean"] > 0.6

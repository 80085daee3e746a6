"""Tiny Shakespeare and Sent140: windows and tweets as numbers, roles and users as clients, nothing told beforehand."""

from __future__ import annotations

import gzip
import string
from pathlib import Path

import numpy as np
import pytest
import torch

import fedalloy
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.sent140 import Sent140
from fedalloy.tasks.datasets.tinyshakespeare import TinyShakespeare
from fedalloy.tasks.datasets.words import token
from tests.tasks.real_data import use_real_data

KEY = Key.of(0)
LINES = ["To be, or not to be", "Exit"]


def spoken(numbers: torch.Tensor) -> str:
    return "".join(string.printable[number] for number in numbers.tolist())


@pytest.fixture
def two_roles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    text = np.frombuffer("".join(LINES).encode("latin-1"), dtype=np.uint8)
    offset = np.array([0, len(LINES[0]), len(text)])
    np.savez(tmp_path / "tinyshakespeare_roles.npz", text=text, offset=offset, role=np.array(["HAMLET", "GHOST"]))
    monkeypatch.setenv("FEDALLOY_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def tweets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    rows = ["4,1,Good DAY!", '4,0,"@user bad, bad"', "7,1,once", "9,0,x", "9,1,", "9,1,a b c d"]
    (tmp_path / "sent140_k30_test.csv.gz").write_bytes(gzip.compress("\n".join(["client,label,text", *rows]).encode()))
    monkeypatch.setenv("FEDALLOY_DATA", str(tmp_path))
    return tmp_path


class TestTinyShakespeare:
    def test_the_published_counts(self, monkeypatch):
        use_real_data(TinyShakespeare, monkeypatch)
        every, some = TinyShakespeare(stride=1).load(KEY), TinyShakespeare().load(KEY)
        assert every.owner is not None
        assert some.held_out is not None
        sizes = torch.bincount(every.owner)
        assert (len(every), len(sizes), int(sizes.min()), int(sizes.max())) == (995_844, 193, 340, 37_535)
        assert every.x.dtype == torch.uint8
        assert 49_000 < len(some) < 51_000
        assert float(some.held_out.double().mean()) == pytest.approx(0.2, abs=0.005)
        task = make_task("tinyshakespeare")
        assert int(task.test.size.min()) >= 1
        assert task.population == 193
        assert task.metrics[:2] == ("accuracy", "top5")

    def test_windows_and_their_next_character(self, two_roles):
        data = TinyShakespeare(window=3, stride=5).load(KEY)
        assert [spoken(x) for x in data.x] == ["To ", ", o", "not", "o b", "Exi"]
        assert spoken(data.y) == "br et"
        assert data.owner is not None
        assert data.owner.tolist() == [0, 0, 0, 0, 1]
        assert data.names == ("HAMLET", "GHOST")
        assert data.classes == 100

    def test_no_window_reaches_into_another_role(self, two_roles):
        data = TinyShakespeare(window=3, stride=1).load(KEY)
        assert data.owner is not None
        assert len(data) == sum(len(line) - 3 for line in LINES)
        for window, target, role in zip(data.x, data.y, data.owner.tolist(), strict=True):
            assert spoken(window) + spoken(target.reshape(1)) in LINES[role]

    def test_held_out_characters_are_read_by_nobody(self, two_roles):
        data = TinyShakespeare(window=3, stride=1, test_text=0.25).load(KEY)
        assert data.held_out is not None
        assert data.held_out.tolist() == [False] * 12 + [True] * 4 + [False]
        learned = [spoken(x) + spoken(y.reshape(1)) for x, y in zip(data.x[:12], data.y[:12], strict=True)]
        assert "".join(learned[0::4]) in LINES[0]
        assert learned[-1] == LINES[0][11:15]
        assert TinyShakespeare(window=3, test_text=0.0).load(KEY).held_out is None

    def test_a_window_longer_than_all_roles_is_told(self, two_roles):
        with pytest.raises(DataError, match="shorter window"):
            TinyShakespeare(window=30).load(KEY)

    def test_strange_characters_are_told(self, two_roles):
        codes = np.array([65, 200, 65, 65], dtype=np.uint8)
        np.savez(two_roles / "tinyshakespeare_roles.npz", text=codes, offset=np.array([0, 4]), role=np.array(["A"]))
        with pytest.raises(DataError, match="code 200"):
            TinyShakespeare(window=2).load(KEY)

    def test_it_trains(self, two_roles):
        spec = {"kind": "char_lstm", "hidden": 8, "layers": 1}
        task = make_task({"kind": "tinyshakespeare", "window": 3, "stride": 1}, spec)
        result = fedalloy.fit(fedalloy.algorithms.fedavg(lr=1.0, batch_size=4, epochs=3), task, rounds=4)
        losses = [row["evaluation"]["loss"]["mean"] for row in result.rounds()]
        assert losses[-1] < losses[0] < 4.7

    @pytest.mark.parametrize("arguments", [{"window": 0}, {"stride": 0}, {"test_text": 1.0}])
    def test_senseless_arguments_are_refused(self, arguments):
        with pytest.raises(SpecError, match="allowed"):
            TinyShakespeare(**arguments)


class TestSent140:
    def test_the_published_counts(self, monkeypatch):
        use_real_data(Sent140, monkeypatch)
        every = Sent140(min_tweets=1).load(KEY)
        assert every.owner is not None
        assert every.x.shape == (16025, 25)
        assert torch.bincount(every.y).tolist() == [6308, 9717]
        sizes = torch.bincount(every.owner)
        assert (len(sizes), int(sizes.min()), int(sizes.max())) == (2875, 3, 55)
        assert int((sizes >= 5).sum()) == 1473
        assert make_task("sent140").population == int((sizes >= 10).sum()) == 218

    def test_words_are_hashed_and_rare_users_left_out(self, tweets):
        data = Sent140(min_tweets=2, length=3, vocabulary=100).load(KEY)
        good, day, user, bad = (token(word, 100) for word in ("good", "day", "user", "bad"))
        assert data.x[:2].tolist() == [[good, day, 0], [user, bad, bad]]
        assert data.x[3].tolist() == [0, 0, 0]
        assert data.owner is not None
        assert data.owner.tolist() == [0, 0, 1, 1, 1]
        assert data.names == ("user 4", "user 9")
        assert data.y.tolist() == [1, 0, 0, 1, 1]
        with pytest.raises(DataError, match="no user has 4 tweets; at most 3"):
            Sent140(min_tweets=4).load(KEY)

    def test_a_task_has_one_logit_and_is_scored_by_accuracy(self, tweets):
        task = make_task({"kind": "sent140", "min_tweets": 1})
        assert task.objective.init(KEY)[0]["classifier.weight"].shape == (1, 256)
        assert task.metrics == ("accuracy", "loss")

    def test_a_damaged_file_is_named(self, tweets):
        packed = tweets / "sent140_k30_test.csv.gz"
        packed.write_bytes(packed.read_bytes()[:40])
        with pytest.raises(DataError, match="cannot be read"):
            Sent140().load(KEY)

    @pytest.mark.parametrize("arguments", [{"min_tweets": 0}, {"length": 0}, {"vocabulary": 1}])
    def test_senseless_arguments_are_refused(self, arguments):
        with pytest.raises(SpecError, match="allowed"):
            Sent140(**arguments)

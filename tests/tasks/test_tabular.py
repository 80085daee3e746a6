"""Heart and Berka: the published counts, the stated columns, and a task that needs no further word."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedalloy
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.base import DatasetDefaults, defaults_of
from fedalloy.tasks.datasets.berka import Berka
from fedalloy.tasks.datasets.heart import Heart
from tests.tasks.real_data import use_real_data

KEY = Key.of(0)
LOANS = """region,default,amount,duration,payments,date_between,frequency_id,num_inhabitants,average_salary,\
entrepreneur_rate,unemployment_95,unemployment_96,crimes_95,crimes_96,average_order_amount
Prague,1,10,12,3.5,100,1,7,8,9,1.0,2.0,30,40,5
Prague,0,20,24,4.5,200,0,7,8,9,,2.0,,40,6
north Bohemia,0,30,36,5.5,300,2,7,8,9,1.0,3.0,30,50,7
"""


@pytest.fixture
def heart(monkeypatch: pytest.MonkeyPatch) -> None:
    use_real_data(Heart, monkeypatch)


@pytest.fixture
def berka(monkeypatch: pytest.MonkeyPatch) -> None:
    use_real_data(Berka, monkeypatch)


@pytest.fixture
def three_loans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (tmp_path / "berka_loans.csv").write_text(LOANS)
    monkeypatch.setenv("FEDALLOY_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def ten_patients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x, y, client = np.arange(30.0).reshape(10, 3), np.arange(10) % 2, np.repeat([0, 1], 5)
    np.savez(tmp_path / "heart_aaggff.npz", x=x, y=y, client=client)
    np.savez(tmp_path / "heart_flamby.npz", x=x, y=y, client=client, is_train=np.arange(10) % 5 != 2)
    monkeypatch.setenv("FEDALLOY_DATA", str(tmp_path))


class TestHeart:
    def test_the_published_counts(self, heart):
        everyone, complete = Heart().load(KEY), Heart("flamby").load(KEY)
        assert everyone.owner is not None
        assert everyone.x.shape == (920, 15)
        assert torch.bincount(everyone.owner).tolist() == [303, 294, 123, 200]
        assert torch.bincount(everyone.owner[everyone.y == 1]).tolist() == [139, 106, 115, 149]
        assert complete.owner is not None
        assert complete.held_out is not None
        assert complete.x.shape == (740, 13)
        assert torch.bincount(complete.owner[~complete.held_out]).tolist() == [199, 172, 30, 85]
        assert torch.bincount(complete.owner[complete.held_out]).tolist() == [104, 89, 16, 45]

    def test_flamby_comes_with_its_split(self, ten_patients):
        task = make_task({"kind": "heart", "variant": "flamby"}, test_fraction=0.5, standardise="none")
        assert task.test.size.tolist() == [1, 1]
        assert task.test.x[:, 0].tolist() == [6.0, 21.0]
        assert task.names == ("cleveland", "hungarian")

    def test_a_task_is_binary_standardised_and_scored_by_auroc(self, ten_patients):
        task = make_task("heart", test_fraction=0.4)
        assert task.objective.init(KEY)[0]["output.weight"].shape == (1, 3)
        assert task.metrics == ("auroc", "accuracy", "loss")
        for k in range(2):
            torch.testing.assert_close(task.everyone("train").client(k).x.mean(0), torch.zeros(3), atol=1e-6, rtol=0)
        plain = make_task("heart", loss="cross_entropy", standardise="none")
        assert plain.objective.init(KEY)[0]["output.weight"].shape == (2, 3)
        assert float(plain.train.x.max()) > 20

    def test_federated_averaging_learns_it(self, heart):
        for spec in ("heart", {"kind": "heart", "variant": "flamby"}):
            result = fedalloy.fit(fedalloy.algorithms.fedavg(lr=0.1, batch_size=20), make_task(spec), rounds=10)
            assert result.last("auroc")["mean"] > 0.8
            assert result.last("auroc")["skipped"] == 0

    def test_an_unknown_variant_is_refused(self):
        with pytest.raises(SpecError, match="did you mean 'flamby'"):
            Heart("flambi")  # type: ignore[arg-type]


class TestBerka:
    def test_the_published_counts(self, berka):
        seven, eight = Berka().load(KEY), Berka(north_bohemia=True).load(KEY)
        assert seven.names == (
            "Prague", "central Bohemia", "east Bohemia", "north Moravia", "south Bohemia", "south Moravia",
            "west Bohemia",
        )  # fmt: skip
        assert seven.owner is not None
        assert seven.x.shape == (621, 12)
        assert torch.bincount(seven.owner).tolist() == [84, 90, 84, 117, 60, 129, 57]
        assert torch.bincount(seven.owner[seven.y == 1]).tolist() == [7, 10, 9, 18, 9, 13, 9]
        assert (len(eight), int(eight.y.sum())) == (682, 76)
        assert bool(Berka("mean", north_bohemia=True).load(KEY).x.isfinite().all())

    def test_the_columns_in_their_order(self, three_loans):
        x = Berka(north_bohemia=True).load(KEY).x
        assert x[0].tolist() == [10, 12, 3.5, 100, 1, 0, 7, 8, 9, 2, 40, 5]
        assert x[:, 4:6].tolist() == [[1, 0], [0, 0], [0, 1]]

    def test_the_mean_of_two_years_where_there_are_two(self, three_loans):
        x = Berka("mean", north_bohemia=True).load(KEY).x
        assert x[:, 9:11].tolist() == [[1.5, 35], [2, 40], [2, 40]]

    def test_north_bohemia_is_left_out_unless_asked_for(self, three_loans):
        assert Berka().load(KEY).names == ("Prague",)
        assert len(Berka().load(KEY)) == 2

    def test_a_file_without_its_columns_is_named(self, three_loans):
        (three_loans / "berka_loans.csv").write_text("region,default\nPrague,1\n")
        with pytest.raises(DataError, match=r"berka_loans\.csv cannot be read.*amount"):
            Berka().load(KEY)

    def test_unknown_years_are_refused(self):
        with pytest.raises(SpecError, match="allowed"):
            Berka("95")  # type: ignore[arg-type]

    def test_federated_averaging_is_better_than_chance(self, berka):
        result = fedalloy.fit(fedalloy.algorithms.fedavg(lr=0.1, batch_size=20), make_task("berka"), rounds=15)
        assert result.last("auroc")["mean"] > 0.55


def test_habits_are_found_by_name_spec_and_value():
    for said in ("heart", {"kind": "heart", "variant": "flamby"}, Heart()):
        assert defaults_of(said) == Heart.defaults
    for other in ("digits", "no such data", {"variant": "flamby"}, make_task(clients=2), None):
        assert defaults_of(other) == DatasetDefaults()

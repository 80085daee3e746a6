"""Every loader gives what it describes, and says what is wrong when it cannot."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from fedalloy.core import registry
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.types import Examples
from fedalloy.tasks import locate
from fedalloy.tasks.datasets.base import Dataset, DatasetLoader, from_clients, third_party
from fedalloy.tasks.datasets.callable import FromFunction
from fedalloy.tasks.datasets.digits import Digits
from fedalloy.tasks.datasets.folder import Folder
from fedalloy.tasks.datasets.mnist import Mnist
from fedalloy.tasks.datasets.synthetic import Synthetic, SyntheticIid

KEY = Key.of(0)


def test_every_loader_describes_itself():
    loaders = registry.everything("dataset")
    assert {"digits", "synthetic", "synthetic_iid", "mnist", "folder", "callable"} <= set(loaders)
    for name, loader in loaders.items():
        assert isinstance(loader, type)
        assert issubclass(loader, DatasetLoader)
        assert loader.summary, name
        assert loader.hint or not loader.files, name


class TestDataset:
    def test_lengths_must_agree(self):
        with pytest.raises(DataError, match="3 labels but 2 rows of 'x'"):
            Dataset(torch.zeros(2, 1), torch.zeros(3, dtype=torch.int64), 1)
        with pytest.raises(DataError, match="rows of 'owner'"):
            Dataset(torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64), 1, owner=torch.tensor([0]))

    def test_labels_must_be_class_numbers(self):
        for wrong in (-1, 2):
            with pytest.raises(DataError, match=r"0\.\.1"):
                Dataset(torch.zeros(2, 1), torch.tensor([0, wrong]), 2)

    def test_owners_must_have_names(self):
        with pytest.raises(DataError, match="owner number 1"):
            Dataset(torch.zeros(2, 1), torch.tensor([0, 0]), 1, torch.tensor([0, 1]), names=("a",))

    def test_there_must_be_examples(self):
        with pytest.raises(DataError, match="no examples"):
            Dataset(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64), 1)


class TestFromClients:
    def test_types_and_owners(self):
        made = from_clients([(np.ones((2, 3)), np.array([0, 4])), (torch.ones(1, 3), [True])])
        assert made.x.dtype == torch.float32
        assert made.y.tolist() == [0, 4, 1]
        assert made.y.dtype == torch.int64
        assert made.classes == 5
        assert made.owner is not None
        assert made.owner.tolist() == [0, 0, 1]

    def test_real_targets_have_no_classes(self):
        made = from_clients([([[1.0]], [0.5])])
        assert made.classes == 0
        assert made.y.dtype == torch.float32

    @pytest.mark.parametrize(
        ("clients", "words"),
        [
            ([], "no clients"),
            ([(np.ones((2, 3)), [0])], r"client 0: x has shape \(2, 3\) and y \(1,\)"),
            ([(np.ones((1, 3)), [[0]])], "one number per example"),
            ([(np.ones((1, 3)), [0]), (np.ones((1, 2)), [0])], r"client 1: examples have shape \(2,\)"),
            ([(np.ones((1, 3)), [0]), (np.ones((1, 3)), [0.5])], "use one kind"),
            ([(np.ones((0, 3)), [])], "no client has an example"),
            ([(np.array([["a"]]), [0])], "features must be numbers, not text"),
        ],
    )
    def test_what_does_not_fit_is_named(self, clients, words):
        with pytest.raises(DataError, match=words):
            from_clients(clients)


class TestDigits:
    def test_flat(self):
        digits = Digits().load(KEY)
        assert digits.x.shape == (1797, 64)
        assert (float(digits.x.min()), float(digits.x.max())) == (0.0, 1.0)
        assert torch.bincount(digits.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]

    def test_images_hold_the_same_pixels(self):
        image = Digits(flat=False).load(KEY).x
        assert image.shape == (1797, 1, 8, 8)
        assert torch.equal(image.flatten(1), Digits().load(KEY).x)

    def test_a_missing_package_is_named(self):
        with pytest.raises(DataError, match=r"needs the package 'no-such-package'.*pip install no-such-package"):
            third_party("no_such_module", "no-such-package", "this")


class TestSynthetic:
    def test_shape_sizes_and_owners(self):
        data = Synthetic(0.5, 0.5).load(KEY)
        assert data.owner is not None
        sizes = torch.bincount(data.owner)
        assert len(sizes) == 30
        assert int(sizes.min()) >= 50
        assert data.x.shape == (int(sizes.sum()), 60)
        assert data.classes == 10

    def test_a_device_depends_on_its_own_number_alone(self):
        few, many = Synthetic(1, 1, devices=3).load(KEY), Synthetic(1, 1, devices=9).load(KEY)
        assert torch.equal(few.x, many.x[: len(few)])
        assert torch.equal(few.y, many.y[: len(few)])

    def test_other_keys_give_other_data(self):
        assert not torch.equal(Synthetic(devices=2).load(KEY).x[:50], Synthetic(devices=2).load(Key.of(1)).x[:50])

    def test_sizes_are_lognormal(self):
        data = SyntheticIid(devices=400).load(KEY)
        assert data.owner is not None
        # int() cuts, so the lower half of the logarithms is distorted: compare upper quantiles of 50 + exp(4 + 2 z).
        sizes = torch.bincount(data.owner).double() - 50
        assert float(sizes.median().log()) == pytest.approx(4, abs=0.3)
        assert float(sizes.quantile(0.8413).log()) == pytest.approx(6, abs=0.4)

    def test_variances_fall_like_a_power(self):
        variance = SyntheticIid(devices=100).load(KEY).x.double().var(0)
        assert torch.allclose(variance, torch.arange(1.0, 61.0).double() ** -1.2, rtol=0.05)

    def test_beta_is_the_standard_deviation_of_the_shift(self):
        data = Synthetic(0.0, 3.0, devices=200).load(KEY)
        assert data.owner is not None
        means = torch.stack([data.x[data.owner == k].mean() for k in range(200)])
        # The mean over 60 features of N(B_k, 1), B_k ~ N(0, 3); as a variance it would be 1.73.
        assert float(means.std()) == pytest.approx(3.0, rel=0.12)

    def test_what_is_learned_on_some_devices_serves_others_only_when_iid(self):
        def transfers(data: Dataset) -> float:
            assert data.owner is not None
            seen = data.owner < 15
            x = torch.cat([data.x, torch.ones(len(data), 1)], 1).double()
            wanted = torch.nn.functional.one_hot(data.y, 10).double()
            said = x[~seen] @ torch.linalg.lstsq(x[seen], wanted[seen]).solution
            return float((said.argmax(1) == data.y[~seen]).double().mean())

        assert transfers(SyntheticIid().load(KEY)) > 0.7
        assert transfers(Synthetic(1.0, 1.0).load(KEY)) < 0.4

    def test_a_large_alpha_moves_weights_and_bias_together(self):
        # With u_k added to every weight and bias alike, all classes gain the same: alpha alone changes no label.
        calm, wild = Synthetic(0.0, 0.0, devices=5).load(KEY), Synthetic(50.0, 0.0, devices=5).load(KEY)
        assert torch.equal(calm.x, wild.x)
        assert float((calm.y == wild.y).double().mean()) > 0.999

    @pytest.mark.parametrize(
        "make", [lambda: Synthetic(-1.0, 0.0), lambda: Synthetic(devices=0), lambda: SyntheticIid(0)]
    )
    def test_senseless_arguments_are_refused(self, make):
        with pytest.raises(SpecError):
            make()


def _data_folder() -> Path:
    named = os.environ.get("FEDALLOY_DATA")
    return Path(named) if named else Path(__file__).resolve().parents[2].parent / "shared" / "data"


class TestMnist:
    @pytest.fixture
    def real(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if not (_data_folder() / "mnist_train.npz").is_file():
            pytest.skip("needs mnist_train.npz and mnist_test.npz in FEDALLOY_DATA")
        monkeypatch.setenv("FEDALLOY_DATA", str(_data_folder()))

    @pytest.fixture
    def small(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        pixels = np.zeros((4, 28, 28), dtype=np.uint8)
        pixels[:, 0, 0] = 255
        for name in Mnist.files:
            np.savez(tmp_path / name, x=pixels, y=np.arange(4))
        monkeypatch.setenv("FEDALLOY_DATA", str(tmp_path))

    def test_the_real_thing(self, real):
        data = Mnist().load(KEY)
        assert data.x.shape == (60_000, 784)
        assert torch.bincount(data.y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
        assert isinstance(data.test, Examples)
        assert len(data.test) == 10_000
        assert [locate.check(name).verdict for name in Mnist.files] == ["ok", "ok"]

    @pytest.mark.parametrize(
        ("scale", "low", "high"),
        [("unit", 0, 1), ("symmetric", -1, 1), ("standard", -0.1307 / 0.3081, (1 - 0.1307) / 0.3081)],
    )
    def test_scales(self, small, scale, low, high):
        x = Mnist(scale=scale).load(KEY).x
        assert float(x.min()) == pytest.approx(low)
        assert float(x.max()) == pytest.approx(high)

    def test_images(self, small):
        data = Mnist(flat=False).load(KEY)
        assert data.x.shape == (4, 1, 28, 28)
        assert data.test is not None
        assert data.test.x.shape == (4, 1, 28, 28)

    def test_a_missing_file_says_how_to_get_it(self, monkeypatch, tmp_path):
        monkeypatch.setenv("FEDALLOY_DATA", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with pytest.raises(DataError, match=r"mnist_train\.npz.*IDX"):
            Mnist().load(KEY)

    def test_a_broken_file_is_named(self, small, tmp_path):
        np.savez(tmp_path / "mnist_train.npz", images=np.zeros(3))
        with pytest.raises(DataError, match=r"mnist_train\.npz cannot be read"):
            Mnist().load(KEY)

    def test_an_unknown_scale_is_refused(self):
        with pytest.raises(SpecError, match="did you mean 'unit'"):
            Mnist(scale="units")  # type: ignore[arg-type]


class TestFolder:
    def test_npz_files_are_clients_in_order_of_their_names(self, tmp_path):
        np.savez(tmp_path / "b.npz", x=np.full((2, 3), 2.0), y=np.array([1, 0]))
        np.savez(tmp_path / "a.npz", x=np.full((1, 3), 1), y=np.array([2]))
        (tmp_path / "README.txt").write_text("not a client")
        data = Folder(str(tmp_path)).load(KEY)
        assert data.names == ("a", "b")
        assert data.y.tolist() == [2, 1, 0]
        assert data.x[:, 0].tolist() == [1, 2, 2]
        assert data.owner is not None
        assert data.owner.tolist() == [0, 1, 1]
        assert data.classes == 3

    @pytest.mark.parametrize("label", ["y", "label"])
    def test_parquet(self, tmp_path, label):
        pandas = pytest.importorskip("pandas")
        pytest.importorskip("pyarrow")
        frame = pandas.DataFrame({"age": [1, 2], label: [0, 1], "height": [0.5, 0.25]})
        frame.to_parquet(tmp_path / "one.parquet")
        data = Folder(str(tmp_path)).load(KEY)
        assert data.x.tolist() == [[1.0, 0.5], [2.0, 0.25]]
        assert data.y.tolist() == [0, 1]

    def test_parquet_columns_are_known_by_their_names(self, tmp_path):
        pandas = pytest.importorskip("pandas")
        pytest.importorskip("pyarrow")
        frame = pandas.DataFrame({"age": [1, 2, 3], "height": [0.5, 0.25, 0.75], "y": [0, 1, 0]})
        frame.to_parquet(tmp_path / "a.parquet")
        frame[["y", "height", "age"]][1:].to_parquet(tmp_path / "b.parquet")  # with pandas' row numbers
        assert Folder(str(tmp_path)).load(KEY).x.tolist() == [[1, 0.5], [2, 0.25], [3, 0.75], [2, 0.25], [3, 0.75]]
        frame.rename(columns={"height": "weight"}).to_parquet(tmp_path / "c.parquet")
        with pytest.raises(DataError, match=r"c\.parquet has other .*missing: height; additional: weight"):
            Folder(str(tmp_path)).load(KEY)

    @pytest.mark.parametrize("column", [["1", "2"], np.array(["2020-01-01"] * 2, dtype="datetime64[ns]")])
    def test_parquet_with_dates_or_numbers_in_words_is_refused(self, tmp_path, column):
        pandas = pytest.importorskip("pandas")
        pytest.importorskip("pyarrow")
        pandas.DataFrame({"born": column, "y": [0, 1]}).to_parquet(tmp_path / "one.parquet")
        with pytest.raises(DataError, match=r"must hold numbers \('born' holds"):
            Folder(str(tmp_path)).load(KEY)

    def test_parquet_without_a_label_is_refused(self, tmp_path):
        pandas = pytest.importorskip("pandas")
        pytest.importorskip("pyarrow")
        pandas.DataFrame({"age": [1], "height": [2]}).to_parquet(tmp_path / "one.parquet")
        with pytest.raises(DataError, match="'y' or 'label'; it has age, height"):
            Folder(str(tmp_path)).load(KEY)

    def test_parquet_with_text_is_refused(self, tmp_path):
        pandas = pytest.importorskip("pandas")
        pytest.importorskip("pyarrow")
        pandas.DataFrame({"name": ["ann"], "y": [2]}).to_parquet(tmp_path / "one.parquet")
        with pytest.raises(DataError, match="must hold numbers"):
            Folder(str(tmp_path)).load(KEY)

    def test_parquet_without_pyarrow_names_the_package(self, tmp_path, monkeypatch):
        (tmp_path / "one.parquet").write_bytes(b"")
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
        with pytest.raises(DataError, match="pip install pyarrow"):
            Folder(str(tmp_path)).load(KEY)

    def test_no_folder_and_no_files(self, tmp_path):
        with pytest.raises(DataError, match="is not a folder"):
            Folder(str(tmp_path / "nowhere")).load(KEY)
        with pytest.raises(DataError, match="one per client"):
            Folder(str(tmp_path)).load(KEY)

    def test_missing_arrays_are_named(self, tmp_path):
        np.savez(tmp_path / "a.npz", x=np.ones((1, 3)), target=np.array([2]))
        with pytest.raises(DataError, match=r"a\.npz has no array y; it holds x, target"):
            Folder(str(tmp_path)).load(KEY)

    def test_differing_features_are_named(self, tmp_path):
        np.savez(tmp_path / "a.npz", x=np.ones((1, 3)), y=np.array([2]))
        np.savez(tmp_path / "b.npz", x=np.ones((1, 4)), y=np.array([2]))
        with pytest.raises(DataError, match=r"b: examples have shape \(4,\), those of a \(3,\)"):
            Folder(str(tmp_path)).load(KEY)

    def test_objects_and_rubbish_are_refused(self, tmp_path):
        np.savez(tmp_path / "a.npz", x=np.array([{"a": 1}], dtype=object), y=np.array([2]))
        with pytest.raises(DataError, match=r"array 'x' holds Python objects"):
            Folder(str(tmp_path)).load(KEY)
        (tmp_path / "a.npz").write_bytes(b"PK rubbish")
        with pytest.raises(DataError, match=r"plain \.npz"):
            Folder(str(tmp_path)).load(KEY)

    def test_two_files_of_one_name_are_refused(self, tmp_path):
        np.savez(tmp_path / "a.npz", x=np.ones((1, 3)), y=np.array([2]))
        (tmp_path / "a.parquet").write_bytes(b"")
        with pytest.raises(DataError, match="more than one file for client a"):
            Folder(str(tmp_path)).load(KEY)


class TestCallable:
    @pytest.fixture(autouse=True)
    def module(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = ModuleType("my_own_data")
        module.pairs = lambda: [([[1.0]], [0]), ([[2.0]], [1])]  # type: ignore[attr-defined]
        module.whole = lambda: Dataset(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), 3)  # type: ignore[attr-defined]
        module.drawn = lambda key: [(key.normal(4, 2), [0, 1, 0, 1])]  # type: ignore[attr-defined]
        module.wrong = lambda: 7  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "my_own_data", module)

    def test_what_a_function_returns(self):
        assert FromFunction("my_own_data:pairs").load(KEY).y.tolist() == [0, 1]
        assert FromFunction("my_own_data:whole").load(KEY).classes == 3

    def test_a_function_that_draws_gets_the_key(self):
        drawn = FromFunction("my_own_data:drawn")
        assert torch.equal(drawn.load(KEY).x, drawn.load(KEY).x)
        assert not torch.equal(drawn.load(KEY).x, drawn.load(Key.of(1)).x)

    def test_faults_are_named(self):
        with pytest.raises(DataError, match="returned int"):
            FromFunction("my_own_data:wrong").load(KEY)
        with pytest.raises(DataError, match="did you mean 'pairs'"):
            FromFunction("my_own_data:pair").load(KEY)
        with pytest.raises(DataError, match="cannot be imported"):
            FromFunction("no_such_module_here:f").load(KEY)
        with pytest.raises(SpecError, match=r"package\.module:function"):
            FromFunction("my_own_data.pairs")

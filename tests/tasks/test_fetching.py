"""``data fetch`` against a server on loopback that serves the original formats: whole, interrupted, damaged, "
"offline."""

from __future__ import annotations

import gzip
import http.client
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedalloy
from fedalloy.core.errors import DataError
from fedalloy.core.keys import Key
from fedalloy.tasks import locate, originals
from fedalloy.tasks.converting import read_idx, read_pickle
from fedalloy.tasks.datasets.cifar10 import Cifar10
from fedalloy.tasks.datasets.cifar100 import Cifar100
from fedalloy.tasks.datasets.fashion_mnist import FashionMnist
from fedalloy.tasks.datasets.femnist import Femnist
from fedalloy.tasks.datasets.mnist import Mnist
from fedalloy.tasks.datasets.tinyshakespeare import TinyShakespeare
from fedalloy.tasks.fetching import FetchRequest, prepare
from fedalloy.tasks.originals import Original
from fedalloy.tasks.unpacking import Originals
from tests.tasks.originals_site import RNG, archive, at, batch, command, digits, idx
from tests.tasks.real_data import data_folder


def test_mnist_is_fetched_converted_and_loaded(site, folder, monkeypatch):
    made = digits(site)
    at(site, monkeypatch, "mnist")
    with pytest.raises(DataError, match="fedalloy data fetch mnist"):
        fedalloy.task("mnist")
    result = command("mnist")
    assert result.exit_code == 0, result.output
    data = Mnist(flat=False).load(Key.of(0))
    assert torch.equal((data.x * 255).round().to(torch.uint8)[:, 0], torch.from_numpy(made["train-images"]))
    assert data.test is not None
    assert data.test.y.tolist() == made["t10k-labels"].tolist()
    assert "is not the file with which fedalloy's recipes were checked" in result.output
    assert locate.check("mnist_train.npz").verdict == "ok", "the file that was made is recorded"
    asked = len(site.asked)
    assert "there already" in command("mnist").output
    assert len(site.asked) == asked


def test_the_real_mnist_becomes_the_file_that_is_known(tmp_path):
    real = data_folder() / "mnist_test.npz"
    if not real.is_file():
        pytest.skip("the real MNIST is not here")
    arrays = np.load(real)
    given = []
    files = {"t10k-images-idx3-ubyte": arrays["x"], "t10k-labels-idx1-ubyte": arrays["y"]}
    files |= {name.replace("t10k", "train"): values[:9] for name, values in files.items()}
    for name, values in files.items():
        given.append(tmp_path / f"{name}.gz")
        given[-1].write_bytes(idx(values))
    prepare(FetchRequest("mnist", given=tuple(given)), tmp_path / "data")
    assert locate.checksum(tmp_path / "data" / "mnist_test.npz") == Mnist.files["mnist_test.npz"]


def test_an_interrupted_download_continues(site, folder, monkeypatch):
    digits(site)
    at(site, monkeypatch, "mnist")
    name = "train-images-idx3-ubyte.gz"
    site.breaks[name] = 20_000
    broken = command("mnist")
    assert broken.exit_code == 1
    assert "the same command continues the download" in str(broken.exception) + broken.output
    assert (folder / "originals" / f"{name}.part").stat().st_size == 20_000
    assert command("mnist").exit_code == 0
    assert (name, "bytes=20000-") in site.asked
    assert not list(folder.rglob("*.part"))
    assert len(Mnist().load(Key.of(0))) == 50


def test_a_damaged_download_is_refused_and_never_converted(site, folder, monkeypatch):
    digits(site)
    at(site, monkeypatch, "mnist")
    site.files["t10k-labels-idx1-ubyte.gz"] = site.files["t10k-labels-idx1-ubyte.gz"][:-1] + b"x"
    damaged = command("mnist")
    assert damaged.exit_code == 1
    assert "expected sha256" in str(damaged.exception) + damaged.output
    assert not list(folder.glob("*.npz"))


def test_without_a_connection_the_error_says_what_to_do(folder, monkeypatch):
    monkeypatch.setattr(originals, "ORIGINALS", (
        Original("cifar100", "http://127.0.0.1:9/a.tar.gz", None, "a.tar.gz"),
        Original("cifar100", "http://127.0.0.1:9/b.parquet", None, "b.parquet", source="hub"),
    ))  # fmt: skip
    with pytest.raises(DataError, match=r"official: .*refused.*hub: .*refused.* --from FILE"):
        prepare(FetchRequest("cifar100"), folder)


def test_the_hub_is_the_alternative(site, folder, monkeypatch):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    image = pytest.importorskip("PIL.Image")
    pixels = RNG.integers(0, 256, (6, 28, 28), dtype=np.uint8)

    def png(values: np.ndarray) -> dict[str, Any]:
        stream = io.BytesIO()
        image.fromarray(values).save(stream, "PNG")
        return {"bytes": stream.getvalue(), "path": None}

    stream = io.BytesIO()
    parquet.write_table(pyarrow.table({"image": [png(one) for one in pixels], "label": [0, 1, 2, 0, 1, 2]}), stream)
    site.files["0000.parquet"] = stream.getvalue()
    gone = Original("fashion_mnist", f"{site.url}/gone", None, "gone")
    files = [Original("fashion_mnist", f"{site.url}/0000.parquet", None, f"fashion_mnist-{part}.parquet", source="hub")
             for part in ("train", "test")]  # fmt: skip
    monkeypatch.setattr(originals, "ORIGINALS", (gone, *files))
    assert command("fashion-mnist").exit_code == 0
    data = FashionMnist(flat=False).load(Key.of(0))
    assert torch.equal((data.x[:, 0] * 255).round().to(torch.uint8), torch.from_numpy(pixels))
    assert locate.recorded(folder / "originals")["fashion_mnist-train.parquet"]["sha256"]


# ------------------------------------------------------------------------------------------------------------- CIFAR


def test_cifar_is_read_from_its_pickles(site, folder, monkeypatch):
    labels = [0, 1, 2, 1] * 5
    names = [f"cifar-10-batches-py/data_batch_{k}" for k in range(1, 6)] + ["cifar-10-batches-py/test_batch"]
    site.files["cifar-10-python.tar.gz"] = archive({name: batch(20, {"labels": labels}) for name in names})
    at(site, monkeypatch, "cifar10")
    assert command("cifar10").exit_code == 0
    some, whole = Cifar10().load(Key.of(0)), Cifar10(whole=True).load(Key.of(0))
    assert len(some) == len(whole) == 100
    assert whole.y.tolist() == labels * 5
    assert whole.x.shape == (100, 3, 32, 32)
    assert torch.equal(some.x, whole.x), "of every class the first 2000, in their order"


def test_cifar100_has_its_fine_labels(site, folder, monkeypatch):
    members = {f"cifar-100-python/{part}": batch(4, {"fine_labels": [7, 99, 0, 3], "coarse_labels": [0] * 4})
               for part in ("train", "test")}  # fmt: skip
    site.files["cifar-100-python.tar.gz"] = archive(members)
    at(site, monkeypatch, "cifar100", known=False)
    assert command("cifar100").exit_code == 0
    data = Cifar100().load(Key.of(0))
    assert (data.classes, data.y.tolist()) == (100, [7, 99, 0, 3])


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/fedalloy-was-here",)


@pytest.mark.parametrize("thing", [Evil(), np.zeros(2, dtype=object), np.zeros(2), Path("x")])
def test_a_pickle_executes_nothing(thing):
    with pytest.raises(DataError, match=r"has no place in data|is not of bytes"):
        read_pickle(pickle.dumps({"data": thing}, protocol=2))
    assert not Path("/tmp/fedalloy-was-here").exists()


def test_an_archive_writes_nothing_outside_of_the_folder(site, folder, monkeypatch):
    members = {f"cifar-100-python/{part}": batch(2, {"fine_labels": [0, 1]}) for part in ("train", "test")}
    site.files["cifar-100-python.tar.gz"] = archive({"../../../outside": b"x", "/abs": b"x", **members})
    at(site, monkeypatch, "cifar100")
    before = {path for path in folder.parent.rglob("*") if path.is_file()}
    prepare(FetchRequest("cifar100"), folder)
    made = {path for path in folder.parent.rglob("*") if path.is_file()} - before
    assert {path.name for path in made} == {"cifar100.npz", "cifar-100-python.tar.gz", "fetched.json"}


# ------------------------------------------------------------------------------------------------- files of one's own


def test_files_from_elsewhere_are_converted(tmp_path, folder):
    plays = "ANN:\n" + "To be, or not to be. " * 30 + "\n\nBOB:\nNo.\n\nANN:\nThat is it.\n"
    (tmp_path / "input.txt").write_text(plays)
    result = command("shakespeare", "--from", str(tmp_path / "input.txt"))
    assert result.exit_code == 0, result.output
    assert TinyShakespeare(window=20).load(Key.of(0)).names == ("ANN",)
    assert "differs from the known file" in result.output


def test_leafs_femnist_is_converted_with_its_own_split(tmp_path, folder):
    import json

    image = (np.arange(784) % 256 / 255).tolist()
    for part, count in (("train", 3), ("test", 1)):
        data = {user: {"x": [image] * count, "y": [5] * count} for user in ("w2", "w1")}
        (tmp_path / f"all_data_niid_{part}.json").write_text(json.dumps({"users": ["w2", "w1"], "user_data": data}))
    files = [f"--from={path}" for path in sorted(tmp_path.glob("*.json"))]
    assert command("femnist", *files).exit_code == 0
    found = Femnist().load(Key.of(0))
    assert found.names == ("w1", "w2")
    assert found.held_out is not None
    assert found.held_out.sum() == 2
    assert (found.x[0, 0] * 255).round().flatten()[:256].tolist() == list(range(256))


def test_what_is_no_original_is_refused(tmp_path, folder):
    (tmp_path / "x-train-images.gz").write_bytes(gzip.compress(b"\0\0\x08\x03" + struct.pack(">3I", 9, 28, 28) + b"x"))
    with pytest.raises(DataError, match="it is incomplete"):
        read_idx(tmp_path / "x-train-images.gz", Originals({}))
    with pytest.raises(DataError, match=r"cannot be converted|there is no file for"):
        prepare(FetchRequest("mnist", given=(tmp_path / "x-train-images.gz",)), folder)
    with pytest.raises(DataError, match="is not a file"):
        prepare(FetchRequest("mnist", given=(tmp_path / "nothing",)), folder)
    (tmp_path / "a.tar.gz").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"a\.tar\.gz is neither a tar nor a zip archive"):
        prepare(FetchRequest("cifar10", given=(tmp_path / "a.tar.gz",)), folder)
    with pytest.raises(DataError, match="has no source 'mars'; it has official, hub"):
        prepare(FetchRequest("cifar10", source="mars"), folder)


def test_a_broken_pickle_is_refused_in_words(tmp_path, folder):
    path = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"}K\x01a."[:4]))
    with pytest.raises(DataError, match="cannot be converted"):
        prepare(FetchRequest("cifar10", given=(path,)), folder)


def test_a_server_that_speaks_no_http_is_an_error_in_words(folder, monkeypatch):
    def nonsense(*args: object, **more: object) -> None:
        raise http.client.BadStatusLine("hello")

    monkeypatch.setattr("urllib.request.urlopen", nonsense)
    with pytest.raises(DataError, match="cannot be fetched: hello; the same command continues"):
        prepare(FetchRequest("tinyshakespeare"), folder)


def test_options_for_downloads_are_not_ignored_beside_files_at_hand(tmp_path, folder):
    path = tmp_path / "input.txt"
    path.write_text("nothing")
    options: tuple[tuple[dict[str, Any], str], ...] = (
        ({"sha256": "0" * 64}, "differs from --sha256"), ({"url": "http://x"}, "leave --source and"),
    )  # fmt: skip
    for more, words in options:
        with pytest.raises(DataError, match=words):
            prepare(FetchRequest("tinyshakespeare", given=(path,), **more), folder)


def test_two_files_of_one_name_are_not_taken_for_one(tmp_path, folder):
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "0000.parquet").write_bytes(b"x")
    given = tuple(tmp_path / part / "0000.parquet" for part in ("train", "test"))
    with pytest.raises(DataError, match=r"two files called 0000\.parquet"):
        prepare(FetchRequest("femnist", given=given), folder)


def test_the_part_of_leafs_files_is_a_word_of_their_names():
    from fedalloy.tasks.unpacking import is_for_testing

    assert is_for_testing(Path("data/all_data_niid_0_keep_0_test_9.json"))
    assert is_for_testing(Path("test/all_data.json"))
    assert not is_for_testing(Path("data/latest_train.json"))

"""Every set that ``data fetch`` lists ends usable: from a whole, an interrupted, a damaged download, and offline."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import wave
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedalloy.core import registry
from fedalloy.core.errors import DataError
from fedalloy.core.keys import Key
from fedalloy.tasks import locate, originals
from fedalloy.tasks.converting import CONVERTERS
from fedalloy.tasks.converting_speech import energies, mel_bands, quantised
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.datasets.heart import CENTRES, Heart
from fedalloy.tasks.datasets.sent140 import TEST, Sent140
from fedalloy.tasks.datasets.speech_commands import SpeechCommands
from fedalloy.tasks.datasets.words import tokens
from fedalloy.tasks.fetching import FetchRequest, prepare
from tests.tasks.originals_site import RNG, archive, batch, command, idx
from tests.tasks.real_data import data_folder


def grey(prefix: str = "") -> dict[str, bytes]:
    made = {}
    for part, count in (("train", 20), ("t10k", 10)):
        made[f"{prefix}{part}-images-idx3-ubyte.gz"] = idx(RNG.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        made[f"{prefix}{part}-labels-idx1-ubyte.gz"] = idx(np.arange(count) % 10)
    return made


def cifar(folder: str, names: list[str], labels: dict[str, list[int]]) -> bytes:
    return archive({f"{folder}/{name}": batch(4, labels) for name in names})


def cifar10() -> dict[str, bytes]:
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    return {"cifar-10-python.tar.gz": cifar("cifar-10-batches-py", names, {"labels": [0, 1, 2, 1]})}


def cifar100() -> dict[str, bytes]:
    return {"cifar-100-python.tar.gz": cifar("cifar-100-python", ["train", "test"], {"fine_labels": [7, 99, 0, 3]})}


def femnist() -> dict[str, bytes]:
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    image, pictures = pytest.importorskip("PIL.Image"), []
    for pixels in RNG.integers(0, 256, (24, 28, 28), dtype=np.uint8):
        stream = io.BytesIO()
        image.fromarray(pixels).save(stream, "PNG")
        pictures.append({"bytes": stream.getvalue(), "path": None})
    columns = {"image": pictures, "character": [5] * 24, "writer_id": ["a", "b"] * 12}
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), stream)
    return {"femnist-train.parquet": stream.getvalue()}


def plays() -> dict[str, bytes]:
    return {"tinyshakespeare.txt": b"ANN:\n" + b"To be, or not to be. " * 40 + b"\n\nBOB:\nNo.\n"}


def questions() -> dict[str, bytes]:
    return {"mqp.csv": b"".join(b"%d,does it hurt,is it bad %d,%d\r\n" % (k % 2 + 1, k, k % 2) for k in range(20))}


def patients() -> dict[str, bytes]:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        made.writestr("Index", "not a table")
        for centre in CENTRES:
            rows = [[*map(str, (60 + k, k % 2, k % 4 + 1, 120, 200, 0, k % 3, 150, 0, 1.5, "?", "?", "?", k % 5))]
                    for k in range(12)]  # fmt: skip
            rows[0][3] = "?"
            made.writestr(f"processed.{centre}.data", "\n".join(map(",".join, rows)) + "\n")
    return {"heart_disease.zip": stream.getvalue()}


TWEETS = [(("4", "0")[k % 2], user, f"@somebody caf\xe9 {k}, fine") for user in ("zoe", "ann") for k in range(100)]


def tweets() -> dict[str, bytes]:
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    few = [("4", "rare", "hello"), ("2", "ann", "neither")]
    writer.writerows((label, "1", "a date", "NO_QUERY", user, words) for label, user, words in (*TWEETS, *few))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("testdata.manual.2009.06.14.csv", '"4","3","a date","q","ann","by hand"\n')
        made.writestr("training.1600000.processed.noemoticon.csv", text.getvalue().encode("latin-1"))
    return {"trainingandtestdata.zip": stream.getvalue()}


def recording(samples: np.ndarray, rate: int = 16_000) -> bytes:
    stream = io.BytesIO()
    with wave.open(stream, "wb") as clip:
        clip.setnchannels(1)
        clip.setsampwidth(2)
        clip.setframerate(rate)
        clip.writeframes((samples * 32767).astype("<i2").tobytes())
    return stream.getvalue()


def recordings() -> dict[str, bytes]:
    tone = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000) / 2
    members = {f"./yes/{speaker}_nohash_{k}.wav": recording(tone[: 16_000 - 100 * k])
               for speaker in ("00aa11bb", "ff00ff00") for k in range(10)}  # fmt: skip
    members |= {"./_silence_/0.wav": recording(tone * 0), "./_unknown_/bed_00aa11bb_nohash_0.wav": recording(tone)}
    return {"speech_commands_test_set_v0.02.tar.gz": archive({"./LICENSE": b"text", **members})}


MADE: dict[str, Callable[[], dict[str, bytes]]] = {
    "mnist": grey, "fashion_mnist": lambda: grey("fashion-"), "cifar10": cifar10, "cifar100": cifar100,
    "femnist": femnist, "tinyshakespeare": plays, "mqp": questions, "heart": patients, "sent140": tweets,
    "speech_commands": recordings,
}  # fmt: skip


def load(name: str) -> Dataset:
    loader: Any = registry.find("dataset", name)
    found: Dataset = loader().load(Key.of(0))
    return found


def serve(site: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> dict[str, bytes]:
    """The originals of a set, on the site instead of at their sources."""
    files = MADE[name]()
    moved = [
        replace(one, url=f"{site.url}/{one.filename}", sha256=hashlib.sha256(files[one.filename]).hexdigest(), md5=None)
        for one in originals.ORIGINALS
        if one.dataset == name and one.filename in files
    ]
    assert {one.filename for one in moved} == {*files}, "these are not the files that the command asks for"
    monkeypatch.setattr(originals, "ORIGINALS", tuple(moved))
    return files


def failure(name: str) -> str:
    result = command(name)
    assert result.exit_code == 1
    return str(result.exception) + result.output


@pytest.mark.parametrize("name", sorted({one.dataset for one in originals.ORIGINALS}))
def test_every_set_ends_usable(name, site, folder, monkeypatch):
    files = serve(site, monkeypatch, name)
    largest = max(files, key=lambda one: len(files[one]))
    with pytest.raises(DataError, match=r"fedalloy data fetch [a-z0-9-]+"):
        load(name)

    assert f"fedalloy data fetch {name} --from FILE" in failure(name), "offline"
    site.files |= files | {largest: files[largest][:-1] + b"?"}
    assert "expected sha256" in failure(name), "damaged"
    assert not [path for path in folder.iterdir() if path.name != "originals"], "a damaged file is never converted"

    site.files |= files
    site.breaks[largest] = len(files[largest]) // 2
    assert "the same command continues the download" in failure(name), "interrupted"
    result = command(name)
    assert result.exit_code == 0, result.output
    assert (largest, f"bytes={len(files[largest]) // 2}-") in site.asked
    assert len(load(name)) > 0
    assert {locate.check(file).verdict for file in registry.find("dataset", name).files} == {"ok"}  # type: ignore[attr-defined]
    asked = len(site.asked)
    assert command(name).exit_code == 0
    assert len(site.asked) == asked, "what is there is not fetched again"


def test_the_real_patients_become_the_files_that_are_known(tmp_path):
    real = data_folder() / "heart_disease.csv"
    if not real.is_file():
        pytest.skip("the real table of patients is not here")
    tables: dict[str, list[str]] = {centre: [] for centre in CENTRES}
    for centre, *cells in list(csv.reader(real.read_text(encoding="utf-8").splitlines()))[1:]:
        tables[centre].append(",".join(cell or "?" for cell in cells))
    given = []
    for centre, lines in tables.items():
        given.append(tmp_path / f"processed.{centre}.data")
        given[-1].write_text("\r\n".join(lines) + "\r\n")
    done = prepare(FetchRequest("heart", given=tuple(given)), tmp_path / "data")
    assert {path.name: locate.checksum(path) for path in done.files} == Heart.files
    assert not any("results can differ" in note for note in done.notes)


def test_tweets_have_users_by_number_and_no_names(tmp_path, folder):
    path = tmp_path / "trainingandtestdata.zip"
    path.write_bytes(tweets()["trainingandtestdata.zip"])
    result = command("sent140", "--from", str(path))
    assert result.exit_code == 0, result.output
    assert "every tenth tweet" in result.output
    some, whole = Sent140().load(Key.of(0)), Sent140(whole=True).load(Key.of(0))
    assert (len(some), len(whole)) == (20, 200), "the tweets of rare users and neutral ones are left out"
    assert whole.owner is not None
    assert whole.owner.tolist() == [0] * 100 + [1] * 100
    assert whole.y.tolist() == [1, 0] * 100
    assert whole.x[0].tolist() == tokens("@user caf\xe9 0, fine", 25, 4096)
    text = gzip.decompress((folder / TEST).read_bytes()).decode("utf-8")
    assert not [word for word in ("zoe", "ann,", "somebody", "date") if word in text]
    assert "caf\xe9" in text


def test_leafs_tweets_are_taken_with_their_own_split(tmp_path, folder):
    given = []
    for part, count in (("train", 12), ("test", 11)):
        mine = {"x": [["1", "a date", "q", "bob", f"{part} {k}"] for k in range(count)], "y": [0] * count}
        given.append(tmp_path / f"all_data_niid_0_keep_30_{part}_9.json")
        given[-1].write_text(json.dumps({"users": ["bob"], "user_data": {"bob": mine}}))
    prepare(FetchRequest("sent140", given=tuple(given)), folder)
    assert (len(Sent140().load(Key.of(0))), len(Sent140(whole=True).load(Key.of(0)))) == (11, 23)


def test_recordings_become_energies_of_their_speakers(tmp_path, folder):
    path = tmp_path / "test.tar.gz"
    path.write_bytes(next(iter(recordings().values())))
    prepare(FetchRequest("speech", given=(path,)), folder)
    data = SpeechCommands(scale="log").load(Key.of(0))
    assert data.names == ("00aa11bb", "ff00ff00")
    assert data.owner is not None
    assert data.owner.tolist() == [-1, 0, *[0] * 10, *[1] * 10]
    assert data.y.tolist() == [0, 1, *[2] * 20]
    assert data.x.shape == (22, 1, 49, 40)
    assert torch.allclose(data.x[0], torch.tensor(np.log(1e-6), dtype=torch.float32), atol=0.05), "silence"
    middle = int(mel_bands()[:, round(440 / 31.25)].argmax())
    assert int(data.x[1, 0, 10].argmax()) == middle, "a tone is in the band of its frequency"


def test_energies_are_those_of_the_file_with_which_recipes_were_checked():
    """White noise has known energies; the clips of silence that are white noise have the same, band by band."""
    if not (data_folder() / "speech_commands_v2_test_logmel.npz").is_file():
        pytest.skip("the real recordings are not here")
    stored = np.load(data_folder() / "speech_commands_v2_test_logmel.npz")
    silence = stored["x"][stored["y"] == 0] / 255 * 24 - 14
    noise = np.random.default_rng(0).normal(size=(60, 16_000)) * 0.02
    mean = np.mean([energies(one) for one in noise], axis=(0, 1))
    shape = silence.mean(1) - silence.mean((1, 2))[:, None]
    away = np.std(shape - (mean - mean.mean()), axis=1)
    whitest = shape[np.argsort(away)[:50]].mean(0)
    assert np.std(whitest - (mean - mean.mean())) < 0.03
    assert quantised(np.array([-14.0, 10.0, 99.0])).tolist() == [0, 255, 255]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("heart", b"1,2\n", "is neither a tar nor a zip archive"),
        ("heart", archive({"processed.va.data": b"1,2\n"}), r"processed\.cleveland\.data.* is missing"),
        ("sent140", b'"4","1"\n', "a tweet has polarity, id, date, query, user, text"),
        ("speech", archive({"bed/00aa11bb_nohash_0.wav": b""}), "not the canonical test set"),
        ("speech", archive({"yes/00aa11bb_nohash_0.wav": recording(np.zeros(9), 8000)}), "8000 Hz"),
        ("mqp", b"1,a,b\n", "four values"),
    ],
)
def test_what_is_no_original_is_refused(name, content, words, tmp_path):
    path = tmp_path / "given.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words):
        prepare(FetchRequest(name, given=(path,)), tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_every_set_that_is_listed_can_be_converted():
    assert {one.dataset for one in originals.ORIGINALS} == {*CONVERTERS} == {*MADE}
    assert all(name in CONVERTERS for name in originals.ALIASES.values())


class TestLimits:
    """Small files that unpack to much."""

    def bombs(self) -> dict[str, tuple[str, bytes]]:
        zeros = bytes(3 << 20)
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as made:
            made.writestr("training.csv", zeros)
            made.writestr("processed.va.data", zeros)
        return {
            "gz": ("mnist", gzip.compress(zeros)), "tar": ("cifar100", archive({"unused": zeros})),
            "zip": ("sent140", packed.getvalue()), "zip in memory": ("heart", packed.getvalue()),
        }  # fmt: skip

    @pytest.mark.parametrize("kind", ["gz", "tar", "zip", "zip in memory"])
    def test_a_file_that_unpacks_to_too_much_is_refused(self, kind, tmp_path, folder):
        name, content = self.bombs()[kind]
        path = tmp_path / {"gz": "train-images.gz", "tar": "a.tar.gz"}.get(kind, "a.zip")
        path.write_bytes(content)
        given = [path] if kind != "gz" else [path, Path(path.with_name("train-labels.gz"))]
        given[-1].write_bytes(content)
        with pytest.raises(DataError, match=r"unpacks to more than 1 MB.*--max-unpacked-mb"):
            prepare(FetchRequest(name, given=tuple(given), most_mb=1), folder)
        result = command(name, *(f"--from={one}" for one in given), "--max-unpacked-mb=100")
        assert "unpacks to more" not in str(result.exception) + result.output, "the limit was raised"

    def test_a_table_of_the_hub_that_declares_too_much_is_refused(self, tmp_path, folder):
        path = tmp_path / "femnist-train.parquet"
        path.write_bytes(femnist()["femnist-train.parquet"])
        with pytest.raises(DataError, match=r"unpacks to more than 0\.001 MB"):
            prepare(FetchRequest("femnist", given=(path,), most_mb=0.001), folder)

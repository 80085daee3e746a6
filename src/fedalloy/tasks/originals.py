"""Public originals of data sets: their addresses and checksums, and how they are downloaded.

A partial download is continued; a file with the wrong checksum never gets its final name.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fedalloy.core.errors import DataError, nearest
from fedalloy.tasks import locate

_BLOCK = 1 << 18
_TIMEOUT = 60.0
_MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist"
_RAW = "https://raw.githubusercontent.com"


@dataclass(frozen=True)
class Original:
    """One public file; ``sha256`` is None if no checksum is published: then the user must give one."""

    dataset: str
    url: str
    sha256: str | None
    filename: str


ORIGINALS = (
    Original("mqp", f"{_RAW}/curai/medical-question-pair-dataset/master/mqp.csv",
             "94ecd609a9ca9350e1cff2438aa55a034762f01c1a68732aaae3e4be7b03cf57", "mqp.csv"),
    Original("mnist", f"{_MNIST}/train-images-idx3-ubyte.gz",
             "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", "train-images-idx3-ubyte.gz"),
    Original("mnist", f"{_MNIST}/train-labels-idx1-ubyte.gz",
             "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", "train-labels-idx1-ubyte.gz"),
    Original("mnist", f"{_MNIST}/t10k-images-idx3-ubyte.gz",
             "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", "t10k-images-idx3-ubyte.gz"),
    Original("mnist", f"{_MNIST}/t10k-labels-idx1-ubyte.gz",
             "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", "t10k-labels-idx1-ubyte.gz"),
    Original("cifar10", "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
             "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce", "cifar-10-python.tar.gz"),
    Original("tinyshakespeare", f"{_RAW}/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
             "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed", "tinyshakespeare.txt"),
    Original("sent140", "https://cs.stanford.edu/people/alecmgo/trainingandtestdata.zip",
             "004a3772c8a7ff9bbfeb875880f47f0679d93fc63e5cf9cff72d54a8a6162e57", "trainingandtestdata.zip"),
    Original("heart", "https://archive.ics.uci.edu/static/public/45/heart+disease.zip", None, "heart_disease.zip"),
    Original("speech_commands", "https://storage.googleapis.com/download.tensorflow.org/data/"
             "speech_commands_test_set_v0.02.tar.gz", None, "speech_commands_test_set_v0.02.tar.gz"),
)  # fmt: skip
"""Every original that can be fetched. Checksums are those under which the files are known in public."""


def originals_of(dataset: str) -> list[Original]:
    """The files of a data set; an error names those that have some."""
    found = [one for one in ORIGINALS if one.dataset == dataset]
    if not found:
        known = {one.dataset for one in ORIGINALS}
        raise DataError(f"no public original of '{dataset}' is known: {nearest(dataset, known)}")
    return found


def fetch(original: Original, folder: Path, told: Callable[[int, int | None], None] = lambda done, size: None) -> Path:
    """Bring one file into a folder and return its path; one that is there already is checked and kept."""
    if original.sha256 is None:
        raise DataError(
            f"{original.filename}: no checksum is published for {original.url}; give the one you trust with --sha256"
        )
    path = folder / original.filename
    if path.exists():
        _check(path, original, "is there already, but differs: move it away, or name another folder")
        return path
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    _download(original.url, part, told)
    try:
        _check(part, original, "was fetched, but differs: it has changed at its source, or on its way")
    except DataError:
        part.unlink()  # continuing a wrong file could never succeed
        raise
    part.replace(path)
    return path


def folder_for_data() -> Path:
    """Where fetched files go: the first folder that is searched (FEDALLOY_DATA, or the user cache)."""
    return locate.folders()[0]


def _check(path: Path, original: Original, trouble: str) -> None:
    found = locate.checksum(path)
    if found != original.sha256:
        raise DataError(f"{original.filename} {trouble} (expected sha256 {original.sha256}, found {found})")


def _download(url: str, part: Path, told: Callable[[int, int | None], None]) -> None:
    """Fetch what is missing of a file; a server that cannot continue sends it from the beginning."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise DataError(f"{url} is no address of the web; http and https are fetched")
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "fedalloy", **_range(done)})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            done = done if answer.status == 206 else 0
            _store(answer, part, done, told)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and done:  # nothing is missing: the checksum tells whether it is right
            return
        raise DataError(f"{url} cannot be fetched: {error.code} {error.reason}") from None
    except OSError as error:
        raise DataError(f"{url} cannot be fetched: {error}; the same command continues the download") from None


def _store(answer: Any, part: Path, done: int, told: Callable[[int, int | None], None]) -> None:
    length = answer.headers.get("Content-Length")
    size = done + int(length) if length else None
    with part.open("r+b" if done else "wb") as file:
        file.seek(done)
        while block := answer.read(_BLOCK):
            file.write(block)
            done += len(block)
            told(done, size)
    if size is not None and done < size:
        raise ConnectionError(f"it ended after {done} of {size} bytes")


def _range(done: int) -> dict[str, str]:
    return {"Range": f"bytes={done}-"} if done else {}

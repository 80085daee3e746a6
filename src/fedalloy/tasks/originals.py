"""Public originals of data sets: their addresses and checksums, and how they are downloaded.

A partial download is continued if the server still has the same version: its ETag or date, and its size, are kept
beside the part. A file with the wrong checksum never gets its final name. Where no checksum is published, that of the
first download is recorded in ``fetched.json``, and later downloads are compared with it.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
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
_FASHION = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
_TORONTO = "https://www.cs.toronto.edu/~kriz"
_RAW = "https://raw.githubusercontent.com"
_HUB = "https://huggingface.co/datasets"
_PARQUET = "resolve/refs%2Fconvert%2Fparquet"
ALIASES = {
    "shakespeare": "tinyshakespeare", "fashion-mnist": "fashion_mnist", "fashionmnist": "fashion_mnist",
    "speech": "speech_commands", "speech-commands": "speech_commands", "sentiment140": "sent140",
}  # fmt: skip
"""Other names of data sets, for ``fedalloy data fetch``."""
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Original:
    """One public file with the checksums that are published for it (None: those of the first download are recorded).
    Files of one ``source`` belong together; another source is an alternative."""

    dataset: str
    url: str
    sha256: str | None
    filename: str
    md5: str | None = None
    source: str = "official"


def _hub(dataset: str, repository: str, config: str, *splits: str) -> tuple[Original, ...]:
    """The files of a data set on the Hugging Face hub, as the hub's own conversion to parquet names them."""
    return tuple(
        Original(dataset, f"{_HUB}/{repository}/{_PARQUET}/{config}/{split}/0000.parquet", None,
                 f"{dataset}-{split}.parquet", source="hub")
        for split in splits
    )  # fmt: skip


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
    *_hub("mnist", "ylecun/mnist", "mnist", "train", "test"),
    Original("fashion_mnist", f"{_FASHION}/train-images-idx3-ubyte.gz", None,
             "fashion-train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    Original("fashion_mnist", f"{_FASHION}/train-labels-idx1-ubyte.gz", None,
             "fashion-train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
    Original("fashion_mnist", f"{_FASHION}/t10k-images-idx3-ubyte.gz", None,
             "fashion-t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
    Original("fashion_mnist", f"{_FASHION}/t10k-labels-idx1-ubyte.gz", None,
             "fashion-t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
    *_hub("fashion_mnist", "zalando-datasets/fashion_mnist", "fashion_mnist", "train", "test"),
    Original("cifar10", f"{_TORONTO}/cifar-10-python.tar.gz",
             "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce", "cifar-10-python.tar.gz"),
    *_hub("cifar10", "uoft-cs/cifar10", "plain_text", "train", "test"),
    Original("cifar100", f"{_TORONTO}/cifar-100-python.tar.gz", None, "cifar-100-python.tar.gz",
             "eb9058c3a382ffc7106e4002c42a8d85"),
    *_hub("cifar100", "uoft-cs/cifar100", "cifar100", "train", "test"),
    *_hub("femnist", "flwrlabs/femnist", "default", "train"),
    Original("tinyshakespeare", f"{_RAW}/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
             "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed", "tinyshakespeare.txt"),
    Original("sent140", "https://cs.stanford.edu/people/alecmgo/trainingandtestdata.zip",
             "004a3772c8a7ff9bbfeb875880f47f0679d93fc63e5cf9cff72d54a8a6162e57", "trainingandtestdata.zip"),
    *_hub("sent140", "stanfordnlp/sentiment140", "sentiment140", "train"),
    Original("heart", "https://archive.ics.uci.edu/static/public/45/heart+disease.zip", None, "heart_disease.zip"),
    Original("speech_commands", "https://storage.googleapis.com/download.tensorflow.org/data/"
             "speech_commands_test_set_v0.02.tar.gz", None, "speech_commands_test_set_v0.02.tar.gz"),
)  # fmt: skip
"""Every original that can be fetched. Checksums are those under which the files are known in public."""


def originals_of(dataset: str) -> list[Original]:
    """The files of a data set, from all sources; an error names those that have some."""
    found = [one for one in ORIGINALS if one.dataset == ALIASES.get(dataset, dataset)]
    if not found:
        known = {one.dataset for one in ORIGINALS} | set(ALIASES)
        raise DataError(f"no public original of '{dataset}' is known: {nearest(dataset, known)}")
    return found


def fetch(original: Original, folder: Path, told: Progress = lambda done, size: None) -> Path:
    """Bring one file into a folder and return its path; one that is there already is checked and kept."""
    path = folder / original.filename
    if path.exists():
        _check(path, original, folder, "is there already, but differs: move it away, or name another folder")
        return path
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    _download(original, part, told)
    try:
        found = _check(part, original, folder, "was fetched, but differs: it has changed at its source, or on its way")
    except DataError:
        part.unlink()  # continuing a wrong file could never succeed
        raise
    finally:
        _version_file(part).unlink(missing_ok=True)
    locate.record(folder, original.filename, {"sha256": found, "url": original.url})
    part.replace(path)
    return path


def folder_for_data() -> Path:
    """Where fetched files go: the first folder that is searched (FEDALLOY_DATA, or the user cache)."""
    return locate.folders()[0]


def _check(path: Path, original: Original, folder: Path, trouble: str) -> str:
    """The checksum of a file, if it is the published one; where none is, that of the first download."""
    found = locate.checksum(path)
    first = locate.recorded(folder).get(original.filename, {}).get("sha256")
    wanted = original.sha256 or (None if original.md5 else first)
    if wanted is not None and found != wanted:
        whose = "" if original.sha256 else f", recorded at the first download in {locate.RECORD}"
        raise DataError(f"{original.filename} {trouble} (expected sha256 {wanted}{whose}, found {found})")
    if original.md5 is not None and original.sha256 is None:
        with path.open("rb") as stream:
            md5 = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if md5 != original.md5:
            raise DataError(f"{original.filename} {trouble} (expected md5 {original.md5}, found {md5})")
    return found


def _download(original: Original, part: Path, told: Progress) -> None:
    """Fetch what is missing of a file, or all of it where the server has another version than the one begun."""
    url = original.url
    if urlsplit(url).scheme not in ("http", "https"):
        raise DataError(f"{url} is no address of the web; http and https are fetched")
    done = _usable(original, part)
    try:
        if not (done and _fetched(url, part, done, told)) and not _fetched(url, part, 0, told):
            raise ConnectionError("it sends a piece of the file that was not asked for")
    except urllib.error.HTTPError as error:
        error.close()
        raise DataError(f"{url} cannot be fetched: {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"{url} cannot be fetched: {error}; the same command continues the download") from None


def _usable(original: Original, part: Path) -> int:
    """How many bytes can be kept: none, if neither server nor checksum could tell that they are of an old version."""
    checked = original.sha256 is not None or original.md5 is not None
    return part.stat().st_size if part.exists() and (checked or _version(part).get("If-Range")) else 0


def _fetched(url: str, part: Path, done: int, told: Progress) -> bool:
    """Fetch a file from byte ``done`` on; False if what the server has does not continue what is here."""
    version = _version(part) if done else {}
    headers = {"User-Agent": "fedalloy"} | ({"Range": f"bytes={done}-"} if done else {})
    headers |= {"If-Range": version["If-Range"]} if version.get("If-Range") else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT) as answer:
            if answer.status == 206 and not _continues(answer.headers, done, version):
                return False
            _store(answer, part, done if answer.status == 206 else 0, told)
            return True
    except urllib.error.HTTPError as error:
        if error.code != 416 or not done:
            raise
        with error:  # nothing is missing, if the server's file is as long as this one
            return _range_of(error.headers) == (None, done)


def _continues(headers: Any, done: int, version: dict[str, Any]) -> bool:
    """Whether an answer begins where the bytes here end, and is of the same version."""
    begin, size = _range_of(headers)
    same_size = None in (size, version.get("size")) or size == version["size"]
    same = None in (_validator(headers), version.get("If-Range")) or _validator(headers) == version["If-Range"]
    return begin == done and same_size and same


def _range_of(headers: Any) -> tuple[int | None, int | None]:
    """Where an answer begins and how long the whole file is, by its ``Content-Range``; None where it does not say."""
    found = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", headers.get("Content-Range", "").strip())
    if found is None:
        return None, None
    begin, size = found.groups()
    return (None if begin is None else int(begin)), (None if size == "*" else int(size))


def _validator(headers: Any) -> str | None:
    """What a server calls this version of the file; a weak ETag does not tell versions apart byte by byte."""
    etag: str | None = headers.get("ETag")
    date: str | None = headers.get("Last-Modified")
    return etag if etag and not etag.startswith("W/") else date


def _store(answer: Any, part: Path, done: int, told: Progress) -> None:
    length = answer.headers.get("Content-Length")
    size = _range_of(answer.headers)[1] or (done + int(length) if length else None)
    with part.open("r+b" if done else "wb") as file:
        if not done:  # after the old bytes are gone, before the first new one
            version = {"If-Range": _validator(answer.headers), "size": size}
            _version_file(part).write_text(json.dumps(version), encoding="utf-8")
        file.seek(done)
        while block := answer.read(_BLOCK):
            file.write(block)
            done += len(block)
            told(done, size)
    if size is not None and done < size:
        raise ConnectionError(f"it ended after {done} of {size} bytes")


def _version(part: Path) -> dict[str, Any]:
    """What the server said about the version of which a part is."""
    try:
        return dict(json.loads(_version_file(part).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _version_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.version")

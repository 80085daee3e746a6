"""A server on loopback, and originals made for it in their real formats."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import numpy as np
from typer.testing import CliRunner

from fedalloy.tasks import originals
from fedalloy.tasks.originals import Original

RNG = np.random.default_rng(0)


class Site(ThreadingHTTPServer):
    """Files by path; can break off, and answers ranges."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, bytes] = {}
        self.breaks: dict[str, int] = {}
        self.asked: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        name, asked = self.path.strip("/"), self.headers.get("Range")
        self.server.asked.append((name, asked))
        if name not in self.server.files:
            self.send_error(404)
            return
        begin = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        body = self.server.files[name][begin:]
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.breaks.pop(name, len(body))])

    def log_message(self, format: str, *args: object) -> None:
        pass


def idx(values: np.ndarray) -> bytes:
    header = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    return gzip.compress(header + values.astype(np.uint8).tobytes(), mtime=0)


def digits(site: Site, prefix: str = "") -> dict[str, np.ndarray]:
    """Four IDX files of a small set in the form of MNIST."""
    made: dict[str, Any] = {}
    for part, count in (("train", 50), ("t10k", 20)):
        made[f"{part}-images"] = RNG.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        made[f"{part}-labels"] = np.arange(count) % 10
        for kind in ("images-idx3", "labels-idx1"):
            site.files[f"{prefix}{part}-{kind}-ubyte.gz"] = idx(made[f"{part}-{kind.partition('-')[0]}"])
    return made


def at(site: Site, monkeypatch, dataset: str, known: bool = True) -> None:
    """Let the official files of a data set be those of the site, with their checksums."""
    moved = []
    for one in originals.ORIGINALS:
        name = one.url.rpartition("/")[2]
        if one.dataset == dataset and one.source == "official" and name in site.files:
            sha = hashlib.sha256(site.files[name]).hexdigest() if known else None
            moved.append(Original(dataset, f"{site.url}/{name}", sha, one.filename))
    monkeypatch.setattr(originals, "ORIGINALS", tuple(moved))


def command(*arguments: str) -> Any:
    from fedalloy.cli.app import app

    return CliRunner().invoke(app, ["data", "fetch", *arguments])


PLAIN: Any = pickle._Pickler


class Python2Pickler(PLAIN):  # type: ignore[misc]
    """Writes text and bytes as Python 2 did: one kind of string, without names of functions."""

    dispatch: ClassVar[dict[type, Any]] = dict(PLAIN.dispatch)

    def save_string(self, value: Any) -> None:
        content = value.encode("latin-1") if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_string


def batch(count: int, labels: dict[str, Any]) -> bytes:
    """A batch as it is in the archives: protocol 2 of Python 2, an array of bytes, lists of labels."""
    data, stream = RNG.integers(0, 256, (count, 3072), dtype=np.uint8), io.BytesIO()
    Python2Pickler(stream, 2).dump({"data": data, "filenames": ["a.png"] * count, "batch_label": "x", **labels})
    return stream.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def archive(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()

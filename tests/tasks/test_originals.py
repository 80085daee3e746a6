"""Fetching from a server on loopback: whole, continued, refused, damaged."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedalloy.core import registry
from fedalloy.core.errors import DataError
from fedalloy.tasks import locate, originals
from fedalloy.tasks.originals import ORIGINALS, Original, fetch, originals_of

CONTENT = bytes(range(256)) * 4000
SHA = hashlib.sha256(CONTENT).hexdigest()


class Source(ThreadingHTTPServer):
    """Serves one file; can be told to break off, to forget ranges, or to send something else."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Sending)
        self.content, self.ranges, self.breaks_at, self.status = CONTENT, True, -1, 200
        self.etag: str | None = None
        self.shift, self.heeds_etag = 0, True
        self.asked: list[str | None] = []

    @property
    def original(self) -> Original:
        return Original("test", f"http://127.0.0.1:{self.server_address[1]}/file", SHA, "file.bin")


class Sending(BaseHTTPRequestHandler):
    server: Source

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        mine, given = self.server, self.headers.get("If-Range")
        ranges = mine.ranges and not (mine.heeds_etag and given and given != mine.etag)
        begin = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and ranges else 0
        size = len(mine.content)
        if mine.status != 200:
            self.send_error(mine.status)
            return
        body = mine.content[begin:]
        self.send_response(416 if begin >= size else 206 if begin else 200)
        if begin:
            span = f"{begin + mine.shift}-{size - 1}" if body else "*"
            self.send_header("Content-Range", f"bytes {span}/{size}")
        if mine.etag:
            self.send_header("ETag", mine.etag)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.breaks_at] if self.server.breaks_at >= 0 else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def source() -> Iterator[Source]:
    with Source() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_file_is_fetched_once_and_checked(source, tmp_path):
    told: list[tuple[int, int | None]] = []
    path = fetch(source.original, tmp_path / "new", lambda done, size: told.append((done, size)))
    assert path.read_bytes() == CONTENT
    assert told[-1] == (len(CONTENT), len(CONTENT))
    fetch(source.original, tmp_path / "new")
    assert source.asked == [None], "what is there is not asked for again"


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_goes_on(source, tmp_path, ranges):
    source.breaks_at = 300_000
    with pytest.raises(DataError, match="the same command continues the download"):
        fetch(source.original, tmp_path)
    assert (tmp_path / "file.bin.part").stat().st_size == 300_000
    assert not (tmp_path / "file.bin").exists()
    source.breaks_at, source.ranges = -1, ranges
    assert fetch(source.original, tmp_path).read_bytes() == CONTENT
    assert source.asked == [None, "bytes=300000-"]
    assert not (tmp_path / "file.bin.part").exists()


NEW = bytes(reversed(CONTENT)) + b"more"


def _begun(source: Source, folder: Path, etag: str | None) -> Original:
    """A download of a file without a published checksum that breaks off."""
    source.breaks_at, source.etag = 300_000, etag
    unknown = Original("x", source.original.url, None, "x.bin")
    with pytest.raises(DataError, match="the same command continues the download"):
        fetch(unknown, folder)
    source.breaks_at = -1
    return unknown


@pytest.mark.parametrize("heeds", [True, False])
@pytest.mark.parametrize("new", [NEW, NEW[: len(CONTENT)], NEW[:1000]])
def test_two_versions_of_a_file_are_never_mixed(source, tmp_path, heeds, new):
    unknown = _begun(source, tmp_path, '"old"')
    source.content, source.etag, source.heeds_etag = new, '"new"', heeds
    assert fetch(unknown, tmp_path).read_bytes() == new
    assert source.asked[:2] == [None, "bytes=300000-"]
    assert {path.name for path in tmp_path.iterdir()} == {"x.bin", "fetched.json"}


def test_the_same_version_is_continued_and_one_without_a_name_is_not(source, tmp_path):
    assert fetch(_begun(source, tmp_path / "a", '"one"'), tmp_path / "a").read_bytes() == CONTENT
    assert source.asked == [None, "bytes=300000-"]
    for nameless in (None, 'W/"weak"'):
        source.asked.clear()
        fetch(_begun(source, tmp_path / str(nameless)[:1], nameless), tmp_path / str(nameless)[:1])
        assert source.asked == [None, None]


def test_an_answer_that_begins_elsewhere_is_not_appended(source, tmp_path):
    unknown = _begun(source, tmp_path, '"one"')
    source.shift = -1
    assert fetch(unknown, tmp_path).read_bytes() == CONTENT
    assert source.asked == [None, "bytes=300000-", None]


def test_a_part_that_is_longer_than_the_file_is_fetched_anew(source, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT + b"x")
    assert fetch(source.original, tmp_path).read_bytes() == CONTENT


def test_a_part_that_is_complete_only_needs_its_checksum(source, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    assert fetch(source.original, tmp_path).read_bytes() == CONTENT
    assert source.asked == [f"bytes={len(CONTENT)}-"]


def test_something_else_never_gets_the_name(source, tmp_path):
    source.content = CONTENT[:-1] + b"x"
    with pytest.raises(DataError, match=f"expected sha256 {SHA}, found"):
        fetch(source.original, tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match="is there already, but differs"):
        fetch(source.original, tmp_path)
    assert (tmp_path / "file.bin").read_bytes() == b"mine"


def test_faults_of_the_source_are_told(source, tmp_path):
    source.status = 404
    with pytest.raises(DataError, match="cannot be fetched: 404"):
        fetch(source.original, tmp_path)
    with pytest.raises(DataError, match="no address of the web"):
        fetch(Original("x", "file:///etc/passwd", SHA, "x"), tmp_path)
    with pytest.raises(DataError, match="cannot be fetched"):
        fetch(Original("x", "http://127.0.0.1:9/x", SHA, "x"), tmp_path)


def test_without_a_published_checksum_the_first_download_is_recorded_and_later_ones_compared(source, tmp_path):
    unknown = Original("x", source.original.url, None, "x.bin")
    fetch(unknown, tmp_path).unlink()
    assert locate.recorded(tmp_path)["x.bin"]["sha256"] == SHA
    fetch(unknown, tmp_path).unlink()
    source.content = CONTENT[:-1] + b"x"
    with pytest.raises(
        DataError, match=f"expected sha256 {SHA}, recorded at the first download in fetched.json, found"
    ):
        fetch(unknown, tmp_path)
    assert not (tmp_path / "x.bin").exists()
    assert locate.recorded(tmp_path)["x.bin"]["sha256"] == SHA


def test_a_published_md5_is_compared_where_no_other_is_known(source, tmp_path):
    md5 = hashlib.md5(CONTENT).hexdigest()
    assert fetch(Original("x", source.original.url, None, "x.bin", md5), tmp_path).exists()
    with pytest.raises(DataError, match="expected md5 0000"):
        fetch(Original("x", source.original.url, None, "y.bin", "0" * 32), tmp_path)
    assert not (tmp_path / "y.bin").exists()


def test_the_table_names_known_datasets_and_whole_checksums():
    for one in ORIGINALS:
        assert one.dataset in registry.everything("dataset")
        assert one.url.startswith("https://")
        assert one.sha256 is None or (len(one.sha256) == 64 and int(one.sha256, 16))
        assert "/" not in one.filename
    with pytest.raises(DataError, match="did you mean 'mnist'"):
        originals_of("mnits")


def test_the_command_takes_the_checksum_that_the_user_trusts(source, tmp_path, monkeypatch):
    from fedalloy.cli.app import app

    source.content = b"1,does it hurt,is it bad,0\n" * 9
    monkeypatch.setattr(originals, "ORIGINALS", (Original("mqp", source.original.url, None, "original.csv"),))
    monkeypatch.setenv("FEDALLOY_DATA", str(tmp_path / "data"))
    refused = CliRunner().invoke(app, ["data", "fetch", "mqp", "--sha256", "0" * 64])
    assert refused.exit_code == 1
    assert not (tmp_path / "data" / "mqp.csv").exists()
    trusted = hashlib.sha256(source.content).hexdigest()
    done = CliRunner().invoke(app, ["data", "fetch", "mqp", "--sha256", trusted])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "data" / "mqp.csv").read_bytes() == source.content
    assert "mqp.csv: there" in done.output
    assert "is not the file with which fedalloy's recipes were checked" in done.output

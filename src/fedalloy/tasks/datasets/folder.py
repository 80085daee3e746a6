"""Your own data: a folder with one file or folder per client.

``client.npz`` holds arrays ``x`` and ``y``; ``client.csv`` and ``client.parquet`` are tables with a column ``y`` or
``label``, or columns by role in ``schema.toml``. A client's folder holds such a file, ``x.npy`` and ``y.npy``, or one
folder of images per class; or several of these called ``train``, ``valid`` and ``test``. Columns are matched by name,
in the order of the first file. Clients are numbered in the order of their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.core.types import Examples
from fedalloy.tasks.datasets.base import Dataset, DatasetLoader, check_count
from fedalloy.tasks.lazy import IN_MEMORY_MB, LazyClients
from fedalloy.tasks.sources import files
from fedalloy.tasks.sources.client_data import PARTS, ClientParts, Pair, examples_of, pooled, read_client
from fedalloy.tasks.sources.columns import Columns, encode
from fedalloy.tasks.sources.files import ClientFiles
from fedalloy.tasks.sources.tables import TableReader, join_tables, rows_of, without_empty

_MEGABYTE = 1 << 20


@register("dataset", "folder")
@dataclass(frozen=True)
class Folder(DatasetLoader):
    """One ``.npz``, ``.csv`` or ``.parquet`` file, or one folder, per client, in the folder ``path``.

    ``columns`` are the roles of the columns of tables (default: those in ``schema.toml``); ``classes`` the number of
    classes where data are ``lazy``, that is read when they are needed (default: if they are more than 512 MB).
    """

    path: str
    columns: Columns | None = None
    classes: int | None = None
    lazy: bool | None = None

    summary: ClassVar[str] = "your own data: one .npz, .csv or .parquet file or folder (.npy, images) per client"
    hint: ClassVar[str] = "put one file per client into the folder"

    def __post_init__(self) -> None:
        check_count("folder", "classes", self.classes)

    def load(self, key: Key) -> Dataset:
        """The files as natural clients, in memory; nothing is drawn."""
        return self._whole().in_memory()

    def open(self, key: Key) -> Dataset | LazyClients:
        """The files as natural clients; read on demand if they are large or ``lazy`` says so."""
        whole = self._whole()
        if self.lazy or (self.lazy is None and whole.total_bytes() > IN_MEMORY_MB * _MEGABYTE):
            return whole.lazily()
        return whole.in_memory()

    def _whole(self) -> FolderSource:
        folder = Path(self.path).expanduser()
        columns = self.columns or files.read_schema(folder)
        made = FolderSource(folder, tuple(files.list_clients(folder)), columns, self.classes)
        made.check_columns()
        return made


@dataclass(frozen=True)
class FolderSource:
    """The clients of a folder, and the roles of their columns."""

    folder: Path
    clients: tuple[ClientFiles, ...]
    columns: Columns | None
    classes: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the clients."""
        return tuple(client.name for client in self.clients)

    def check_columns(self) -> None:
        """Refuse roles of columns that nothing would use: arrays and images have no columns."""
        parts = [path for client in self.clients for path in client.parts.values()]
        if self.columns is None or all(files.is_table(path) for path in parts):
            return
        tables, images = (any(map(is_one, parts)) for is_one in (files.is_table, files.is_images))
        idle = self.columns if tables else replace(self.columns, classes=() if images else self.columns.classes)
        if idle != Columns() and not tables:
            raise SpecError(
                f"{self.folder}: columns (or {files.SCHEMA}) say what columns mean, and these files have none; of "
                "images only 'classes' can be given"
            )
        if self.columns.impute != "none":
            raise SpecError(f"{self.folder}: columns.missing fills tables, and some clients have arrays or images")

    def in_memory(self) -> Dataset:
        """All clients' examples."""
        made = self._in_memory()
        return replace(made, notices=(*made.notices, *files.unread(self.folder, self.clients)))

    def _in_memory(self) -> Dataset:
        if self._tables():
            return self._from_tables()
        classes = self._class_names()
        made = pooled([self._read(client, classes) for client in self.clients], self.names, self.classes)
        return replace(made, encoding={"label": tuple(classes)}) if classes else made

    def lazily(self) -> LazyClients:
        """The clients, to be read when they are needed."""
        classes = self._class_names()
        known = self.classes if self.classes is not None else len(classes) if classes else None
        first = next(iter(self.clients[0].parts.values()))
        encoded = TableReader.of(first, self.columns or Columns()) if self._tables() else None
        if encoded is not None:
            known = self.classes if self.classes is not None else encoded.classes
        if known is None:
            raise DataError(
                f"{self.folder} is read on demand, so the number of its classes must be given: classes = 10, or 0 for "
                "targets that are quantities"
            )

        def read(client: int) -> Mapping[str, Examples]:
            mine = self.clients[client]
            who = f"client '{mine.name}'"
            return (
                encoded.read(mine.parts) if encoded else examples_of(read_client(self._read(mine, classes), who), who)
            )

        return LazyClients(
            read, len(self.clients), known, self.names, {"files": self._listing()},
            "a file of another client whose size did not change",
            notices=(*(encoded.notices if encoded else ()), *files.unread(self.folder, self.clients)),
            impute=self.columns.impute if self.columns else "none",
            encoding=encoded.encoding if encoded else {"label": classes} if classes else None,
            parts=frozenset(part for one in self.clients for part in one.parts),
            columns=encoded.form if encoded else None,
        )  # fmt: skip

    def total_bytes(self) -> int:
        """About the memory that all examples need: the size of files, and of the pixels of images."""
        size = sum(stat for _, stat in self._listing())
        places = [path for client in self.clients for path in client.parts.values() if files.is_images(path)]
        first = next((file for place in places for _, file in files.image_files(place)), None)
        if first is None:
            return size
        count = sum(len(files.image_files(place)) for place in places)
        return size + count * 4 * int(files.read_picture(first).size)

    def _tables(self) -> bool:
        """Whether all clients have tables."""
        return all(files.is_table(path) for client in self.clients for path in client.parts.values())

    def _class_names(self) -> tuple[str, ...]:
        """The classes of folders of images, or those that the schema lists."""
        places = [path for client in self.clients for path in client.parts.values() if files.is_images(path)]
        given = tuple(map(str, self.columns.classes)) if self.columns else ()
        return (given or files.class_names(places)) if places else ()

    def _read(self, client: ClientFiles, classes: Sequence[str]) -> Any:
        parts: ClientParts = {part: self._read_part(path, classes) for part, path in client.parts.items()}
        return dict(zip("xy", parts[""], strict=True)) if "" in parts else parts

    def _read_part(self, path: Path, classes: Sequence[str]) -> Pair:
        if files.is_table(path):  # others have arrays: nothing but numbers can be meant
            made = encode(files.read_table(path), self.columns or Columns(), str(path))
            if made.encoding:
                raise DataError(f"{path} has categories, and other clients have arrays; give all clients in one form")
            return made.x, made.y
        return files.read_images(path, classes) if files.is_images(path) else files.read_arrays_of(path)

    def _from_tables(self) -> Dataset:
        """One table of all clients, so that categories have the same numbers everywhere."""
        pieces = [(k, part, path) for k, one in enumerate(self.clients) for part, path in one.parts.items()]
        columns = self.columns or Columns()
        tables = [files.read_table(path) for _, _, path in pieces]
        paths = [path for _, _, path in pieces]
        whole = join_tables(tables, columns, paths)
        sizes = torch.tensor([rows_of(table) for table in tables])
        owner = torch.repeat_interleave(torch.tensor([k for k, _, _ in pieces]), sizes)
        split = any(part for _, part, _ in pieces)
        numbers = torch.tensor([PARTS.index(part) if part else 0 for _, part, _ in pieces])
        part = torch.repeat_interleave(numbers, sizes) if split else None
        kept = replace(columns, ignore=())  # ignored columns were left behind when the tables were joined
        return without_empty(encode(whole, kept, str(paths[0]), owner, part, self.names))

    def _listing(self) -> list[tuple[str, int]]:
        """Names and sizes of all files, without reading them."""
        return [
            (str(file.relative_to(self.folder)), file.stat().st_size)
            for client in self.clients
            for path in client.parts.values()
            for file in ([path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file()))
        ]

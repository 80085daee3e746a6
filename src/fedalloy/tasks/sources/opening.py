"""Everything that holds examples, told apart by what it is and never by its size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedalloy.core import registry
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.own_code import own_code
from fedalloy.core.spec import from_spec
from fedalloy.core.types import Examples
from fedalloy.tasks.datasets.base import Dataset, DatasetLoader, as_pair, counted_classes
from fedalloy.tasks.datasets.callable import required_arguments
from fedalloy.tasks.lazy import IN_MEMORY_MB, LazyClients
from fedalloy.tasks.sources.client_data import examples_of, is_torch_dataset, pooled, read_client
from fedalloy.tasks.sources.client_frames import frame_with_test, frames_of, lazy_frames, pooled_frames
from fedalloy.tasks.sources.client_ids import named_ids, owners_of
from fedalloy.tasks.sources.collating import collated
from fedalloy.tasks.sources.columns import encode
from fedalloy.tasks.sources.frames import is_frame, library_of, table_of
from fedalloy.tasks.sources.hugging_face import from_flower, from_hub, refuse_stream
from fedalloy.tasks.sources.options import SourceOptions, check_dealt, refuse
from fedalloy.tasks.sources.rows import DatasetRows, LazyRows, spool
from fedalloy.tasks.sources.tables import without_empty

Opened = Dataset | LazyRows | LazyClients
_MEGABYTE = 1 << 20
SOURCES = (
    "the name of a data set, a folder, 'module:function', a function of a client's number, a list or mapping of "
    "clients' data, a pair of arrays (x, y), a torch Dataset, a frame of pandas or Polars, a dataset of Hugging "
    "Face or a FederatedDataset of Flower"
)


def open_source(source: Any, options: SourceOptions, key: Key) -> Opened:
    """The examples of any source: in memory, by row or by client."""
    check_dealt(options)
    if options.collate is not None:
        return collated(source, options.collate, options)
    loader = as_loader(source)
    if loader is not None:
        return _opened(loader, options, key)
    if isinstance(source, Dataset):
        return _with_ids(source, options)
    if is_frame(source):
        return _from_frame(source, options)
    if library_of(source) in ("datasets", "flwr_datasets"):
        return _settled(_from_hub(source, options), options)
    if is_torch_dataset(source):
        return _settled(_from_torch(source, options), options)
    if isinstance(source, type):
        return _from_class(source, options, key)
    if callable(source):
        return _from_callable(source, options, key)
    if isinstance(source, Mapping):
        return _from_mapping(source, options)
    if isinstance(source, tuple):
        return _from_tuple(source, options)
    if isinstance(source, Sequence) and not isinstance(source, str | bytes):
        return _from_clients(source, None, options)
    what = f"{options.called} returned" if options.called else "fedalloy.task got"
    advice = "; give its .dataset" if isinstance(source, torch.utils.data.DataLoader) else ""
    raise DataError(f"{what} {type(source).__name__}{advice}; allowed: {SOURCES}")


def as_loader(source: Any) -> DatasetLoader | None:
    """The loader that a name, a path, a dotted name or a spec means; None for anything else."""
    if isinstance(source, DatasetLoader):
        return source
    source = spec_of(source)
    if isinstance(source, str) or (isinstance(source, Mapping) and isinstance(source.get("kind"), str)):
        made: DatasetLoader = from_spec("dataset", source, "dataset")
        return made
    return None


def spec_of(source: Any) -> Any:
    """A path or a dotted name as the spec of its loader; everything else is returned unchanged.

    >>> spec_of("package.module:function")
    {'kind': 'callable', 'function': 'package.module:function'}
    """
    if isinstance(source, Path):
        return {"kind": "folder", "path": str(source)}
    return _named(source) if isinstance(source, str) and not registry.knows("dataset", source) else source


def _named(text: str) -> Any:
    path = Path(text).expanduser()
    if path.is_dir():
        return {"kind": "folder", "path": text}
    if ":" in text and not path.exists():
        return {"kind": "callable", "function": text}
    if path.exists() or "/" in text:
        raise DataError(f"'{text}' is not a folder; data are a folder with one file or folder per client")
    return text


def _opened(loader: DatasetLoader, options: SourceOptions, key: Key) -> Opened:
    given = {name: value for name, value in _given(options).items() if hasattr(loader, name)}
    refused = [name for name in _given(options) if name not in given and name != "ids"]
    if refused:
        raise SpecError(f"{refused[0]}: dataset '{type(loader).__name__}' does not take it; leave it out")
    loader = replace(loader, **given) if given else loader  # type: ignore[type-var]
    asks = getattr(loader, "open_for", None)
    made: Opened = asks(key, options) if asks else loader.open(key)
    return _with_ids(made, options) if "ids" not in given and isinstance(made, Dataset) else made


def _given(options: SourceOptions) -> dict[str, Any]:
    names = ("ids", "columns", "classes", "lazy", "tokenise")
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def _with_ids(data: Dataset, options: SourceOptions) -> Dataset:
    if options.ids is None:
        return data
    owner, names = owners_of(options.ids, len(data))
    return replace(data, owner=owner, names=names)


def _from_frame(frame: Any, options: SourceOptions) -> Dataset:
    table = table_of(frame)
    rows = len(next(iter(table.values())).values) if table else 0
    if not rows:
        raise DataError("the frame has no rows")
    by_row = options.ids is not None and not isinstance(options.ids, str)
    owner, names = owners_of(options.ids, rows, frame) if by_row else (None, None)
    refuse(options, "a frame", "tokenise", "lazy")
    made = encode(table, options.named, "the frame", owner, names=names)
    made = without_empty(made) if made.names is not None else made
    return made if options.classes is None else replace(made, classes=options.classes)


def _from_hub(source: Any, options: SourceOptions) -> LazyRows:
    if library_of(source) == "flwr_datasets" and not isinstance(source, Mapping):
        if options.ids is not None or options.dealt:
            raise SpecError("a FederatedDataset has its own partitions; leave ids and partition out")
        return _classed(from_flower(source, options.named, options.tokenise), options)
    refuse_stream(source)
    owner = names = None
    if options.ids is not None and not isinstance(options.ids, str):
        rows = source["train"] if isinstance(source, Mapping) else source
        owner, names = owners_of(options.ids, len(rows))
    return _classed(from_hub(source, options.named, options.tokenise, owner, names=names), options)


def _from_torch(source: Any, options: SourceOptions) -> LazyRows:
    refuse(options, "a torch Dataset", "tokenise", "columns")
    given = named_ids(options.ids)
    find = given if callable(given) else None
    if isinstance(source, torch.utils.data.IterableDataset):
        reader, clients, told = spool(source, find)
        made = LazyRows(reader, options.classes, notices=told)
    else:
        made = LazyRows(DatasetRows(source), options.classes)
        with own_code("the Dataset, or the function that gives an example's client,", DataError):
            clients = [find(source[row]) for row in range(len(source))] if find else []
        if not len(source):
            raise DataError("the Dataset has no rows")
    ids = clients if find else given
    if ids is None:
        return made
    owner, names = owners_of(ids, len(made.reader))
    return replace(made, owner=owner, names=names)


def _classed(rows: LazyRows, options: SourceOptions) -> LazyRows:
    return rows if options.classes is None else replace(rows, classes=options.classes)


def _settled(rows: LazyRows, options: SourceOptions) -> Dataset | LazyRows:
    """Rows in memory unless they are many or to be read on demand."""
    large = rows.total_bytes() > IN_MEMORY_MB * _MEGABYTE
    return rows if options.lazy or (options.lazy is None and large) else rows.in_memory()


def _from_class(source: type, options: SourceOptions, key: Key) -> Opened:
    """A torch ``Dataset`` by its class, as a recipe names it; other classes are refused."""
    if not issubclass(source, torch.utils.data.Dataset) or required_arguments(source):
        raise DataError(f"{source.__name__} is a class: give an object of it, or a function that returns one")
    with own_code(source.__name__, DataError):
        made = source()
    return open_source(made, options, key)


def _from_callable(source: Callable[..., Any], options: SourceOptions, key: Key) -> Opened:
    """A function of a client's number, or one without arguments that returns a whole source."""
    needed = required_arguments(source)
    called = options.called or getattr(source, "__name__", type(source).__name__)
    if len(needed) > 1:
        raise SpecError(f"{called} takes {', '.join(needed)}: it must take a client's number, or nothing")
    if not needed or needed == ["key"]:
        with own_code(called, DataError):
            made = source(key=key) if "key" in inspect.signature(source).parameters else source()
        return open_source(made, replace(options, called=called), key)
    if options.ids is not None or options.dealt:
        raise SpecError(f"{called} gives every client its data; leave ids and partition out")
    if options.clients is None:
        raise SpecError(f"{called} takes a client's number: give the number of clients, clients=100")
    return _lazy(source, options.clients, None, options, called)


def _lazy(
    read: Callable[[int], Any], clients: int, names: Sequence[str] | None, options: SourceOptions, called: str
) -> Dataset | LazyClients:
    """Clients that are read one by one; with ``lazy = False`` all at once."""
    refuse(options, called, "tokenise")

    def who(number: int) -> str:
        return f"client '{names[number]}'" if names is not None else f"client {number}"

    def value(number: int) -> Any:
        with own_code(f"{called} of {who(number)}", DataError):
            return read(number)

    if options.lazy is False:
        return _in_memory([value(number) for number in range(clients)], names, options)
    framed = frames_of(value(0)) is not None
    if not framed:
        refuse(options, f"{called}, which returns arrays", "columns")

    def client(number: int) -> Mapping[str, Examples]:
        return examples_of(read_client(value(number), who(number)), who(number))

    made = LazyClients(client, clients, options.classes or 0, names)
    made = lazy_frames(value, made, options.named, who) if framed else made
    if options.classes is not None or made.classes:
        return made
    y = made.sample.y
    if not isinstance(y, Tensor) or y.is_floating_point():
        return made
    raise SpecError(
        f"{called} is read client by client, so the number of its classes is not known: give classes=10 (0 for "
        "targets that are quantities), or lazy=False to read all clients now"
    )


def _from_mapping(source: Mapping[Any, Any], options: SourceOptions) -> Opened:
    keys = set(source)
    pool = keys == {"x", "y"} or ("train" in keys and keys <= {"train", "test"})
    dealt = options.dealt or options.ids is not None
    framed = pool and "train" in keys and all(map(is_frame, source.values()))
    if framed and (dealt or options.named.client is not None):
        return _pool_frames(source, options)
    if pool and dealt:
        return _pool(source, options)
    if pool:
        raise DataError(
            f"the mapping with the keys {' and '.join(sorted(map(str, keys)))} can mean clients of these names, or one "
            "set of examples. For clients give a list, for one set say who has which rows: ids=... or partition=..."
        )
    names = tuple(map(str, source))
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"two clients are called '{twice}' (1 and '1' are the same name); rename one")
    return _from_clients(source, names, options)


def _pool(source: Mapping[Any, Any], options: SourceOptions) -> Dataset:
    """Arrays x and y, or those for training with a common test set."""
    if "x" in source:
        return _arrays(source["x"], source["y"], options)
    made = _arrays(*_only(source["train"], "train"), options)
    if "test" not in source:
        return made
    test = Examples(*as_pair(*_only(source["test"], "test"), "test"))
    classes = max(made.classes, counted_classes(test.y)) if made.classes and options.classes is None else made.classes
    return replace(made, test=test, classes=classes)


def _pool_frames(source: Mapping[Any, Any], options: SourceOptions) -> Dataset:
    """A frame for training, of which every client has some rows, and one with a common test set."""
    refuse(options, "frames", "tokenise", "lazy")
    owner, names = None, None
    if options.ids is not None and not isinstance(options.ids, str):
        owner, names = owners_of(options.ids, len(source["train"]), source["train"])
    made = frame_with_test(source["train"], source.get("test"), options.named, owner, names)
    return made if options.classes is None else replace(made, classes=options.classes)


def _only(value: Any, who: str) -> tuple[Any, Any]:
    parts = read_client(value, who)
    if "" not in parts:
        raise DataError(f"{who}: got parts for training and testing; give one pair (x, y)")
    return parts[""]


def _from_tuple(source: tuple[Any, ...], options: SourceOptions) -> Opened:
    """A pair of arrays; anything else in a tuple could be clients or parts."""
    if (
        len(source) == 2
        and frames_of(source) is None
        and all(hasattr(one, "__array__") or isinstance(one, Mapping | list) for one in source)
    ):
        return _arrays(*source, options)
    raise DataError(
        f"a tuple of {len(source)} can mean clients, or a pair of arrays, or parts for training and testing. Give "
        "a list [...] of clients, a pair of arrays (x, y) with ids or partition, or {'train': (x, y), 'test': "
        "(x, y)} with ids or partition"
    )


def _arrays(x: Any, y: Any, options: SourceOptions) -> Dataset:
    refuse(options, "arrays", "tokenise", "columns", "lazy")
    features, labels = as_pair(x, y, "the arrays")
    classes = options.classes
    if classes is None:
        classes = 0 if labels.is_floating_point() else counted_classes(labels)
    owner, names = (None, None) if options.ids is None else owners_of(options.ids, len(labels), x, y)
    return Dataset(features, labels, classes, owner, names=names)


def _from_clients(source: Any, names: tuple[str, ...] | None, options: SourceOptions) -> Opened:
    """Data by client: those of a list or dict are in memory, those of another collection are read on demand."""
    if options.ids is not None or options.dealt:
        raise SpecError(
            f"a {type(source).__name__} gives every client its data, so it takes neither ids nor partition. To pool "
            "examples, give arrays: (x, y)"
        )
    refuse(options, f"a {type(source).__name__}", "tokenise")
    if not len(source):
        raise DataError("there are no clients: give at least one pair (x, y)")
    keys = list(source) if isinstance(source, Mapping) else range(len(source))
    if isinstance(source, list | dict) and not options.lazy:
        return _in_memory([source[key] for key in keys], names, options)
    return _lazy(lambda number: source[keys[number]], len(keys), names, options, f"the {type(source).__name__}")


def _in_memory(values: list[Any], names: Sequence[str] | None, options: SourceOptions) -> Dataset:
    frames = [found for found in map(frames_of, values) if found is not None]
    if len(frames) == len(values):
        return pooled_frames(frames, names, options.named, options.classes)
    refuse(options, "clients' arrays", "columns")
    if any(isinstance(value, int | float | np.generic) for value in values):
        raise DataError(
            "the list holds numbers; give one pair (x, y) per client, or arrays (x, y) with ids or partition"
        )
    return pooled(values, names, options.classes)

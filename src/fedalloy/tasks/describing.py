"""A look at the data of a task before anybody trains: clients, sizes, classes, skew, missing values, duplicates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

import torch
from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.declared import declared
from fedalloy.core.keys import Key
from fedalloy.core.protocols import DataPart, Task
from fedalloy.core.showing import tinted
from fedalloy.core.task import TaskWrapper
from fedalloy.core.types import Block, Examples
from fedalloy.tasks.examining import ExaminedTask
from fedalloy.tasks.preparing import Preparation

PARTS: tuple[DataPart, ...] = ("train", "valid", "test")
MOST_CLIENTS = 1000
"""Of data that are read on demand, so many clients are looked at."""
_AT_ONCE = 100
_BARS, _NAMED = 40, 12
_COLOURS = ("#004adc", "#b5480f", "#00a25d", "#e565b2", "#c88700", "#5088f7", "#40575c", "#5f139b")
"""Those of the report's pictures, which are distinct for all readers."""


@dataclass(frozen=True, repr=False)
class Description:
    """What was found. ``seen`` of ``clients`` were looked at.

    ``skew`` is the mean over clients of the total variation distance between a client's classes and those of all, from
    0 (alike) to 1. ``missing`` are numbers that are not finite, ``filled`` those that were missing and are
    filled; ``shared`` are examples (features and target) that more
    than one client has, ``leaked`` those of a client's own training part that are in its validation or test part too.
    """

    clients: int
    seen: int
    names: tuple[str, ...]
    features: str
    targets: str
    sizes: dict[str, tuple[int, ...]]
    classes: int
    class_counts: tuple[int, ...]
    client_classes: tuple[tuple[int, ...], ...]
    skew: float | None
    missing: int
    shared: int
    leaked: int
    encoding: dict[str, tuple[str, ...]]
    notices: tuple[str, ...]
    filled: int = 0
    class_names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        examples = sum(map(sum, self.sizes.values()))
        return f"<description of {self.clients} clients with {examples} examples; print it to read it>"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def lines(self) -> list[tuple[str, str]]:
        """What to print: names and texts."""
        total = {part: sum(sizes) for part, sizes in self.sizes.items()}
        told = [("clients", str(self.clients) + (f" ({self.seen} looked at)" if self.seen < self.clients else ""))]
        told.append(("one example", f"features {self.features}, target {self.targets}"))
        told.append(("examples", ", ".join(f"{part} {total[part]}" for part in PARTS)))
        told.append(("of one client", _spread([sum(one) for one in zip(*self.sizes.values(), strict=True)])))
        if self.classes and not any(self.class_counts):  # of pixels or tokens: no example has one class
            told.append(("classes", str(self.classes)))
        elif self.classes:
            empty = sum(count == 0 for count in self.class_counts)
            own = [sum(count > 0 for count in one) for one in self.client_classes]
            told.append(("classes", f"{self.classes}{f', {empty} of them without examples' if empty else ''}"))
            told.append(("examples per class", _spread(self.class_counts)))
            told.append(("classes of one client", _spread(own)))
        if self.skew is not None:
            told.append(("label skew", f"{self.skew:.3f} (0: clients alike, 1: nothing in common)"))
        filled = f"; {self.filled} that were missing are filled" if self.filled else ""
        told.append(("missing or infinite", f"{self.missing} values{filled}"))
        told.append(("duplicates", f"{self.shared} examples are at several clients, {self.leaked} in two parts of one"))
        told += [("encoded", f"{name}: {', '.join(values)}") for name, values in self.encoding.items()]
        return told + [("note", notice) for notice in self.notices]

    def __str__(self) -> str:
        wide = max(len(name) for name, _ in self.lines())
        return "\n".join(f"{name:<{wide}}  {text}" for name, text in self.lines())

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in self.lines())
        table = f'<table style="text-align:left">{rows}</table>'
        return f"<div>{self.picture()}{self._below()}{table}</div>"

    def _below(self) -> str:
        """What the bars and their colours are."""
        shown = len(self.client_classes[:_BARS])
        named = f", from left to right {', '.join(self.names)}" if self.names and shown <= _NAMED else ""
        rest = f" (the first {shown} of {self.clients})" if shown < self.clients else ""
        marks = [
            f'<span style="{tinted(colour, "color")}">&#9632;</span> {escape(label)}'
            for label, colour in zip(self.class_names or map(str, range(self.classes)), _COLOURS, strict=False)
        ]
        counted, few = any(map(sum, self.client_classes)), self.classes <= len(_COLOURS)
        classes = f", by class ({' '.join(marks)})" if counted and few else ", by class" if counted else ""
        return f"<div>one bar per client{escape(named + rest)}: its examples{classes}</div>"

    def picture(self) -> str:
        """The clients' sizes as bars, coloured by class, as SVG; the first 40 clients."""
        both = zip(self.client_classes, self._totals(), strict=True)
        shown = [one if sum(one) else (size,) for one, size in both][:_BARS]
        most = max((sum(one) for one in shown), default=0) or 1
        bars = "".join(_bar(place, one, most, self._called(place)) for place, one in enumerate(shown))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="examples of {len(shown)} clients" '
            f'width="{16 * len(shown) + 4}" height="124" style="display:block">{bars}</svg>'
        )

    def _totals(self) -> list[int]:
        return [sum(one) for one in zip(*self.sizes.values(), strict=True)]

    def _called(self, place: int) -> str:
        return self.names[place] if self.names else str(place)


class Describable(Task):
    """A task that can be looked at."""

    @declared
    def classes(self) -> int:
        """The number of classes, 0 for quantities."""
        return 0

    @declared
    def encoding(self) -> Mapping[str, tuple[str, ...]] | None:
        """What the numbers of encoded columns mean."""
        return None

    def count_filled(self, ids: Tensor) -> int:
        """How many missing values of some clients are filled."""
        return 0

    def preparation(self, clients: Sequence[int] | None = None) -> Preparation:
        """What is done to raw rows before the model gets them, at least to those of ``clients``."""
        return Preparation()

    def describe(self) -> Description:
        """A look at the data: clients, sizes, classes, skew, missing values, duplicates; a picture in a notebook."""
        return describe(self)


def preparation_of(task: Task, clients: Sequence[int]) -> Preparation:
    """What a task does to raw rows, at least to those of ``clients``; a task that cannot say it is given rows as its
    model gets them."""
    if isinstance(task, ExaminedTask):
        return preparation_of(task.task, clients)
    if isinstance(task, TaskWrapper):
        return Preparation(unknown=f"what the task {type(task).__name__} does to raw rows is not known")
    return task.preparation(clients) if isinstance(task, Describable) else Preparation()


def describe(task: Describable, most: int = MOST_CLIENTS) -> Description:
    """Look at a task's data; of data that are read on demand, ``most`` clients drawn by a fixed key."""
    count = task.population if task.pools else min(most, task.population)
    ids = torch.arange(count) if count == task.population else Key.of(0).fold("describe").choice(task.population, count)
    look = _Look(task.classes)
    for some in ids.split(count if task.pools else _AT_ONCE):
        look.at({part: task.data(part, some) for part in PARTS}, len(some))
    table, first = torch.cat(look.tables), task.data("train", ids[:1])
    shared = sum(look.marks[one] for one, client in look.owner.items() if client < 0)
    return Description(
        task.population, count, _names(task, ids), _form(first.x), _form(first.y),
        {part: tuple(sizes) for part, sizes in look.sizes.items()}, look.classes, tuple(table.sum(0).tolist()),
        tuple(map(tuple, table.tolist())), _skew(table), look.missing, shared, look.leaked,
        dict(task.encoding or {}), tuple(task.notices), task.count_filled(ids), class_names(task),
    )  # fmt: skip


def class_names(task: Describable) -> tuple[str, ...]:
    """What the classes are called; empty if the data do not say it."""
    columns = task.preparation(()).columns
    features = columns.values.keys() if columns is not None else ()
    left = [names for column, names in (task.encoding or {}).items() if column not in features]
    return left[0] if len(left) == 1 and len(left[0]) == task.classes else ()


@dataclass
class _Look:
    """What was counted so far: only numbers and hashes are kept."""

    classes: int
    sizes: dict[str, list[int]] = field(default_factory=lambda: {part: [] for part in PARTS})
    tables: list[Tensor] = field(default_factory=list)
    missing: int = 0
    leaked: int = 0
    owner: dict[bytes, int] = field(default_factory=dict)
    marks: dict[bytes, int] = field(default_factory=dict)
    clients: int = 0

    def at(self, blocks: Mapping[DataPart, Block], clients: int) -> None:
        """Count the next clients."""
        for part, block in blocks.items():
            self.sizes[part] += block.size.tolist()
        self.tables.append(_class_table(blocks.values(), self.classes, clients))
        for client in range(clients):
            mine = {part: block.client(client) for part, block in blocks.items()}
            self.missing += sum(map(_missing, mine.values()))
            self._mark({part: _hashes(one) for part, one in mine.items()})

    def _mark(self, found: Mapping[DataPart, list[bytes]]) -> None:
        trained = set(found["train"])
        self.leaked += sum(one in trained for one in (*found["valid"], *found["test"]))
        for one in (mark for marks in found.values() for mark in marks):
            known = self.owner.setdefault(one, self.clients)
            self.owner[one] = known if known == self.clients else -1
            self.marks[one] = self.marks.get(one, 0) + 1
        self.clients += 1


def _names(task: Task, ids: Tensor) -> tuple[str, ...]:
    names = task.names
    return () if names is None else tuple(str(names[client]) for client in ids.tolist())


def _form(x: Any) -> str:
    """The shape and type of one example."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape[1:])}"
    if isinstance(x, Mapping):
        return ", ".join(f"{name} {_form(leaf)}" for name, leaf in x.items())
    return ", ".join(_form(leaf) for leaf in x)


def _class_table(blocks: Iterable[Block], classes: int, clients: int) -> Tensor:
    """How many examples of each class each client has; no columns where targets are not one class each."""
    table = torch.zeros(clients, classes, dtype=torch.int64)
    for block in blocks:
        if not classes or not isinstance(block.y, Tensor) or block.y.is_floating_point() or block.y.dim() > 1:
            return torch.zeros(clients, 0, dtype=torch.int64)
        for row in range(clients):
            table[row] += torch.bincount(block.client(row).y.cpu(), minlength=classes)[:classes]
    return table


def _skew(table: Tensor) -> float | None:
    kept = table[table.sum(1) > 0].double()
    if not table.shape[1] or not len(kept):
        return None
    shares, whole = kept / kept.sum(1, keepdim=True), kept.sum(0) / kept.sum()
    return float((shares - whole).abs().sum(1).mean() / 2)


def _missing(examples: Examples) -> int:
    return sum(int((~leaf.isfinite()).sum()) for leaf in _leaves(examples) if leaf.is_floating_point())


def _hashes(examples: Examples) -> list[bytes]:
    """A hash of every example, features and target."""
    leaves = [leaf.cpu().flatten(1).numpy() if leaf.dim() > 1 else leaf.cpu().numpy() for leaf in _leaves(examples)]
    rows = (b"".join(leaf[row].tobytes() for leaf in leaves) for row in range(len(examples)))
    return [hashlib.blake2b(row, digest_size=8).digest() for row in rows]


def _leaves(examples: Examples) -> list[Tensor]:
    return [*inputs.leaves(examples.x), *inputs.leaves(examples.y)]


def _spread(values: Sequence[int]) -> str:
    ordered = sorted(values) or [0]
    return f"{ordered[0]} to {ordered[-1]}, median {ordered[len(ordered) // 2]}"


def _bar(place: int, counts: Sequence[int], most: int, name: str) -> str:
    """One client as a bar of its classes, the first at the bottom."""
    made, below = "", 0.0
    for label, count in enumerate(counts):
        height = 118 * count / most
        below += height
        colour = _COLOURS[label % len(_COLOURS)]
        made += f'<rect x="{4 + 16 * place}" y="{122 - below:.1f}" width="12" height="{height:.1f}"'
        made += f' style="{tinted(colour, "fill")}"/>'
    return f"<g><title>{escape(name)}: {sum(counts)} examples</title>{made}</g>"

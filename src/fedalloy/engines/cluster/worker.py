"""A worker of the engine ``ray``: it has the task, runs blocks of clients and keeps what they send.

The class knows nothing of Ray but the references that it is given; the driver makes actors of it.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedalloy.core import inputs, tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.contributions import Notes
from fedalloy.core.cross import cross_scores
from fedalloy.core.errors import ClientError
from fedalloy.core.factors import FactoredTree
from fedalloy.core.fingerprint import digest
from fedalloy.core.protocols import Outcome, Shared, Task
from fedalloy.core.types import Cohort, Context, Payload, State, Stats, Tree, Weights, Work
from fedalloy.engines.batched import Batched
from fedalloy.engines.cluster.packing import Packed, pack, unpack
from fedalloy.engines.cluster.states import StateFiles
from fedalloy.engines.one_by_one import KernelFor, run_clients
from fedalloy.engines.workers import portable

_WITNESSES = 5
_SUMMED = (torch.float32, torch.float64)
SUMMED_AT_ONCE = 1 << 26
"""Numbers of all blocks' partial sums that exist at the same time; a larger part is summed range by range."""

Rows = list[int] | None
"""Some rows of a block; None: all."""
Columns = Mapping[str, tuple[int, int]]
"""Columns ``(begin, end)`` of the leaves of a part."""
Pieces = dict[int, Tree]
"""The partial sums of some blocks, by the number of the block."""


@dataclass(frozen=True)
class Settings:
    """What a worker must know besides task and algorithm; ``path`` is where the driver finds modules of the user."""

    inner: str = "loop"
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1
    device: str = "cpu"
    states: str | None = None
    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockReport:
    """What the driver learns of a block: everything but the payload. ``states`` are packed states, or markers."""

    ids: Tensor
    stats: Stats
    notes: Notes | None
    states: Packed | dict[int, State]
    failures: dict[int, str]
    seconds: float


class StoreLost(Exception):
    """A worker cannot read the object store of its machine any more: the machine, or Ray on it, is ending."""


class BlockWorker:
    """One process; ``call`` numbers the rounds of the driver, and what was sent in earlier ones is dropped."""

    def __init__(self) -> None:
        self.call, self.held = -1, dict[int, Cohort]()
        self.settings = Settings()

    def prepare(self, references: Sequence[Any], settings: Settings) -> dict[str, str]:
        """Take task and algorithm from the object store; returns what must be equal everywhere."""
        torch.set_num_threads(settings.threads)
        sys.path.extend(place for place in settings.path if place not in sys.path)
        self.settings, self.files = settings, StateFiles(Path(settings.states)) if settings.states else None
        algorithm, task = unpack(_fetched(references[0]))
        told = identity_of(task, self.files)
        self.algorithm: Algorithm = algorithm
        self.task: Task = task.to(self.settings.device) if self.settings.device != "cpu" else task
        self.inner = Batched(**self.settings.options) if self.settings.inner == "batched" else None
        self.held, self.call = {}, -1
        self.kernel: KernelFor | None = None
        return told

    def reads(self, references: Sequence[Any]) -> bool:
        """Whether this process still reads the object store of its machine; an error if not."""
        return _fetched(references[0]) is not None

    def run(
        self, call: int, references: Sequence[Any], number: int, work: Work, states: Packed, ctx: Context
    ) -> BlockReport | ClientError:
        """Run a block's clients and keep what they send; what comes back as an error is an error of the block."""
        began = time.perf_counter()
        shared = self._received(call, references)
        try:
            found = self._trained(shared, self._states(shared, unpack(states)), work, ctx)
            self.held[number] = found.cohort if isinstance(found.cohort, Cohort) else _whole(found.cohort)
            kept = self._kept(found.states, ctx)
        except ClientError as error:
            return portable(error)
        except Exception as error:  # reading data or a state
            return portable(ClientError("worker", error, client=int(work.ids[0]), round=ctx.round))
        cohort = self.held[number]
        notes = cohort.notes if len(cohort) else None
        return BlockReport(cohort.ids, cohort.stats, notes, kept, found.failures, time.perf_counter() - began)

    def partials(
        self,
        part: str,
        wanted: Mapping[int, tuple[Rows, Weights]],
        within: Columns,
        pieces: Sequence[Columns],
    ) -> list[Packed] | Packed:
        """The weighted sums of some columns over the rows of every block, cut into pieces (columns of those)."""
        sums = {number: partial_sum(self.held[number], part, *given, within) for number, given in wanted.items()}
        cut = [pack({number: _cut(leaves, some) for number, leaves in sums.items()}) for some in pieces]
        return cut if len(cut) > 1 else cut[0]

    def add(self, rounded: Mapping[str, torch.dtype], *pieces: Packed) -> Packed:
        """Add the pieces of all blocks, in the order of blocks."""
        return pack(add_blocks([unpack(piece) for piece in pieces], rounded))

    def columns(
        self, wanted: Mapping[int, Rows], parts: Sequence[str], places: Sequence[tuple[str, int, int]]
    ) -> dict[int, Packed]:
        """Some columns of some rows of every block: by part, then by place."""

        def of(number: int, rows: Rows) -> list[list[Tensor]]:
            payload = self.held[number].payload
            return [[_some(tree.as_rows(payload[part][n])[:, b:e], rows).cpu() for n, b, e in places] for part in parts]

        return {number: pack(of(number, rows)) for number, rows in wanted.items()}

    def rows(self, wanted: Mapping[int, Rows], part: str) -> dict[int, Packed]:
        """Some rows of every block, whole."""
        return {
            number: pack({name: _some(leaf, rows).cpu() for name, leaf in self.held[number].payload[part].items()})
            for number, rows in wanted.items()
        }

    def dots(self, wanted: Mapping[int, Rows], part: str, other: Sequence[Any]) -> dict[int, dict[str, Tensor]]:
        """The inner products of some rows of every block with one tree."""
        like = unpack(_fetched(other[0]))
        return {
            number: _chosen(self.held[number], rows).dots(part, self._placed(like)) for number, rows in wanted.items()
        }

    def cross(
        self, wanted: Mapping[int, Rows], references: Sequence[Any], ids: Tensor, update: str
    ) -> dict[int, Tensor]:
        """The scores of the models of every block's clients on the validation parts of all ``ids``."""
        shared, valid = self._received(self.call, references), self.task.data("valid", ids)
        with torch.no_grad():
            return {
                number: cross_scores(self.task.objective, shared, _chosen(self.held[number], rows), valid, update)
                for number, rows in wanted.items()
            }

    def _received(self, call: int, references: Sequence[Any]) -> Shared:
        if call != self.call:
            self.held, self.call = {}, -1
            self._shared: Shared = self._placed(unpack(_fetched(references[0])))
            self.call = call
        return self._shared

    def _trained(self, shared: Shared, states: Mapping[int, State], work: Work, ctx: Context) -> Outcome:
        if self.inner is None:
            kernel = self.kernel = self.kernel or KernelFor.of(self.algorithm, self.task.objective, shared)
            return run_clients(self.algorithm, self.task, shared, states, work, ctx, kernel)
        # Whether a block can be stacked must not depend on the blocks that this worker had before.
        self.inner._unbatchable = self.inner._uncaptured = ""
        found = self.inner(self.algorithm, self.task, shared, states, work, ctx)
        return Outcome(found.cohort.keep(), found.states, found.failures)

    def _states(self, shared: Shared, given: Mapping[int, State]) -> dict[int, State]:
        return {client: self._state(shared, client, state) for client, state in given.items()}

    def _state(self, shared: Shared, client: int, given: State) -> State:
        """A client's state: the one that was sent, the one in its file, or its first one."""
        if given.keys() == {"new"}:
            return self.algorithm.init_client(shared, given["new"], self.task.objective.init)
        if given.keys() == {"round"} and self.files is not None:
            found: State = self._placed(self.files.read(client, int(given["round"])))
            return found
        sent: State = self._placed(given)
        return sent

    def _kept(self, states: Mapping[int, State], ctx: Context) -> Packed | dict[int, State]:
        if not self.algorithm.stateful:
            return {}
        if self.files is None:
            return pack(_on(states, "cpu"))
        for client, state in states.items():
            self.files.write(client, ctx.round, _on(state, "cpu"))
        return {client: {"round": ctx.round} for client in states}

    def _placed(self, value: Any) -> Any:
        return value if self.settings.device == "cpu" else _on(value, self.settings.device)


def partial_sum(cohort: Cohort, part: str, rows: Rows, weights: Weights, within: Columns | None = None) -> Tree:
    """The weighted sum over some rows of a block, on the CPU, of all columns or of those ``within``. Whole numbers are
    summed in float64 and rounded when all blocks are added, halves in float32."""
    leaves = _chosen(cohort, rows).payload[part]
    if isinstance(leaves, FactoredTree):
        found = {name: _summable(leaf).cpu() for name, leaf in tree.combine(leaves, weights).items()}
        return found if within is None else _cut(found, within)
    wide = {
        name: _summable(_columns(leaf, name, within)) for name, leaf in leaves.items() if not within or name in within
    }
    return {name: leaf.cpu() for name, leaf in tree.combine(wide, weights).items()}


def column_ranges(widths: Mapping[str, int], blocks: int, by_client: bool) -> list[dict[str, tuple[int, int]]]:
    """The columns that are summed together, so that the blocks' sums fit into memory. They depend on cohort and model
    alone, never on the workers; weights on elements need whole leaves.

    >>> column_ranges({"w": 3, "b": 1}, 2, by_client=True)
    [{'w': (0, 3), 'b': (0, 1)}]
    """
    most = max(1, SUMMED_AT_ONCE // max(1, blocks)) if by_client else sum(widths.values()) + 1
    found: list[dict[str, tuple[int, int]]] = [{}]
    filled = 0
    for name, width in widths.items():
        begin = 0
        while begin < width:
            if filled >= most:
                found, filled = [*found, {}], 0
            end = min(width, begin + most - filled)
            found[-1][name], filled, begin = (begin, end), filled + end - begin, end
    return [one for one in found if one]


def is_by_client(weights: Weights) -> bool:
    """Whether there is one weight per client, or per client and leaf, and none per element."""
    return weights.dim() == 1 if isinstance(weights, Tensor) else all(one.dim() == 1 for one in weights.values())


def ranges_of(template: Tree, wanted: Mapping[int, tuple[Rows, Weights]]) -> list[dict[str, tuple[int, int]]]:
    """The columns of a part that are summed together."""
    widths = {name: leaf.numel() for name, leaf in template.items()}
    return column_ranges(widths, len(wanted), all(is_by_client(weights) for _, weights in wanted.values()))


def joined(pieces: Sequence[Tree], template: Tree) -> Tree:
    """Ranges of columns, put together in their order; leaves without numbers are empty."""
    parts: dict[str, list[Tensor]] = {name: [] for name in template}
    for some in pieces:
        for name, piece in some.items():
            parts[name].append(piece.reshape(-1))
    return {
        name: torch.cat(parts[name]).reshape(leaf.shape) if parts[name] else torch.zeros(leaf.shape, dtype=leaf.dtype)
        for name, leaf in template.items()
    }


def _columns(leaf: Tensor, name: str, within: Columns | None) -> Tensor:
    if within is None or within[name] == (0, leaf[0].numel()):
        return leaf
    return tree.as_rows(leaf)[:, slice(*within[name])]


def add_blocks(pieces: Sequence[Pieces], rounded: Mapping[str, torch.dtype]) -> Tree:
    """The sums of all blocks, added in float64 in the order of their numbers; ``rounded`` are the dtypes of the result,
    float64 for leaves that are not listed.

    >>> add_blocks([{2: {"w": torch.ones(1)}}, {1: {"w": torch.ones(1)}}], {"w": torch.float32})
    {'w': tensor([2.])}
    """
    by_block = {number: leaves for some in pieces for number, leaves in some.items()}
    total: Tree = {}
    for number in sorted(by_block):
        for name, leaf in by_block[number].items():
            total[name] = total[name].add_(leaf) if name in total else leaf.double().clone()
    return {name: to_dtype(leaf, rounded.get(name, torch.float64)) for name, leaf in total.items()}


def to_dtype(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """A sum in the dtype of its leaf; counters are rounded."""
    return leaf.to(dtype) if dtype.is_floating_point else leaf.round().to(dtype)


def identity_of(task: Task, files: StateFiles | None) -> dict[str, str]:
    """What must be equal on every machine: the code of fedalloy, torch, the examples of a few clients, and the folder
    of states; and where this process is."""
    return {
        "fedalloy": f"{_version()} ({_code()})",
        "torch": torch.__version__,
        "data": _examples(task),
        "states": files.owner() if files is not None else "",
        "node": _node(),
        "machine": socket.gethostname(),
        "process": str(os.getpid()),
    }


@lru_cache(1)
def _code() -> str:
    root = Path(__file__).resolve().parents[1]
    files = sorted(root.rglob("*.py"))
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.relative_to(root).as_posix()}\n".encode() + file.read_bytes())
    return f"code {total.hexdigest()[:12]}"


def _version() -> str:
    try:
        return metadata.version("fedalloy")
    except metadata.PackageNotFoundError:
        return "not installed"


def _examples(task: Task) -> str:
    ids = torch.linspace(0, task.population - 1, min(_WITNESSES, task.population)).round().long()
    block = task.data("train", ids)
    rows = [block.client(row) for row in range(len(ids))]
    return digest(*(leaf for one in rows for part in (one.x, one.y) for leaf in inputs.leaves(part)))


def _fetched(reference: Any) -> Any:
    if isinstance(reference, Packed):
        return reference
    import ray

    try:
        return ray.get(reference)
    except Exception as error:
        raise StoreLost(f"{type(error).__name__}: {error}") from None


def _node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""


def _on(value: Any, device: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _on(item, device) for name, item in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def _some(leaf: Tensor, rows: Rows) -> Tensor:
    return leaf if rows is None else leaf[torch.tensor(rows, dtype=torch.int64, device=leaf.device)]


def _cut(leaves: Tree, columns: Mapping[str, tuple[int, int]]) -> Tree:
    return {name: leaves[name].reshape(-1)[begin:end] for name, (begin, end) in columns.items()}


def _chosen(cohort: Cohort, rows: Rows) -> Cohort:
    return cohort if rows is None else cohort.take(torch.tensor(rows, dtype=torch.int64))


def _whole(found: Any) -> Cohort:
    payload: Payload = found.payload
    return Cohort(found.ids, payload, found.stats, None, found.notes)


def _summable(leaf: Tensor) -> Tensor:
    if leaf.dtype in _SUMMED:
        return leaf
    return leaf.float() if leaf.is_floating_point() else leaf.double()

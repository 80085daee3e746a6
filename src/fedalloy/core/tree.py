"""Functions on trees (``dict[str, Tensor]``): map, combine, lift, dot, norm. All pure, all differentiable.

A *stacked* tree has one more axis in front of every leaf, one row per client. A *weight* has a shape
that is a prefix of the stacked leaf: ``[C]`` for clients, ``{leaf: [C]}`` for layers,
``{leaf: [C, *shape]}`` for elements, ``[C, n]`` for synthetic samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedalloy.core.factors import FactoredTree, LowRank
from fedalloy.core.layer_names import layer_of
from fedalloy.core.native.numbers import combined
from fedalloy.core.wide import wide, widest

Tree = dict[str, Tensor]
Weights = Tensor | Mapping[str, Tensor]
Level = Literal["client", "layer", "leaf"]


class Chunk(NamedTuple):
    """The position of a piece of a stacked leaf: the leaf's name, and columns of the leaf as ``[C, n]``."""

    leaf: str
    columns: slice


# Chosen so that the partial sums stay in cache. torch also runs so few columns on one thread, which already saturates
# memory bandwidth and does not have to wait for a second thread when other processes use the cores.
COLUMNS = 1 << 15
"""Columns that are summed over clients at a time."""
# Small leaves are concatenated and combined in one call: for larger ones the copy costs more than the call.
SMALL = 1 << 13
"""Leaves with at most this many numbers, over all clients, are combined in one call with others."""
# Limit on the total size of what is concatenated, over all clients.
_SIDE_BY_SIDE = 1 << 24
# Elements processed at a time, over all clients, so that memory does not grow with the number of clients.
_ELEMENTS = 1 << 20
# Most roundings of one number in the leaf's dtype: with float32, sixteen keep the error below the guaranteed 1e-6 of
# sum |w x|. Blocks of rows are summed first, then the blocks' sums, in float64 if there are too many for that limit.
_ROUNDINGS = 16


def map_leaves(function: Callable[..., Tensor], first: Mapping[str, Tensor], *others: Mapping[str, Tensor]) -> Tree:
    """Apply ``function`` leaf by leaf.

    >>> map_leaves(torch.add, {"w": torch.ones(2)}, {"w": torch.ones(2)})
    {'w': tensor([2., 2.])}
    """
    return {name: function(leaf, *(other[name] for other in others)) for name, leaf in first.items()}


def zeros_like(tree: Mapping[str, Tensor]) -> Tree:
    """A tree of zeros with the same names, shapes and dtypes."""
    return {name: torch.zeros_like(leaf) for name, leaf in tree.items()}


def add(one: Mapping[str, Tensor], other: Mapping[str, Tensor], scale: float | Tensor = 1.0) -> Tree:
    """``one + scale * other`` in one pass over memory; integer leaves keep their dtype."""
    return {name: _add(leaf, other[name], scale) for name, leaf in one.items()}


def subtract(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tree:
    """``one - other``."""
    return {name: leaf - other[name] for name, leaf in one.items()}


def stack(trees: list[Tree]) -> Tree:
    """One stacked tree from one tree per client."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def rows(stacked: Mapping[str, Tensor], index: Tensor | int) -> Tree:
    """Some clients of a stacked tree; an integer gives one client's tree."""
    return {name: leaf[index] for name, leaf in stacked.items()}


def dot(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tensor:
    """Inner product over all leaves, summed in float64.

    >>> float(dot({"w": torch.ones(3)}, {"w": torch.full((3,), 2.0)}))
    6.0
    """
    terms = [(wide(leaf) * wide(other[name])).sum() for name, leaf in one.items()]
    return torch.stack(terms).sum()


def norm(tree: Mapping[str, Tensor]) -> Tensor:
    """Euclidean length over all leaves."""
    return dot(tree, tree).sqrt()


def dots(stacked: Mapping[str, Tensor], tree: Mapping[str, Tensor]) -> Tensor:
    """Inner product of every client's tree with one tree, ``[C]`` in float64."""
    return _sum_leaves(_rowwise(leaf, tree[name].reshape(-1)) for name, leaf in stacked.items())


def squared_lengths(leaf: Tensor) -> Tensor:
    """The squared length of every row of a stacked leaf, ``[C]`` in float64."""
    return _rowwise(leaf, None)


def norms(stacked: Mapping[str, Tensor]) -> Tensor:
    """Euclidean length of every client's tree, ``[C]`` in float64."""
    return _sum_leaves(_rowwise(leaf, None) for leaf in stacked.values()).sqrt()


def combine(stacked: Mapping[str, Tensor], weights: Weights) -> Tree:
    """Multiply every client's leaf by its weight and sum over clients.

    The error is at most 1e-6 relative to ``sum_k |w_k x_k|``; memory does not grow with the number of clients. Integer
    leaves (BatchNorm counters) are rounded back to their dtype.

    >>> combine({"w": torch.tensor([[1.0, 2.0], [3.0, 6.0]])}, torch.tensor([0.5, 0.5]))
    {'w': tensor([2., 4.])}
    """
    if isinstance(weights, Tensor) and weights.dim() == 1:
        if isinstance(stacked, FactoredTree):
            return _combine_factored(stacked, weights)
        return _combine_by_client(stacked, weights)
    return {
        name: _combine_leaf(leaf, weights if isinstance(weights, Tensor) else weights[name])
        for name, leaf in stacked.items()
    }


def chunks(stacked: Mapping[str, Tensor]) -> Iterator[tuple[Chunk, Tensor]]:
    """Pieces of all leaves as matrices with a row per client; more clients give fewer columns per piece.

    >>> [(chunk.leaf, part.shape) for chunk, part in chunks({"w": torch.ones(2, 3, 4), "b": torch.ones(2)})]
    [('w', torch.Size([2, 12])), ('b', torch.Size([2, 1]))]
    """
    for name, leaf in stacked.items():
        matrix = as_rows(leaf)
        width = chunk_width(matrix.shape[0])
        for begin in range(0, matrix.shape[1], width):
            columns = slice(begin, min(begin + width, matrix.shape[1]))
            yield Chunk(name, columns), matrix[:, columns]


def chunk_width(clients: int) -> int:
    """How many columns a piece of :func:`chunks` has."""
    return max(1, _ELEMENTS // max(1, clients))


def matrices(stacked: Iterable[Tensor]) -> list[Tensor]:
    """Stacked leaves as matrices: one row per client each."""
    return [leaf.flatten(1) if leaf.dim() > 1 else leaf.unsqueeze(1) for leaf in stacked]


def as_rows(leaf: Tensor) -> Tensor:
    """A stacked leaf as a matrix: one row per client."""
    return leaf.flatten(1) if leaf.dim() > 1 else leaf.unsqueeze(1)  # reshape(C, -1) fails for C = 0


def layers(tree: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Leaf names grouped by module, in the order in which the modules appear."""
    groups: dict[str, list[str]] = {}
    for name in tree:
        groups.setdefault(layer_of(name), []).append(name)
    return groups


def groups(tree: Mapping[str, Tensor], level: Level) -> dict[str, list[str]]:
    """Leaf names grouped at a level: all together, by module, or each alone."""
    if level == "client":
        return {"": list(tree)}
    return layers(tree) if level == "layer" else {name: [name] for name in tree}


def lift(score: Callable[[Tree], Tensor], stacked: Mapping[str, Tensor], level: Level) -> dict[str, Tensor]:
    """One score function at any level: ``score`` sees the leaves of one group and returns ``[C]``.

    >>> lift(norms, {"a.w": torch.ones(2, 4), "b.w": torch.zeros(2, 3)}, "layer")
    {'a': tensor([2., 2.], dtype=torch.float64), 'b': tensor([0., 0.], dtype=torch.float64)}
    """
    return {
        group: score({name: stacked[name] for name in members}) for group, members in groups(stacked, level).items()
    }


def spread(per_group: Mapping[str, Tensor], tree: Mapping[str, Tensor], level: Level) -> Weights:
    """Turn one value per group into weights that ``combine`` understands."""
    if level == "client":
        return per_group[""]
    return {name: per_group[group] for group, members in groups(tree, level).items() for name in members}


def count(tree: Mapping[str, Tensor]) -> int:
    """How many numbers a tree holds."""
    return sum(leaf.numel() for leaf in tree.values())


def nbytes(tree: Mapping[str, Tensor]) -> int:
    """How many bytes a tree occupies; leaves kept as factors count as if they were multiplied out."""
    if type(tree) is dict or not isinstance(tree, FactoredTree):
        return sum([leaf.nbytes for leaf in tree.values()])
    return sum(_nbytes(leaf) for leaf in tree.stored.values())


def _nbytes(leaf: Tensor | LowRank) -> int:
    if isinstance(leaf, LowRank):
        return len(leaf.left) * leaf.one.numel() * leaf.one.element_size()
    return leaf.numel() * leaf.element_size()


def _add(a: Tensor, b: Tensor, scale: float | Tensor) -> Tensor:
    if not (a.is_floating_point() and a.dtype == b.dtype):
        return (a + scale * b).to(a.dtype)
    if isinstance(scale, Tensor):
        return torch.addcmul(a, b, scale.to(a.dtype))
    return torch.add(a, b, alpha=scale)


def _sum_leaves(terms: Iterator[Tensor]) -> Tensor:
    """The sum over leaves, on the CPU like all statistics of clients."""
    return torch.stack(list(terms)).sum(0).cpu().double()


def _rowwise(leaf: Tensor, other: Tensor | None) -> Tensor:
    """Every row of a stacked leaf times ``other`` (or itself), summed in float64, a chunk of columns at a time."""
    matrix = as_rows(leaf)
    columns = max(1, _ELEMENTS // max(1, matrix.shape[0]))
    total = torch.zeros(matrix.shape[0], dtype=widest(matrix.device), device=matrix.device)
    for begin in range(0, matrix.shape[1], columns):
        part = wide(matrix[:, begin : begin + columns])
        total = total + ((part * part).sum(1) if other is None else part @ wide(other[begin : begin + columns]))
    return total


def _combine_by_client(stacked: Mapping[str, Tensor], weights: Tensor) -> Tree:
    """One weight per client: small leaves are concatenated first, because for them the overhead of a call dominates."""
    result: dict[str, Tensor] = {}
    for names in _batches(stacked):
        if len(names) == 1:
            leaf = stacked[names[0]]
            many = leaf.dim() > 1 and leaf.shape[0] > _ROUNDINGS
            found = combined(weights, leaf.flatten(1)) if many else None
            result[names[0]] = _combine_leaf(leaf, weights) if found is None else found.reshape(leaf.shape[1:])
            continue
        beside = matrices(stacked[name] for name in names)
        widths, together = [matrix.shape[1] for matrix in beside], torch.cat(beside, dim=1)
        for name, part in zip(names, _combine_leaf(together, weights).split(widths), strict=True):
            result[name] = part.reshape(stacked[name].shape[1:])
    return {name: result[name] for name in stacked}


def _combine_factored(stacked: FactoredTree, weights: Tensor) -> Tree:
    kept = stacked.stored
    rest = _combine_by_client({name: leaf for name, leaf in kept.items() if isinstance(leaf, Tensor)}, weights)
    return {name: leaf.combined(weights) if isinstance(leaf, LowRank) else rest[name] for name, leaf in kept.items()}


def _batches(stacked: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Groups of leaves to concatenate: of the same dtype and device, and of bounded total size."""
    open_batches: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for name, leaf in stacked.items():
        kind = (leaf.dtype, leaf.device)
        if not leaf.is_floating_point() or leaf.numel() > SMALL:
            yield [name]
            continue
        if filled.get(kind, 0) + leaf.numel() > _SIDE_BY_SIDE:
            yield open_batches.pop(kind)
            filled[kind] = 0
        open_batches.setdefault(kind, []).append(name)
        filled[kind] = filled.get(kind, 0) + leaf.numel()
    yield from open_batches.values()


def _combine_leaf(leaf: Tensor, weight: Tensor) -> Tensor:
    if not leaf.is_floating_point():
        return _combine_leaf(wide(leaf), weight).round().to(leaf.dtype)
    weight = weight.to(leaf)
    if weight.dim() == 1:
        matrix = as_rows(leaf)
        if weight.shape[0] <= _ROUNDINGS and matrix.shape[1] <= COLUMNS and weight.shape[0]:
            only: Tensor = weight @ matrix
            return only.reshape(leaf.shape[1:])
        columns = COLUMNS if leaf.device.type == "cpu" else max(COLUMNS, matrix.shape[1])
        parts = [_weighted_rows(weight, part) for part in matrix.split(columns, dim=1)]
        if len(parts) == 1:
            return parts[0].reshape(leaf.shape[1:])
        return torch.cat(parts).reshape(leaf.shape[1:]) if parts else leaf.new_zeros(leaf.shape[1:])
    return _combine_elements(leaf, weight)


def _weighted_rows(weight: Tensor, part: Tensor) -> Tensor:
    """``weight @ part`` for one chunk of columns, in blocks of rows."""
    rows, exact = _blocks(weight.shape[0])
    if rows >= weight.shape[0]:
        only: Tensor = weight @ part
        return only
    blocks = zip(weight.split(rows), part.split(rows), strict=True)
    total: Tensor | None = None
    for w, x in blocks:
        block: Tensor = w @ x
        total = (wide(block) if exact else block) if total is None else total + block
    assert total is not None
    return total.to(part.dtype)


@lru_cache
def _blocks(clients: int) -> tuple[int, bool]:
    """The number of rows per block, and whether the blocks' sums must be added in float64.

    >>> _blocks(50), _blocks(1000)
    ((13, False), (16, True))
    """
    for count in range(1, _ROUNDINGS + 1):
        rows = max(1, -(-clients // count))
        if rows + count - 1 <= _ROUNDINGS:
            return rows, False
    return _ROUNDINGS, True


def _combine_elements(leaf: Tensor, weight: Tensor) -> Tensor:
    """Weights per element or sample: the weight's shape is a prefix of the leaf's."""
    if leaf.shape[: weight.dim()] != weight.shape:
        raise ValueError(f"the weight's shape {tuple(weight.shape)} is not a prefix of the leaf's {tuple(leaf.shape)}")
    if leaf.numel() == 0:
        return leaf.new_zeros(leaf.shape[1:])
    clients, prefix = leaf.shape[0], weight[0].numel()
    matrix = leaf.reshape(clients, prefix, -1)
    flat = weight.reshape(clients, prefix, 1)
    # The products of all clients are in memory at once, so chunks get smaller with more clients.
    chunk = max(1, _ELEMENTS // clients)
    rows_at_once = max(1, chunk // max(1, matrix.shape[2]))
    parts = [
        torch.cat([(w * part).sum(0, dtype=widest(leaf.device)).to(leaf.dtype) for part in x.split(chunk, 2)], dim=1)
        for w, x in zip(flat.split(rows_at_once, 1), matrix.split(rows_at_once, 1), strict=True)
    ]
    return torch.cat(parts).reshape(leaf.shape[1:])

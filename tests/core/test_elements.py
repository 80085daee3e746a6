"""Combining chunk by chunk: what the server makes of weights that nobody ever holds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm, server_step
from fedalloy.core.elements import combine_elements
from fedalloy.core.errors import AlgorithmError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import ElementRound, ElementWeighting
from fedalloy.core.tree import Chunk
from fedalloy.core.types import Cohort, Context, Contributions, Info, State
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.testing.comparing import copied, differences

CTX = Context(1, 3, Key.of(0))


class Noted(ElementRound):
    """Remembers which chunks it was shown; weights depend on the client, the value and the place."""

    def __init__(self, state: State) -> None:
        self.state, self.seen = state, list[Chunk]()

    def weigh_chunk(self, updates: Tensor, chunk: Chunk) -> Tensor:
        self.seen.append(chunk)
        place = torch.arange(chunk.columns.start, chunk.columns.stop, dtype=updates.dtype)
        return updates.abs() + place + torch.arange(len(updates), dtype=updates.dtype).unsqueeze(1)

    def close(self) -> tuple[State, Info]:
        return {"chunks": self.state["chunks"] + len(self.seen)}, {"chunks": torch.tensor(len(self.seen))}


@dataclass(frozen=True)
class Placed(ElementWeighting):
    """Element weights without any meaning."""

    @property
    def requires(self) -> frozenset[str]:
        return frozenset()

    def init(self, population: int) -> State:
        return {"chunks": 0}

    def open(self, cohort: Contributions, state: State, ctx: Context) -> Noted:
        return Noted(state)


def leaves(clients: int = 3, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    shapes = {"a.weight": (4, 5), "a.bias": (5,), "scale": (), "nothing": (0,)}
    return {name: Key.of(1).fold(name).normal(clients, *shape, dtype=dtype) for name, shape in shapes.items()}


@pytest.fixture(params=[1, 6, 7, 1 << 20])
def elements(request, monkeypatch):
    """Chunks of any size, down to one column at a time."""
    monkeypatch.setattr(tree, "_ELEMENTS", request.param)
    return request.param


def test_chunks_cover_every_column_once_and_in_order(elements):
    stacked = leaves()
    for name, leaf in stacked.items():
        parts = [(chunk, part) for chunk, part in tree.chunks(stacked) if chunk.leaf == name]
        assert torch.equal(torch.cat([tree.as_rows(leaf)[:, :0], *(p for _, p in parts)], 1), tree.as_rows(leaf))
        assert all(torch.equal(tree.as_rows(leaf)[:, chunk.columns], part) for chunk, part in parts)
        assert all(part.numel() <= max(elements, len(leaf)) for _, part in parts)


def test_chunk_by_chunk_is_all_at_once(elements):
    updates, rule = leaves(), Placed()
    cohort = Cohort(torch.arange(3), {"delta": updates})
    weights, state, info = rule.weigh(cohort, rule.init(3), CTX)
    means, combined = combine_elements(rule.open(cohort, rule.init(3), CTX), cohort, "delta", ("delta",))
    assert list(differences(combined["delta"], tree.combine(updates, weights), 1e-12)) == []
    by_leaf = {name: tree.as_rows(leaf).mean(1) for name, leaf in weights.items() if leaf.numel()}
    assert list(differences({name: means[name] for name in by_leaf}, by_leaf, 1e-12)) == []
    assert state["chunks"] == int(info["chunks"]) == sum(1 for _ in tree.chunks(updates))


def test_other_parts_get_the_weights_of_the_update(elements):
    updates, doubled = leaves(), {name: 2 * leaf for name, leaf in leaves().items()}
    round = Noted({"chunks": 0})
    cohort = Cohort(torch.arange(3), {"delta": updates, "other": doubled})
    _, combined = combine_elements(round, cohort, "delta", ("delta", "other"))
    assert list(differences(combined["other"], {n: 2 * leaf for n, leaf in combined["delta"].items()}, 1e-12)) == []


def test_a_part_of_other_leaves_is_refused():
    updates = leaves()
    cohort = Cohort(torch.arange(3), {"delta": updates, "control": {"a.weight": updates["a.weight"]}})
    with pytest.raises(AlgorithmError, match=r"weighted part 'control' has no leaf a\.bias of its shape"):
        combine_elements(Noted({"chunks": 0}), cohort, "delta", ("control",))


def test_the_server_opens_shows_and_closes(elements):
    rule, updates = Placed(), leaves()
    algorithm = Algorithm(Sgd(), rule, ServerSgd())
    params = {name: torch.zeros_like(leaf[0]) for name, leaf in updates.items()}
    cohort, state = Cohort(torch.arange(3), {"delta": updates}), algorithm.init(params, 3)
    before = copied(state), copied({"payload": cohort.payload, "stats": cohort.stats})
    step = server_step(algorithm, state, cohort, CTX)
    weights, _, _ = rule.weigh(cohort, state["weighting"], CTX)
    assert list(differences(step.state["shared"]["params"], tree.combine(updates, weights), 1e-12)) == []
    assert step.state["weighting"] == {"chunks": int(step.info["chunks"])}
    assert not isinstance(step.weights, Tensor)
    assert {name: tuple(mean.shape) for name, mean in step.weights.items()} == dict.fromkeys(updates, (3,))
    assert list(differences(state, before[0])) == []
    assert list(differences({"payload": cohort.payload, "stats": cohort.stats}, before[1])) == []


def test_single_precision_is_summed_in_double():
    """A thousand clients in float32: the error stays below the promise of ``tree.combine``."""
    x = Key.of(2).uniform(1000, 7)

    class Even(Noted):
        def weigh_chunk(self, updates: Tensor, chunk: Chunk) -> Tensor:
            return torch.full_like(updates, 1e-3)

    cohort = Cohort(torch.arange(1000), {"delta": {"w": x}})
    _, combined = combine_elements(Even({"chunks": 0}), cohort, "delta", ("delta",))
    exact = x.double().mean(0)
    assert combined["delta"]["w"].dtype == torch.float32
    assert bool(((combined["delta"]["w"].double() - exact).abs() <= 1e-6 * exact.abs()).all())

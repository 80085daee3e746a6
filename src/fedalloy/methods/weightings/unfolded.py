"""Weights learned in advance, a row per round: deep unfolding (Nakai-Kasai and Wadayama 2022, arXiv:2212.12191)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.errors import AlgorithmError, RoundRefused
from fedalloy.core.protocols import Task, Weighting
from fedalloy.core.registry import register
from fedalloy.core.types import Context, Contributions, Info, State, Weights

Rows = tuple[tuple[float, ...], ...]
LayerRows = tuple[tuple[tuple[float, ...], ...], ...]
_LEARN = "learn one for it with 'fedalloy unfold RECIPE'"


@register("weighting", "unfolded")
@dataclass(frozen=True)
class Unfolded(Weighting):
    """``weight_k = Theta[t, k]`` in round t, from a table of rounds x clients (x layers) that was learned in advance.

    Weights are never renormalised over those present: the share of an absent client stays on the received model,
    as if it had re-sent it. After the last row clients count by their data sizes. ``normalise`` is DUW-FedNova:
    ``weight_k = tau_eff Theta[t, k] / |a_k|_1`` with ``tau_eff = sum_k p_k tau_k`` (see ``nova``). ``layers`` names
    the last axis of a table with a weight for every layer. ``sizes`` are the clients' numbers of examples when the
    table was learned: a federation with other sizes is refused, and a round in which a client has another size has no
    effect; an empty list allows any. A client that took no step keeps its share, which stays on the received model. A
    ``table`` that is still the name of a file has not been learned yet (arXiv:2212.12191).
    When to use it: the same clients train together repeatedly, and you can afford to unroll a whole run in advance.

    >>> from fedalloy.core.types import Cohort
    >>> cohort = Cohort(torch.tensor([0, 2]), {}, {"num_examples": torch.tensor([10.0, 30.0])})
    >>> Unfolded(((0.5, 0.3, 0.2),)).weigh(cohort, {}, Context(1, 3, None))[0]
    tensor([0.5000, 0.2000], dtype=torch.float64)
    """

    table: Rows | LayerRows | str = ()
    layers: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    normalise: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.table, str):
            return
        shape = self._rows().shape
        if len(self.table) and len(shape) != 2 + bool(self.layers):
            wanted = "rounds x clients x layers" if self.layers else "rounds x clients (x layers, which are then named)"
            raise ValueError(f"unfolded: a table has the axes {wanted}, not {tuple(shape)}")
        if self.layers and len(self.table) and shape[2] != len(self.layers):
            raise ValueError(f"unfolded: {len(self.layers)} layers are named, the table has {shape[2]}")
        if self.sizes and len(self.table) and len(self.sizes) != shape[1]:
            raise ValueError(f"unfolded: {len(self.sizes)} sizes are given for {shape[1]} clients")

    @property
    def requires(self) -> frozenset[str]:
        return requirements(self.normalise)

    @property
    def weight_bound(self) -> float | None:
        if self.normalise or isinstance(self.table, str):
            return None
        largest: float = max([1.0, *self._rows().flatten().tolist()])
        return largest

    def init(self, population: int) -> State:
        """Refuse a missing table and one for another number of clients."""
        if isinstance(self.table, str):
            raise AlgorithmError(f"unfolded: there is no table '{self.table}' yet: {_LEARN} and -o {self.table}")
        learned_for = len(self.table[0]) if self.table else population
        if learned_for != population:
            raise AlgorithmError(
                f"unfolded: the table has weights for {learned_for} clients, this federation has {population}: {_LEARN}"
            )
        return {}

    def unsuited(self, task: Task) -> str | None:
        if len(self.sizes) != task.population:  # no sizes are given, or init refuses the table itself
            return None
        everyone = torch.arange(len(self.sizes))
        return self._other_size(everyone.tolist(), task.data("train", everyone).size.tolist())

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        reason = self._other_size(cohort.ids.tolist(), cohort.stats["num_examples"].tolist()) if self.sizes else None
        if reason:
            raise RoundRefused(reason)
        if ctx.round > len(self.table):
            sizes = cohort.stats["num_examples"].double()
            shares = sizes / sizes.sum().clamp(min=1e-12)
            return weights_of(shares, (), self.normalise, cohort), state, {}
        shares = self._rows()[ctx.round - 1][cohort.ids]
        return weights_of(shares, self.layers, self.normalise, cohort), state, {}

    def _rows(self) -> Tensor:
        if isinstance(self.table, str):
            raise AlgorithmError(f"unfolded: there is no table '{self.table}' yet: {_LEARN}")
        return torch.tensor(self.table, dtype=torch.float64)

    def _other_size(self, clients: list[int], sizes: list[float]) -> str | None:
        for client, size in zip(clients, sizes, strict=True):
            if size != self.sizes[client]:
                return (
                    f"unfolded: client {client} has {size:g} examples, the table was learned with one of "
                    f"{self.sizes[client]}: these are other clients; {_LEARN}, or set sizes = [] to use it anyway"
                )
        return None


def requirements(normalise: bool) -> frozenset[str]:
    """The statistics that weights from shares need."""
    return frozenset({"num_examples", *(("step_norm", "effective_steps") if normalise else ())})


def weights_of(shares: Tensor, layers: tuple[str, ...], normalise: bool, cohort: Contributions) -> Weights:
    """Weights on updates from the shares of those present, ``[C]`` or ``[C, layers]``; linear in the shares."""
    if normalise:
        factor = nova_factor(cohort.stats)
        shares = shares * (factor.unsqueeze(1) if shares.dim() > 1 else factor)
    if not layers:
        return shares
    return _by_leaf(shares, layers, cohort.template("delta"))


def nova_factor(stats: Mapping[str, Tensor]) -> Tensor:
    """``tau_eff / |a_k|_1``; 0 for a client that takes no step."""
    sizes, lengths = stats["num_examples"], stats["step_norm"]
    effective = (sizes / sizes.sum().clamp(min=1e-12) * stats["effective_steps"]).sum()
    return torch.where(lengths > 0, effective / lengths.clamp(min=1e-12), 0.0).double()


def _by_leaf(shares: Tensor, layers: tuple[str, ...], leaves: Mapping[str, Tensor]) -> Weights:
    groups = tree.layers(leaves)
    if tuple(groups) != layers:
        raise AlgorithmError(
            f"unfolded: the table has weights for the layers {', '.join(layers)}, the model has "
            f"{', '.join(groups)}: {_LEARN}"
        )
    return {leaf: shares[:, place] for place, members in enumerate(groups.values()) for leaf in members}

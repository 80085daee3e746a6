"""Every contribution is checked before it counts; a bad one is dropped and named."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.types import Cohort, Part, Payload, Tree


def misfit(payload: Payload, parts: Mapping[str, Part], shared: Mapping[str, Tree]) -> str | None:
    """Why one contribution's names, shapes or dtypes are not what was asked for; None when they are.

    >>> misfit({"delta": {}}, {"delta": Part()}, {"params": {"w": torch.zeros(2)}})
    "part 'delta' lacks w"
    """
    if payload.keys() != parts.keys():
        return f"sent the parts {_listed(payload)} instead of {_listed(parts)}"
    for name, part in parts.items():
        reason = _leaf_misfit(name, payload[name], part.template(shared))
        if reason:
            return reason
    return None


def screen(
    cohort: Cohort, update: str, max_norm: float | None = None, required: frozenset[str] = frozenset()
) -> tuple[Cohort, dict[int, str]]:
    """The cohort without contributions that are not finite or too long, or whose ``required`` statistics are not
    numbers, and why each was dropped."""
    if len(cohort) == 0:
        return cohort, {}
    finite = _finite_clients(cohort)
    dropped = {int(cohort.ids[row]): "not finite" for row in (~finite).nonzero().flatten().tolist()}
    for name in sorted(required & cohort.stats.keys()):
        for row in (finite & ~cohort.stats[name].isfinite()).nonzero().flatten().tolist():
            dropped[int(cohort.ids[row])] = f"statistic '{name}' is not finite"
    if max_norm is not None and cohort.payload[update]:
        lengths = tree.norms(cohort.payload[update]).cpu()
        for row in (finite & (lengths > max_norm)).nonzero().flatten().tolist():
            dropped[int(cohort.ids[row])] = f"norm {float(lengths[row]):.4g} above the limit {max_norm:g}"
    if not dropped:
        return cohort, {}
    kept = [row for row, client in enumerate(cohort.ids.tolist()) if client not in dropped]
    return cohort.select(torch.tensor(kept, dtype=torch.int64)), dropped


def _finite_clients(cohort: Cohort) -> Tensor:
    """Which clients sent finite numbers only. A sum is finite only if every term is, and reading once is cheaper than
    a mask; the rare overflow of finite terms is looked at again."""
    leaves = [leaf for part in cohort.payload.values() for leaf in part.values() if leaf.is_floating_point()]
    if not leaves:
        return torch.ones(len(cohort), dtype=torch.bool)
    sums = torch.stack([tree.as_rows(leaf).sum(1) for leaf in leaves]).isfinite().all(0).cpu()
    if bool(sums.all()):
        return sums
    return torch.stack([tree.as_rows(leaf).isfinite().all(1) for leaf in leaves]).all(0).cpu()


def _leaf_misfit(part: str, leaves: Tree, expected: Tree) -> str | None:
    if missing := expected.keys() - leaves.keys():
        return f"part '{part}' lacks {', '.join(sorted(missing))}"
    if extra := leaves.keys() - expected.keys():
        return f"part '{part}' has unexpected {', '.join(sorted(extra))}"
    for name, leaf in leaves.items():
        wanted = expected[name]
        if leaf.shape != wanted.shape:
            return f"part '{part}': {name} has shape {tuple(leaf.shape)} instead of {tuple(wanted.shape)}"
        if leaf.dtype != wanted.dtype:
            return f"part '{part}': {name} has dtype {leaf.dtype} instead of {wanted.dtype}"
    return None


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "(none)"

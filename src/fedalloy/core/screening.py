"""Checks of every contribution before it counts; a bad one is dropped, with the reason."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedalloy.core.contributions import Contributions
from fedalloy.core.statistics import ANY_NUMBER, ANY_SIZE, STATISTICS, SizeLimits, Statistic, all_in_range, out_of_range
from fedalloy.core.types import Part, Payload, Tree

_HINTS = {"num_examples": " (max_examples)"}


def misfit(payload: Payload, parts: Mapping[str, Part], shared: Mapping[str, Tree]) -> str | None:
    """Why one contribution's names, shapes or dtypes are not the expected ones; None if they are.

    >>> import torch
    >>> misfit({"delta": {}}, {"delta": Part()}, {"params": {"w": torch.zeros(2)}})
    "part 'delta' lacks w"
    """
    return unlike(payload, {name: part.template(shared) for name, part in parts.items()})


def unlike(payload: Payload, templates: Mapping[str, Tree]) -> str | None:
    """The same, from the templates of the expected parts."""
    if payload.keys() != templates.keys():
        return f"sent the parts {_listed(payload)} instead of {_listed(templates)}"
    reasons = (_leaf_misfit(name, payload[name], like) for name, like in templates.items())
    return next(filter(None, reasons), None)


def screen(
    cohort: Contributions,
    update: str,
    max_norm: float | None = None,
    needed: frozenset[str] = frozenset(),
    sizes: SizeLimits = ANY_SIZE,
    declared: Mapping[str, Statistic] = STATISTICS,
) -> tuple[Contributions, dict[int, str]]:
    """The cohort without bad contributions, and the reason for each dropped one. Dropped are contributions that are not
    finite or too long, lack a ``needed`` statistic, have statistics outside of their declared ranges, or buffers that
    no model can have. Only statistics and notes are read, not the payload."""
    if len(cohort) == 0:
        return cohort, {}
    notes, clean = cohort.notes, cohort.notes.clean or bool(cohort.notes.finite.all())
    reasons = {} if clean else dict.fromkeys(_true(~notes.finite.all(0)), "not finite")
    for found in (
        _false_numbers(cohort, needed, sizes, declared),
        _impossible(cohort),
        _long(cohort, update, max_norm),
    ):
        reasons = {**found, **reasons}
    if not reasons:
        return cohort, {}
    kept = [row for row in range(len(cohort)) if row not in reasons]
    dropped = {int(cohort.ids[row]): reasons[row] for row in sorted(reasons)}
    return cohort.select(cohort.ids[kept]), dropped


def _false_numbers(
    cohort: Contributions, needed: frozenset[str], sizes: SizeLimits, declared: Mapping[str, Statistic]
) -> dict[int, str]:
    """Rows whose statistics are impossible, with reasons."""
    stats = cohort.stats
    if not stats:
        return {}
    declared = _with_sizes(declared, sizes.statistic)
    reasons = {}
    if "num_examples" in stats and not sizes.look(stats["num_examples"])[1]:
        for row in _true(sizes.changed(stats["num_examples"])):
            assert sizes.known is not None
            now, before = float(stats["num_examples"][row]), float(sizes.known[row])
            reasons[row] = f"statistic 'num_examples' is {now:g}, but was {before:g} in its first round of this run"
    if all_in_range(stats, declared, needed):
        return reasons
    for which, row in out_of_range(stats, declared, needed).nonzero().tolist():
        name, value = list(stats)[which], stats[list(stats)[which]][row].item()
        problem = declared.get(name, ANY_NUMBER).problem(value)
        reasons[row] = f"statistic '{name}' {problem}{_HINTS.get(name, '') if value > sizes.most else ''}"
    return reasons


def _with_sizes(declared: Mapping[str, Statistic], statistic: Statistic) -> Mapping[str, Statistic]:
    """The declarations with the limits on sizes. The last answer is kept: it is the same in every round of a run."""
    global _last_declared
    before, size, found = _last_declared
    if before is not declared or size is not statistic:
        found = {**declared, "num_examples": statistic}
        _last_declared = declared, statistic, found
    return found


_last_declared: tuple[Mapping[str, Statistic], Statistic | None, Mapping[str, Statistic]] = ({}, None, {})


def _impossible(cohort: Contributions) -> dict[int, str]:
    """Rows with impossible buffers: a norm layer's variance and its count of batches are never negative."""
    leaves, negative = cohort.notes.leaves, cohort.notes.negative
    if cohort.notes.clean or not bool(negative.any()):
        return {}
    return {row: f"part 'buffers': {leaves[leaf][1]} is negative" for leaf, row in negative.nonzero().tolist()}


def _long(cohort: Contributions, update: str, max_norm: float | None) -> dict[int, str]:
    """Rows whose update is longer than allowed."""
    if max_norm is None:
        return {}
    lengths = cohort.notes.norms(update)
    return {row: f"norm {float(lengths[row]):.4g} above the limit {max_norm:g}" for row in _true(lengths > max_norm)}


def _true(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist() if bool(mask.any()) else []


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

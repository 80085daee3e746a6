"""Who gains and who loses: each client's score under an algorithm against its score under the first one, same seed.

A gain is positive where the client is served better, whatever the direction of the metric. Seeds often redraw the
partition; client 3 of one seed is then somebody else than client 3 of another, and clients are counted seed by seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from fedalloy.experiment.records.reading import last_clients, newest_rows, read_run
from fedalloy.results.clients import Client, clients_at
from fedalloy.results.evidence import FEWEST_PAIRS, exact_p, fewest_by_ranks, holm
from fedalloy.results.outcome import RunOutcome
from fedalloy.results.redrawn import redrawn as redrawn_by
from fedalloy.results.runs import by_name
from fedalloy.results.served import client_values, direction, scored

_SAME = 1e-12
"""Means over seeds that differ by less are equal: sums of the same numbers in another order."""


class ScoredRun(Protocol):
    """A run with its clients' last scores by one metric; a :class:`fedalloy.results.summaries.RunSummary` is one."""

    @property
    def outcome(self) -> RunOutcome:
        """How it ended."""

    @property
    def manifest(self) -> Mapping[str, Any]:
        """Its partition."""

    @property
    def clients(self) -> Sequence[Client]:
        """The clients' scores."""

    @property
    def name(self) -> str:
        """The algorithm's name."""

    @property
    def higher_is_better(self) -> bool | None:
        """The direction of the metric."""


@dataclass(frozen=True)
class ClientScores:
    """The last scores of a run's clients, without its curves."""

    outcome: RunOutcome
    manifest: Mapping[str, Any]
    clients: tuple[Client, ...]

    @property
    def name(self) -> str:
        """The algorithm's name."""
        return self.outcome.name

    @property
    def higher_is_better(self) -> bool | None:
        """The direction of the target metric."""
        return self.outcome.higher_is_better


@dataclass(frozen=True)
class ClientGain:
    """One client: its mean scores over the seeds in which both runs scored it, and the differences seed by seed.

    ``seed`` is None where the client is the same in every seed.
    """

    client: str
    seed: int | None
    score: float
    first: float
    differences: tuple[float, ...]

    @property
    def gain(self) -> float:
        """The mean difference; infinite where a loss overflowed under one of the two, 0 where they are equal."""
        if math.isfinite(self.score) and math.isclose(self.score, self.first, rel_tol=_SAME, abs_tol=_SAME):
            return 0.0
        return sum(self.differences) / len(self.differences)  # fmean refuses infinities of both signs

    @property
    def label(self) -> str:
        """The client's name, with its seed where seeds have different clients."""
        return self.client if self.seed is None else f"{self.client} in seed {self.seed}"


@dataclass(frozen=True, repr=False)
class ClientGains:
    """An algorithm against the first one, client by client; the client that loses most comes first.

    ``redrawn`` tells that seeds have different clients, ``resplit`` that they have the same clients and draw which of
    their examples are for testing. ``missing`` counts clients without a score under one of the
    two. Where no client could be compared, ``reason`` says why.
    """

    name: str
    against: str
    metric: str
    clients: tuple[ClientGain, ...] = ()
    seeds: tuple[int, ...] = ()
    redrawn: bool = False
    missing: int = 0
    reason: str = ""
    resplit: bool = False

    def __repr__(self) -> str:
        told = self.reason or f"{self.better} clients are better off, {self.worse} worse"
        return f"<{self.name} against {self.against} in {self.metric}: {told}>"

    @property
    def better(self) -> int:
        """How many clients are better off."""
        return sum(one.gain > 0 for one in self.clients)

    @property
    def worse(self) -> int:
        """How many clients are worse off."""
        return sum(one.gain < 0 for one in self.clients)

    def shares(self, sign: int) -> list[float]:
        """The share of clients better off (``sign`` 1) or worse off (-1): one number, or one per seed if redrawn."""
        groups: dict[int | None, list[ClientGain]] = {}
        for one in self.clients:
            groups.setdefault(one.seed, []).append(one)
        return [statistics.fmean(sign * one.gain > 0 for one in some) for some in groups.values()]

    @property
    def seeds_needed(self) -> int:
        """The fewest seeds with which the exact test can tell a single one of these clients from chance."""
        return fewest_by_ranks(max(1, len(self.clients)))

    @cached_property
    def decided(self) -> tuple[int, int] | None:
        """How many single clients are better and worse off at 95 %, by Holm over clients; None with too few seeds.

        The exact test decides: a client has few test examples, so equal differences in three seeds are not rare, and
        Student's t would call them certain. It needs seeds that do not share examples (``resplit``).
        """
        if self.redrawn or self.resplit or not self.clients or len(self.seeds) < self.seeds_needed:
            return None
        real = holm([_chance(one.differences) for one in self.clients])
        sure = [one.gain for one, decided in zip(self.clients, real, strict=True) if decided]
        return sum(gain > 0 for gain in sure), sum(gain < 0 for gain in sure)

    @property
    def text(self) -> str:
        """One line; empty where no client could be compared.

        >>> both = ClientGain("anna", None, 0.5, 0.75, (-0.25,)), ClientGain("ben", None, 0.5, 0.25, (0.25,))
        >>> ClientGains("prox", "avg", "accuracy", both, (0,)).text
        'prox: 1 of 2 clients better off, 1 worse off; loses most: anna (-0.250)'
        """
        if not self.clients:
            return ""
        lost = self.clients[0]
        most = f"; loses most: {lost.label} ({gain_text(lost.gain)})" if lost.gain < 0 else ""
        return f"{self.name}: {self.counts}{most}"

    @property
    def basis(self) -> str:
        """What the line of an algorithm is based on."""
        if len(self.seeds) == 1:
            return f"Clients against {self.against}, one seed (a single draw)"
        if not self.redrawn:
            over = f"Clients against {self.against}, mean over {len(self.seeds)} seeds"
            return over + (" (too few to tell from chance)" if len(self.seeds) < FEWEST_PAIRS else "")
        return f"Clients against {self.against}; each of {len(self.seeds)} seeds has other clients (ranges over seeds)"

    @property
    def counts(self) -> str:
        """How many clients are better and worse off; shares over seeds where these have different clients."""
        if not self.redrawn:
            return f"{self.better} of {len(self.clients)} clients better off, {self.worse} worse off"
        (better, inside), (worse, also) = (share_text(self.shares(sign)) for sign in (1, -1))
        return f"{better} of clients better off{inside}, {worse} worse off{also}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        sure = self.decided
        plain = {key: value for key, value in vars(self).items() if key not in ("clients", "decided")}
        return plain | {
            "better": self.better,
            "worse": self.worse,
            "better_shares": self.shares(1),
            "worse_shares": self.shares(-1),
            "decided": {"better": sure[0], "worse": sure[1]} if sure else None,
            "seeds_needed": self.seeds_needed,
            "clients": [
                {"client": one.client, "seed": one.seed, "gain": one.gain, "score": one.score, "first": one.first,
                 "seeds": len(one.differences)}
                for one in self.clients
            ],
        }  # fmt: skip


def lines(gains: Sequence[ClientGains]) -> list[str]:
    """One line per algorithm, under a heading that says what the lines are based on."""
    groups: dict[str, list[str]] = {}
    for one in gains:
        if one.clients:
            groups.setdefault(one.basis, []).append(one.text)
    return [line for basis, some in groups.items() for line in (f"{basis}:", *(f"  {text}" for text in some))]


def read_scores(outcome: RunOutcome) -> ClientScores:
    """The clients' scores of a run by its target metric, from its folder."""
    if outcome.folder is None or not (outcome.folder / "recipe.toml").is_file():
        return ClientScores(outcome, {}, ())
    record = read_run(outcome.folder)
    manifest = record.manifest or {}
    row = scored(last_clients(outcome.folder))
    summary = _summary_at(outcome.folder, row.get("round"), outcome.metric)
    values = client_values(row, outcome.metric, direction(record, outcome.metric), summary)
    return ClientScores(outcome, manifest, tuple(clients_at(row, values, manifest)))


def _summary_at(folder: Path, round: int | None, metric: str) -> Mapping[str, Any] | None:
    rows = (row for row in newest_rows(folder / "rounds.jsonl") if row["round"] == round)
    return (next(rows, {}).get("evaluation") or {}).get(metric)


def gain_text(gain: float) -> str:
    """A gain with its sign."""
    return f"{gain:+.3f}" if math.isfinite(gain) else "not finite"


def client_gains(runs: Sequence[ScoredRun], metric: str) -> list[ClientGains]:
    """Every algorithm against the first one; only finished runs are used."""
    (first, theirs), *others = by_name(runs).items() or [("", [])]
    return [_gains(name, mine, first, theirs, metric) for name, mine in others]


def _gains(name: str, mine: Sequence[ScoredRun], first: str, theirs: Sequence[ScoredRun], metric: str) -> ClientGains:
    higher = theirs[0].higher_is_better
    if higher is None:
        return ClientGains(name, first, metric, reason=f"'{metric}' has no direction: nobody gains or loses by it")
    if any(run.outcome.ends_at_target for run in (*mine, *theirs)):
        return ClientGains(name, first, metric, reason="runs end when they reach the target, so their scores are alike")
    base = {run.outcome.seed: run for run in theirs if run.outcome.finished}
    pairs = [(run, base[run.outcome.seed]) for run in mine if run.outcome.finished and run.outcome.seed in base]
    if not pairs:
        return ClientGains(name, first, metric, reason=f"no seed of {name} and {first} has finished under both")
    pairs = [(run, other) for run, other in pairs if _clients_of(run) == _clients_of(other)]
    if not pairs:
        return ClientGains(name, first, metric, reason=f"{name} and {first} do not have the same clients")
    redrawn = len({_clients_of(run) for run, _ in pairs}) > 1 or (len(pairs) > 1 and _clients_of(pairs[0][0]) is None)
    return _collected(name, first, metric, pairs, redrawn, higher)


def _collected(
    name: str, first: str, metric: str, pairs: Sequence[tuple[ScoredRun, ScoredRun]], redrawn: bool, higher: bool
) -> ClientGains:
    together: dict[tuple[Hashable, int | None], list[tuple[str, float, float]]] = {}
    for run, other in pairs:
        seed = run.outcome.seed if redrawn else None
        for key, label, score, before in _matched(run, other):
            both = together.setdefault((key, seed), [])
            both += [] if math.isnan(score - before) else [(label, score, before)]
    found = [_one(seed, some, higher) for (_, seed), some in together.items() if some]
    known = sorted((one for one in found if not math.isnan(one.gain)), key=lambda one: one.gain)
    seeds = tuple(sorted(run.outcome.seed for run, _ in pairs))
    drawn = redrawn_by(run.outcome.drawn for run, _ in pairs)
    resplit = not redrawn and drawn is not None and bool(drawn.reused)
    reason = "" if known else f"no client was scored by '{metric}' under both"
    return ClientGains(name, first, metric, tuple(known), seeds, redrawn, len(together) - len(known), reason, resplit)


def _matched(run: ScoredRun, other: ScoredRun) -> Iterator[tuple[Hashable, str, float, float]]:
    named = _names(run.manifest) is not None
    before = {client.name if named else client.id: client.score for client in other.clients}
    for client in run.clients:
        key = client.name if named else client.id
        yield key, client.name, client.score, before.get(key, math.nan)


def _one(seed: int | None, some: Sequence[tuple[str, float, float]], higher: bool) -> ClientGain:
    labels, scores, before = zip(*some, strict=True)
    sign = 1 if higher else -1
    differences = tuple(sign * (mine - theirs) for _, mine, theirs in some)
    return ClientGain(labels[0], seed, statistics.fmean(scores), statistics.fmean(before), differences)


def _clients_of(run: ScoredRun) -> Hashable:
    """What tells one set of clients from another: names of their own, or which examples each holds; None if unknown."""
    return "named" if _names(run.manifest) is not None else run.manifest.get("digest")


def _names(manifest: Mapping[str, Any]) -> Sequence[str] | None:
    """Names that identify clients in every seed; not those of clients that share one."""
    names = manifest.get("names")
    return names if names and len(set(names)) == len(names) else None


def share_text(shares: Sequence[float]) -> tuple[str, str]:
    """The mean share, and the range over seeds.

    >>> share_text([0.5, 0.25]), share_text([0.5])
    (('38 %', ' (25 to 50 %)'), ('50 %', ''))
    """
    mean, low, high = (f"{100 * share:.0f}" for share in (statistics.fmean(shares), min(shares), max(shares)))
    return f"{mean} %", f" ({low} to {high} %)" if len(shares) > 1 else ""


def _chance(differences: Sequence[float]) -> float:
    """The exact p of one client; NaN where there is none."""
    exact = exact_p(differences) if all(map(math.isfinite, differences)) else None
    return math.nan if exact is None else exact[0]

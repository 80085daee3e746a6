"""Where the runs of a claim differ from what the paper ran: such runs are preliminary, whatever they show.

Rounds, clients and cohort are compared with the published ones, within the claim's tolerance. Where the paper does not
state them, the recipe's own settings take their place. Other settings that were changed are departures as well, except
the engine and the seeds. Adapted data are declared, not measured: they are judged and labelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedalloy.studies.reproduce.declaring import Claim, PaperExperiment, Protocol, declared_recipe
from fedalloy.studies.reproduce.results import Measured, Results, changes

_LENGTHS = ("rounds", "clients", "cohort")


def departures(
    experiment: PaperExperiment, claim: Claim, case: str, results: Results, others: Sequence[str]
) -> list[str]:
    """Every way in which the runs of the claim's method and of these others are not the published experiment."""
    runs = [run for name in (claim.method, *others) for run in results.of(case, name)]
    changed = dict.fromkeys(text for run in runs if (text := run.changed or changes(results.settings)))
    return [
        *(["a quick run"] if results.quick else []),
        *_rounds(experiment, case, runs, claim.length_tolerance),
        *_clients(experiment.protocol.of(case), runs, claim.length_tolerance),
        *changed,
    ]


def labels(experiment: PaperExperiment, case: str) -> list[str]:
    """What readers of a verdict have to know: adapted data and settings, lengths that the paper does not state."""
    protocol = experiment.protocol.of(case)
    data = [] if protocol.data == "as published" else [f"adapted data: {protocol.data}"]
    silent = [what for what in _LENGTHS if getattr(protocol, what) == "not stated"]
    data += [f"adapted: {protocol.adapted}"] if protocol.adapted else []
    return [*data, *([f"{' and '.join(silent)} not stated in the paper"] if silent and experiment.paper else [])]


def wanted_rounds(experiment: PaperExperiment, case: str) -> int | None:
    """The published number of rounds, or the recipe's where the paper does not state it; None where nobody knows."""
    stated = experiment.protocol.of(case).rounds
    if isinstance(stated, int):
        return stated
    return declared_recipe(experiment, case).run.rounds if experiment.cases else None


def planned_rounds(runs: Iterable[Measured]) -> list[int]:
    """How many rounds some runs were to have, ascending, each number once."""
    return sorted({run.round if run.planned is None else run.planned for run in runs})


def _rounds(experiment: PaperExperiment, case: str, runs: Sequence[Measured], tolerance: float) -> list[str]:
    wanted, found = wanted_rounds(experiment, case), planned_rounds(runs)
    if wanted is None or _close(found, wanted, tolerance):
        return []
    stated = experiment.protocol.of(case).rounds == wanted
    return [_share(found, wanted, "rounds" if stated else "rounds of the recipe")]


def _clients(protocol: Protocol, runs: Sequence[Measured], tolerance: float) -> list[str]:
    """Departures in the number of clients, and in how many of them take part in a round."""
    told = []
    for name, unit in (("clients", "clients"), ("cohort", "clients a round")):
        published, found = getattr(protocol, name), sorted({getattr(run, name) or 0 for run in runs})
        if isinstance(published, int) and not _close(found, published, tolerance):
            told.append(_share(found, published, unit) if found[0] else f"{name} not recorded")
    return told


def _close(found: Sequence[int], published: int, tolerance: float) -> bool:
    return all(abs(one - published) <= tolerance * published for one in found)


def _share(found: Sequence[int], published: int, what: str) -> str:
    """As text.

    >>> _share([60], 200, "rounds"), _share([18, 25, 61], 500, "rounds")
    ('60 of 200 rounds (30 %)', '18 to 61 of 500 rounds (4 to 12 %)')
    """
    ends = list(dict.fromkeys((found[0], found[-1])))
    shares = list(dict.fromkeys(f"{100 * one / published:.0f}" for one in ends))
    return f"{' to '.join(map(str, ends))} of {published} {what} ({' to '.join(shares)} %)"

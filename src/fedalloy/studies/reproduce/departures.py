"""Where the runs of a claim differ from what the paper ran: such runs are preliminary, whatever they show.

Rounds, clients and cohort are compared with the published ones, within the claim's tolerance. Where the paper does not
state them, the recipe's own settings take their place. Other settings that were changed are departures as well, except
the engine and the seeds. Adapted data are declared, not measured: they are judged and labelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedalloy.studies.reproduce.declaring import Claim, PaperExperiment, Protocol, declared_recipe
from fedalloy.studies.reproduce.results import Measured, Results, summary_of_settings

_SAME_EXPERIMENT = ("engine.", "run.seeds")
_LENGTHS = ("rounds", "clients", "cohort")


def departures(
    experiment: PaperExperiment, claim: Claim, case: str, results: Results, others: Sequence[str]
) -> list[str]:
    """Every way in which the runs of the claim's method and of these others are not the published experiment."""
    protocol = experiment.protocol.of(case)
    runs = [run for name in (claim.method, *others) for run in results.of(case, name)]
    found = [text for what in _LENGTHS if (text := _length(what, protocol, runs, claim.length_tolerance))]
    return [*(["a quick run"] if results.quick else []), *found, *_changed(experiment, case, protocol, results)]


def labels(experiment: PaperExperiment, case: str) -> list[str]:
    """What readers of a verdict have to know: adapted data and settings, lengths that the paper does not state."""
    protocol = experiment.protocol.of(case)
    data = [] if protocol.data == "as published" else [f"adapted data: {protocol.data}"]
    silent = [what for what in _LENGTHS if getattr(protocol, what) == "not stated"]
    data += [f"adapted: {protocol.adapted}"] if protocol.adapted else []
    return [*data, *([f"{' and '.join(silent)} not stated in the paper"] if silent and experiment.paper else [])]


def changes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that make it another experiment: all but the engine and the seeds.

    >>> changes({"engine.device": "cuda", "run.rounds": 30})
    {'run.rounds': 30}
    """
    return {path: value for path, value in settings.items() if not path.startswith(_SAME_EXPERIMENT)}


def wanted_rounds(experiment: PaperExperiment, case: str) -> int | None:
    """The published number of rounds, or the recipe's where the paper does not state it; None where nobody knows."""
    stated = experiment.protocol.of(case).rounds
    if isinstance(stated, int):
        return stated
    return declared_recipe(experiment, case).run.rounds if experiment.cases else None


def planned_rounds(runs: Iterable[Measured]) -> list[int]:
    """How many rounds some runs were to have, ascending, each number once."""
    return sorted({run.round if run.planned is None else run.planned for run in runs})


def _length(what: str, protocol: Protocol, runs: Sequence[Measured], tolerance: float) -> str:
    published = getattr(protocol, what)
    if not isinstance(published, int) or not runs:
        return ""
    if what == "rounds":
        found: list[int] = planned_rounds(runs)
    else:
        known = {getattr(run, what) for run in runs}
        if None in known:
            return f"{what} not recorded"
        found = sorted(known)
    return "" if all(abs(one - published) <= tolerance * published for one in found) else _share(found, published, what)


def _share(found: Sequence[int], published: int, what: str) -> str:
    """As text.

    >>> _share([60], 200, "rounds"), _share([18, 25, 61], 500, "rounds")
    ('60 of 200 rounds (30 %)', '18 to 61 of 500 rounds (4 to 12 %)')
    """
    ends = list(dict.fromkeys((found[0], found[-1])))
    shares = list(dict.fromkeys(f"{100 * one / published:.0f}" for one in ends))
    unit = "clients a round" if what == "cohort" else what
    return f"{' to '.join(map(str, ends))} of {published} {unit} ({' to '.join(shares)} %)"


def _changed(experiment: PaperExperiment, case: str, protocol: Protocol, results: Results) -> list[str]:
    """Settings that make it another experiment; a stated number of rounds is compared with the runs instead."""
    found = changes(results.settings)
    rounds, wanted = found.pop("run.rounds", None), wanted_rounds(experiment, case)
    told = [summary_of_settings(found)] if found else []
    if rounds in (None, wanted) or wanted is None or protocol.rounds != "not stated":
        return told
    return [_share([rounds], wanted, "rounds").replace(" of ", " of the recipe's "), *told]

"""Which wire transforms go together, checked when an algorithm is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedalloy.core.errors import AlgorithmError
from fedalloy.core.packing import Packings
from fedalloy.core.protocols import Wire
from fedalloy.core.types import Part


def packings_of(wires: Sequence[Wire]) -> Packings:
    """How the parts lie on the wire after all transforms; the last word on a part counts."""
    found: Packings = {}
    for wire in wires:
        found = wire.packings(found)
    return found


def check_wires(wires: Sequence[Wire], parts: Mapping[str, Part], weight_bound: float | None, rule: str) -> None:
    """Refuse transforms of parts that nobody sends, compression where 0 means something, and noise that hides nothing:
    without clipping, on some parts only, or under a weighting that can amplify what it was to hide."""
    for wire in wires:
        _check_parts(wire, parts)
        if wire.needs_weight_bound and weight_bound is None:
            raise AlgorithmError(
                f"wire {_name(wire)} needs a weighting that bounds what one client can count for, and "
                f"{rule} has no such bound: choose one whose weight_bound is not None, such as 'uniform' or 'samples'"
            )
    for part in packings_of(wires):
        if part in parts and parts[part].neutral:
            raise AlgorithmError(
                f"the part '{part}' cannot be compressed: where a client has nothing to say it is "
                f"{parts[part].neutral:g}, and what a compressor leaves out becomes 0"
            )
    if any(wire.needs_clipping for wire in wires):
        for part in parts:
            _check_noise([wire for wire in wires if wire.changes is None or part in wire.changes], part)


def check_buffers(wires: Sequence[Wire]) -> None:
    """Refuse noise for a model with buffers: they are averages of the data, sent as they are."""
    noisy = next((wire for wire in wires if wire.needs_clipping), None)
    if noisy is not None:
        raise AlgorithmError(
            f"wire {_name(noisy)} cannot work on the buffers of a model, and this model has some, which would be sent "
            "without noise: choose a model without BatchNorm (norm = 'group' where the model has such an argument)"
        )


def _check_parts(wire: Wire, parts: Mapping[str, Part]) -> None:
    unknown = (wire.changes or frozenset()) - parts.keys()
    if unknown:
        raise AlgorithmError(
            f"wire {_name(wire)} works on the part '{min(unknown)}', which the solver does not send; sent: "
            f"{', '.join(sorted(parts))} (the buffers of a model always travel as they are)"
        )


def _check_noise(wires: Sequence[Wire], part: str) -> None:
    """The transforms of one part: noise somewhere, and nothing but clipping directly before it."""
    if not any(wire.needs_clipping for wire in wires):
        raise AlgorithmError(f"the part '{part}' is sent without noise: {_ADVICE.format(part=part)}")
    for before, wire in zip([None, *wires], wires, strict=False):
        if wire.needs_clipping and not (before is not None and before.clips):
            raise AlgorithmError(
                f"wire {_name(wire)} on the part '{part}' comes without clipping directly before it: "
                f"{_ADVICE.format(part=part)}"
            )


_ADVICE = (
    "where noise is used, every part that is sent needs 'clip' with part = '{part}' and, next on that part, 'noise'"
)


def _name(rule: object) -> str:
    return f"'{type(rule).__name__}'"

"""Checks of which wire transforms can be combined, made when an algorithm is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedalloy.core.errors import AlgorithmError
from fedalloy.core.packing import Packings
from fedalloy.core.protocols import Wire
from fedalloy.core.types import Part


def packings_of(wires: Sequence[Wire]) -> Packings:
    """The packed forms of the parts after all transforms; for each part the last transform decides."""
    found: Packings = {}
    for wire in wires:
        found = wire.packings(found)
    return found


def check_wires(wires: Sequence[Wire], parts: Mapping[str, Part], weight_bound: float | None, rule: str) -> None:
    """Refuse transforms of parts that are not sent, compression of parts whose neutral number is not 0, and useless
    noise: without clipping, on some parts only, or with a weighting that can amplify one client's update."""
    for wire in wires:
        _check_parts(wire, parts)
        if wire.needs_weight_bound and weight_bound is None:
            raise AlgorithmError(
                f"wire {_name(wire)} needs a weighting that bounds one client's weight, but "
                f"{rule} has no such bound: choose one whose weight_bound is not None, such as 'uniform' or 'samples'"
            )
    for part in packings_of(wires):
        if part in parts and parts[part].neutral:
            raise AlgorithmError(
                f"the part '{part}' cannot be compressed: its neutral number is {parts[part].neutral:g}, but a "
                "compressor sets left-out entries to 0"
            )
    if any(wire.needs_clipping for wire in wires):
        for part in parts:
            _check_noise([wire for wire in wires if wire.changes is None or part in wire.changes], part)


def check_buffers(wires: Sequence[Wire]) -> None:
    """Refuse noise for a model with buffers: they are averages of the data and would be sent without noise."""
    noisy = next((wire for wire in wires if wire.needs_clipping), None)
    if noisy is not None:
        raise AlgorithmError(
            f"wire {_name(noisy)} does not work on buffers, and those of this model would be sent without noise: "
            "choose a model without BatchNorm (norm = 'group' if the model has this argument)"
        )


def _check_parts(wire: Wire, parts: Mapping[str, Part]) -> None:
    unknown = (wire.changes or frozenset()) - parts.keys()
    if unknown:
        raise AlgorithmError(
            f"wire {_name(wire)} works on the part '{min(unknown)}', which the solver does not send; sent: "
            f"{', '.join(sorted(parts))} (the buffers of a model are always sent as they are)"
        )


def _check_noise(wires: Sequence[Wire], part: str) -> None:
    """Refuse transforms of one part without noise, or with noise that does not directly follow clipping."""
    if not any(wire.needs_clipping for wire in wires):
        raise AlgorithmError(f"the part '{part}' is sent without noise: {_ADVICE.format(part=part)}")
    for before, wire in zip([None, *wires], wires, strict=False):
        if wire.needs_clipping and not (before is not None and before.clips):
            raise AlgorithmError(
                f"wire {_name(wire)} on the part '{part}' does not directly follow clipping: "
                f"{_ADVICE.format(part=part)}"
            )


_ADVICE = "with noise, every part that is sent needs 'clip' with part = '{part}' and, next on that part, 'noise'"


def _name(rule: object) -> str:
    return f"'{type(rule).__name__}'"

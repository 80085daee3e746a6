"""Clients as a user names them: by their number, or by the name that they have in the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral

from fedalloy.core.errors import SpecError, nearest

Client = int | str
"""A client's number (0, 1, ...), or its name where the data name clients."""


def names_of(names: Sequence[str] | None) -> dict[str, int]:
    """The number of every name.

    >>> names_of(("north", "south"))
    {'north': 0, 'south': 1}
    """
    return {str(name): number for number, name in enumerate(names or ())}


def number_of(client: object, names: Mapping[str, int], population: int) -> int:
    """The number of a client of a population; a number is never taken for a name.

    >>> number_of("south", {"north": 0, "south": 1}, 2)
    1
    """
    number = named(client, names, f"its number, 0 to {population - 1}")
    if not 0 <= number < population:
        raise SpecError(f"client {number} does not exist: clients are 0 to {population - 1}")
    return number


def named(client: object, names: Mapping[str, int], otherwise: str) -> int:
    """The number that a number or a name stands for; ``otherwise`` says how else a client may be given."""
    if isinstance(client, str) and names:
        if client not in names:
            raise SpecError(f"no client is called '{client}': {nearest(client, names)}")
        return names[client]
    if isinstance(client, bool) or not isinstance(client, Integral):
        either = f"{otherwise}{', or by its name' if names else ''}"
        raise SpecError(f"a client is given by {either}, got {client!r}")
    return int(client)

"""What rules that decide online recorded, for their regret."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Item = TypeVar("Item")


def responses_of(info: Mapping[str, Item]) -> Item | None:
    """The responses of the whole population: those of a rule that sees a cohort alone are an estimate.

    >>> responses_of({"responses": [0.1], "estimate": [0.1, 0.3]}), responses_of({"responses": [0.2, 0.4]})
    ([0.1, 0.3], [0.2, 0.4])
    """
    return info.get("estimate", info.get("responses"))

"""The direction of a metric and comparisons based on it: better scores, reached targets, the worst served clients.

Only the registration of a metric declares its direction (:func:`fedalloy.core.registry.register`); the first call
imports the metrics, and with them torch.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Container, Iterable
from typing import TypeVar

Item = TypeVar("Item")
_TOP_K = re.compile(r"top(\d+)")
_asking = threading.Lock()


def higher_is_better(metric: str) -> bool | None:
    """True, False, or None for a metric without a direction or an unknown one.

    >>> higher_is_better("accuracy"), higher_is_better("loss"), higher_is_better("top7")
    (True, False, True)
    """
    from fedalloy.core import registry  # imported here: it loads torch, which readers of records do without

    with _asking:  # the live page calls this from many threads, and a category must not be seen partly loaded
        return registry.direction(_registered(metric, registry.everything("metric")))


def is_share(metric: str) -> bool:
    """Whether the values of a metric are shares, from 0 to 1; False for an unknown one.

    >>> is_share("accuracy"), is_share("top7"), is_share("mae"), is_share("nobody's")
    (True, True, False, False)
    """
    from fedalloy.core import registry

    with _asking:
        known = registry.everything("metric")
        rule = known.get(_registered(metric, known))
    return rule is not None and bool(getattr(rule(), "share", False))


def variance_as(metric: str) -> tuple[str, float]:
    """What to call a recorded variance over clients, which is that of 100 times the values, and what to multiply it
    with: percent suit shares only.

    >>> variance_as("accuracy"), variance_as("mae")
    (('variance (%²)', 1.0), ('variance', 0.0001))
    """
    return ("variance (%²)", 1.0) if is_share(metric) else ("variance", 1e-4)


def _registered(metric: str, known: Container[str]) -> str:
    """The name under which a metric is registered."""
    return "top_k" if metric not in known and top_k(metric) is not None else metric


def top_k(metric: str) -> int | None:
    """The k of names like ``top7``, which mean ``top_k`` and are not registered individually."""
    found = _TOP_K.fullmatch(metric)
    return int(found[1]) if found else None


def better(score: float, than: float, higher: bool | None) -> bool:
    """Whether a score beats another; NaN beats nothing, and without a direction nothing does.

    >>> better(0.2, 0.3, higher=False), better(0.2, 0.3, higher=True), better(0.2, 0.3, higher=None)
    (True, False, False)
    """
    return higher is not None and (score > than if higher else score < than)


def reaches(score: float, target: float, higher: bool | None) -> bool:
    """Whether a score is as good as the target.

    >>> reaches(0.5, 0.5, higher=False), reaches(2.3, 1.0, higher=False)
    (True, False)
    """
    return higher is not None and (score == target or better(score, target, higher))


def best(items: Iterable[Item], score: Callable[[Item], float], higher: bool) -> Item | None:
    """The first item with the best score; None if no item has one."""
    known = [item for item in items if not math.isnan(score(item))]
    return (max if higher else min)(known, key=score, default=None)


def rank(score: float, higher: bool | None) -> float:
    """A sort key that puts the worst served first; without a direction the lowest.

    >>> sorted([1.0, 3.0, 2.0], key=lambda score: rank(score, higher=False))
    [3.0, 2.0, 1.0]
    """
    return -score if higher is False else score

"""What no input may reach: mutated inputs name this function, and it remembers that it was called."""

from __future__ import annotations

from typing import Any

NAME = "benchmarks.fuzz.canary:sing"
calls: list[str] = []


def sing(*arguments: Any, **named: Any) -> None:
    """Whoever calls this has followed a path out of an input."""
    calls.append(f"{arguments!r:.100} {named!r:.100}")

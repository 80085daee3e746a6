"""A function that no input may call: mutated inputs name it, and it records its calls."""

from __future__ import annotations

from typing import Any

NAME = "benchmarks.fuzz.canary:sing"
calls: list[str] = []


def sing(*arguments: Any, **named: Any) -> None:
    """Called only if a dotted path from an input was imported."""
    calls.append(f"{arguments!r:.100} {named!r:.100}")

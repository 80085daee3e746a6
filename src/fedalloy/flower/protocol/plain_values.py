"""Plain values from a server, for the arguments of rules and models: numbers, words, and lists and tables of them.

A word can name neither a file nor a function: it has no slash and no colon. The number of values, their nesting and the
size of numbers are limited.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

MOST_VALUES, DEEPEST, MOST_LETTERS, LARGEST = 100_000, 6, 200, 1 << 64
_WORD = re.compile(r"[\w.*?!\[\]-]*")
_STRICT_WORD = re.compile(r"[A-Za-z0-9_-]*")
_INFINITE = {"inf": math.inf, "-inf": -math.inf}


def plain_arguments(given: Mapping[str, Any], *, strict: bool = False) -> Mapping[str, Any]:
    """The arguments, checked and frozen; ``ValueError`` for anything else. ``strict`` allows neither dots nor patterns
    in words.

    >>> dict(plain_arguments({"hidden": [8, 8], "activation": "relu", "low": "-inf"}))
    {'hidden': (8, 8), 'activation': 'relu', 'low': -inf}
    >>> plain_arguments({"args": ["touch", "/tmp/x"]})
    Traceback (most recent call last):
    ValueError: the word '/tmp/x' is not allowed: letters, digits and . * ? ! _ - [ ] are
    """
    budget = _Budget(MOST_VALUES, _STRICT_WORD if strict else _WORD)
    return MappingProxyType({budget.name(name): budget.value(one, DEEPEST) for name, one in given.items()})


class _Budget:
    """The number of values that are still allowed, and the pattern of words."""

    def __init__(self, left: int, word: re.Pattern[str]) -> None:
        self.left, self.word = left, word

    def name(self, text: str) -> str:
        if not re.fullmatch(r"[A-Za-z_]\w{0,63}", text, re.ASCII):
            raise ValueError(f"'{text:.40}' is not the name of an argument")
        return text

    def value(self, given: Any, deeper: int) -> Any:
        self.left -= 1
        if self.left < 0 or deeper < 0:
            raise ValueError(f"more than {MOST_VALUES} values, or nested more than {DEEPEST} levels deep")
        if given is None or isinstance(given, bool):
            return given
        if isinstance(given, int | float):
            return self._number(given)
        if isinstance(given, str):
            return self._text(given)
        if isinstance(given, list):
            return tuple(self.value(one, deeper - 1) for one in given)
        if isinstance(given, dict):
            return MappingProxyType({self.name(name): self.value(one, deeper - 1) for name, one in given.items()})
        raise ValueError(f"a {type(given).__name__} is not a plain value")

    def _number(self, given: float) -> float:
        if not abs(given) <= (LARGEST if isinstance(given, int) else math.inf):
            raise ValueError("a number is too large or not a number")
        return given

    def _text(self, given: str) -> Any:
        if given in _INFINITE:
            return _INFINITE[given]
        if len(given) > MOST_LETTERS or not self.word.fullmatch(given):
            raise ValueError(f"the word '{given:.40}' is not allowed: letters, digits and . * ? ! _ - [ ] are")
        return given


def thawed(value: Any) -> Any:
    """The same values as plain tables and lists, as rules expect them."""
    if isinstance(value, Mapping):
        return {name: thawed(one) for name, one in value.items()}
    return [thawed(one) for one in value] if isinstance(value, tuple) else value

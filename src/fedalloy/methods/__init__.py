"""The rules, each importable by its class name: ``from fedalloy.methods import AaggffD, Momentum, Prox``.

Four kinds: what a client does (``solvers``), how much its contribution counts (``weightings``), how the server moves
(``servers``), what happens to messages (``wires``). ``published`` has the methods of papers, composed of them.
"""

from __future__ import annotations

from typing import Any

from fedalloy.core import registry
from fedalloy.core.errors import nearest

_KINDS = ("solver", "weighting", "server", "wire")


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_by_class_name())
    if not name[:1].isupper():  # maybe a submodule: Python's import looks for it after this error
        raise AttributeError(f"module 'fedalloy.methods' has no attribute '{name}'")
    rules = _by_class_name()
    if name not in rules:
        raise AttributeError(f"fedalloy.methods has no rule '{name}': {nearest(name, rules)}")
    return rules[name]


def __dir__() -> list[str]:
    return sorted({*_by_class_name(), "published", "servers", "solvers", "weightings", "wires"})


def _by_class_name() -> dict[str, Any]:
    rules = (rule for kind in _KINDS for rule in registry.everything(kind).values())
    return {rule.__name__: rule for rule in rules if isinstance(rule, type)}

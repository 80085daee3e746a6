"""Real federations on Flower. Needs the extra: ``pip install 'fedalloy[flower]'``.

``fedalloy.flower.Strategy`` replaces Flower's strategies in your own Flower app; the rest runs fedalloy's own
apps, or writes and starts a federation (``fedalloy flower --help``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedalloy.flower.strategy import Strategy

__all__ = ["Strategy"]


def __getattr__(name: str) -> Any:
    # Flower is imported when its base class is needed, not with this package.
    if name == "Strategy":
        from fedalloy.flower.strategy import Strategy

        return Strategy
    raise AttributeError(f"module 'fedalloy.flower' has no attribute '{name}'; it has Strategy")

"""The old place of :mod:`fedalloy.results.stories`; goes with the next version."""

from __future__ import annotations

import warnings
from typing import Any

from fedalloy.results import stories


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(stories, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    said = f"fedalloy.report.gathering is now fedalloy.results.stories: import {name} from there"
    warnings.warn(said, DeprecationWarning, stacklevel=2)
    return getattr(stories, name)

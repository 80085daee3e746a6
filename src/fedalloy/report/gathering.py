"""The old name of :mod:`fedalloy.results.summaries`; removed in the next version."""

from __future__ import annotations

import warnings
from typing import Any

from fedalloy.results import summaries


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(summaries, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    said = f"fedalloy.report.gathering is now fedalloy.results.summaries: import {name} from there"
    warnings.warn(said, DeprecationWarning, stacklevel=2)
    return getattr(summaries, name)

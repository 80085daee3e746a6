"""Federated learning over clients that differ: how much each contribution counts, and who is served badly.

Names are loaded on first use, so that ``import fedalloy`` costs nothing and loads neither torch nor anything else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedalloy import _moved

_moved.install()  # first, as another thread may already be importing by an old name

if TYPE_CHECKING:
    from fedalloy import algorithms, methods
    from fedalloy.core.algorithm import Algorithm
    from fedalloy.core.keys import Key
    from fedalloy.core.registry import register
    from fedalloy.experiment.callbacks import Callback, Checkpoints, EarlyStopping, LogRounds
    from fedalloy.experiment.fit import RunResult, fit
    from fedalloy.experiment.records.reading import RunRecord, read_run, read_runs
    from fedalloy.experiment.saved import SavedResult, load
    from fedalloy.studies.advise.call import Advice, advise
    from fedalloy.studies.compare.comparing import Comparison, compare
    from fedalloy.studies.tune.call import Tuning, tune
    from fedalloy.studies.unfolding.call import unfold
    from fedalloy.tasks.dropout import Dropout
    from fedalloy.tasks.making import task

    __version__: str

__all__ = [
    "Advice",
    "Algorithm",
    "Callback",
    "Checkpoints",
    "Comparison",
    "Dropout",
    "EarlyStopping",
    "Key",
    "LogRounds",
    "RunRecord",
    "RunResult",
    "SavedResult",
    "Tuning",
    "advise",
    "algorithms",
    "compare",
    "fit",
    "load",
    "methods",
    "read_run",
    "read_runs",
    "register",
    "task",
    "tune",
    "unfold",
]

_HOME = {
    "Advice": "fedalloy.studies.advise.call:Advice",
    "Algorithm": "fedalloy.core.algorithm:Algorithm",
    "Callback": "fedalloy.experiment.callbacks:Callback",
    "Checkpoints": "fedalloy.experiment.callbacks:Checkpoints",
    "Comparison": "fedalloy.studies.compare.comparing:Comparison",
    "Dropout": "fedalloy.tasks.dropout:Dropout",
    "EarlyStopping": "fedalloy.experiment.callbacks:EarlyStopping",
    "Key": "fedalloy.core.keys:Key",
    "LogRounds": "fedalloy.experiment.callbacks:LogRounds",
    "RunRecord": "fedalloy.experiment.records.reading:RunRecord",
    "RunResult": "fedalloy.experiment.fit:RunResult",
    "SavedResult": "fedalloy.experiment.saved:SavedResult",
    "Tuning": "fedalloy.studies.tune.call:Tuning",
    "advise": "fedalloy.studies.advise.call:advise",
    "algorithms": "fedalloy.algorithms:",
    "compare": "fedalloy.studies.compare.comparing:compare",
    "fit": "fedalloy.experiment.fit:fit",
    "load": "fedalloy.experiment.saved:load",
    "methods": "fedalloy.methods:",
    "read_run": "fedalloy.experiment.records.reading:read_run",
    "read_runs": "fedalloy.experiment.records.reading:read_runs",
    "register": "fedalloy.core.registry:register",
    "task": "fedalloy.tasks.making:task",
    "tune": "fedalloy.studies.tune.call:tune",
    "unfold": "fedalloy.studies.unfolding.call:unfold",
}


if not TYPE_CHECKING:  # a type checker knows the names above, and a misspelt one is an error

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            found: Any = _version()
        elif name in _HOME:
            module, _, attribute = _HOME[name].partition(":")
            loaded = import_module(module)
            found = getattr(loaded, attribute) if attribute else loaded
        else:
            raise AttributeError(f"module 'fedalloy' has no attribute '{name}'; it has {', '.join(sorted(_HOME))}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("fedalloy")
    except PackageNotFoundError:
        return "0+unknown"

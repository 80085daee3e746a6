"""The file of a search, so that a kill at any moment leaves one that can be continued.

Optuna marks its journal as being written with a link that a killed process leaves behind; here it is a lock that the
operating system releases. Its pruners note that a trial took part in a comparison before they decide on it, and would
let a trial go on that was killed in between; here that comparison is made again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import lock_descriptor

from fedalloy.core.errors import FedalloyError, RunLocked
from fedalloy.experiment.records.lock import locked

if TYPE_CHECKING:
    import optuna

_COMPARED = "completed_rung_"
"""What the pruners store about a trial that took part in a comparison: its score, by the number of the comparison."""


class JournalLock:
    """The lock that Optuna takes for every line of its journal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = -1

    def acquire(self) -> bool:
        """Wait until nobody else writes."""
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        lock_descriptor(self._file, blocking=True)
        return True

    def release(self) -> None:
        """Let others write."""
        os.close(self._file)


def storage_in(folder: Path) -> Any:
    """The storage of a search in a folder."""
    library = optuna_library()
    folder.mkdir(parents=True, exist_ok=True)
    lock: Any = JournalLock(folder / "search.lock")
    return library.storages.JournalStorage(
        library.storages.journal.JournalFileBackend(str(folder / "search.log"), lock_obj=lock)
    )


@contextmanager
def searching_alone(folders: Sequence[Path]) -> Iterator[None]:
    """Refuse a second session in the folders of searches: both would continue with the same trials."""
    with ExitStack() as stack:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(locked(folder / "session.lock"))
            except RunLocked:
                raise RunLocked(
                    f"another process continues with the search in {folder}: wait until it ends, or choose another "
                    "folder"
                ) from None
        yield


def stops_again(study: optuna.Study, trial: optuna.Trial) -> bool:
    """Whether a trial stops at its last comparison, which a session that was killed may have begun."""
    found = study.get_trials()
    mine = found[trial.number]
    last = max((name for name in mine.system_attrs if name.startswith(_COMPARED)), default=None)
    compared_at = mine.last_step
    if last is None or compared_at is None or mine.system_attrs[last] != mine.intermediate_values[compared_at]:
        return trial.should_prune()
    mine.system_attrs = {name: value for name, value in mine.system_attrs.items() if name != last}
    library = optuna_library()
    copy = library.create_study(study_name=study.study_name, pruner=study.pruner, direction=study.direction)
    copy.add_trials(found)
    return bool(copy.pruner.prune(copy, copy.trials[trial.number]))


def optuna_library() -> Any:
    """Optuna, which an extra installs."""
    try:
        import optuna
        import optuna.storages.journal
    except ImportError as error:
        raise FedalloyError(f"tuning needs Optuna ({error}): pip install 'fedalloy[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna

"""Every error a user can meet: each says what was wrong, what is allowed and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedalloyError(Exception):
    """Base of all errors raised on purpose by fedalloy."""


class SpecError(FedalloyError, ValueError):
    """A recipe, a spec or an argument does not say something fedalloy understands."""


class RegistryError(FedalloyError):
    """A rule is unknown, or a name is taken already."""


class AlgorithmError(FedalloyError):
    """The four parts of an algorithm do not fit together, or do not fit the federation."""


class RoundRefused(AlgorithmError):
    """A rule is not defined for those who came in a round: the round has no effect, and the run goes on."""


class DataError(FedalloyError):
    """A data set, a partition or a client's data cannot be used as asked."""


class CheckpointError(FedalloyError):
    """A checkpoint or a run folder cannot be read, or belongs to something else."""


class RunLocked(FedalloyError):
    """Another process is writing to the run folder."""


class Diverged(FedalloyError):
    """Training produced numbers that are not finite."""


class ClientError(FedalloyError):
    """Something failed inside a client's program; says where, in which round, for whom."""

    def __init__(self, stage: str, cause: Exception, *, client: int | None = None, round: int | None = None) -> None:
        self.stage, self.cause, self.client, self.round = stage, cause, client, round
        super().__init__(
            f"client {client if client is not None else '?'} failed in round "
            f"{round if round is not None else '?'} at stage '{stage}': {type(cause).__name__}: {cause}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Travels between processes: the message alone could not be turned back into an error."""
        return _client_error, (self.stage, self.cause, self.client, self.round)


def _client_error(stage: str, cause: Exception, client: int | None, round: int | None) -> ClientError:
    return ClientError(stage, cause, client=client, round=round)


def nearest(word: str, allowed: Iterable[str]) -> str:
    """A hint for a misspelt word.

    >>> nearest("sampels", ["samples", "uniform"])
    "did you mean 'samples'? allowed: samples, uniform"
    """
    names = sorted(allowed)
    close = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}allowed: {', '.join(names) if names else '(nothing)'}"

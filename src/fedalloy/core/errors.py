"""All errors that a user can see: each message states what is wrong, what is allowed and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class FedalloyError(Exception):
    """Base of all errors raised on purpose by fedalloy."""

    passing = False
    """Whether the same run may succeed later, because the cause lies outside of it."""


class SpecError(FedalloyError, ValueError):
    """A recipe, a spec or an argument is invalid."""


class RegistryError(FedalloyError):
    """A rule is unknown, or a name is already taken."""


class AlgorithmError(FedalloyError):
    """The four parts of an algorithm do not fit together, or do not fit the federation."""


class RoundRefused(AlgorithmError):
    """A rule is not defined for the contributions of a round: the round has no effect, and the run continues."""


class DataError(FedalloyError):
    """A data set, a partition or a client's data cannot be used as requested."""


class CheckpointError(FedalloyError):
    """A checkpoint or a run folder cannot be read, or belongs to something else."""


class RunLocked(FedalloyError):
    """Another process is writing to the run folder."""

    passing = True


class Diverged(FedalloyError):
    """Training produced numbers that are not finite."""


class ClientError(FedalloyError):
    """Something failed inside a client's program; the message names stage, round and client."""

    def __init__(self, stage: str, cause: Exception, *, client: int | None = None, round: int | None = None) -> None:
        self.stage, self.cause, self.client, self.round = stage, cause, client, round
        super().__init__(
            f"client {client if client is not None else '?'} failed in round "
            f"{round if round is not None else '?'} at stage '{stage}': {type(cause).__name__}: {cause}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        """For pickling between processes: the default would call the constructor with the message alone."""
        return _client_error, (self.stage, self.cause, self.client, self.round)


def _client_error(stage: str, cause: Exception, client: int | None, round: int | None) -> ClientError:
    return ClientError(stage, cause, client=client, round=round)


@dataclass
class Stage:
    """The current stage of a client's program; the program updates ``name`` as it advances."""

    name: str | None


@contextmanager
def stage(name: str | None) -> Iterator[Stage]:
    """Turn any error inside into a ``ClientError`` that names the current stage; in a stage without a name the error is
    unchanged."""
    at = Stage(name)
    try:
        yield at
    except ClientError:
        raise
    except Exception as error:
        if at.name is None:
            raise
        raise ClientError(at.name, error) from error


_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


def is_passing(error: BaseException) -> bool:
    """Whether an error came from outside of a run: a signal, a full disk, no memory, other I/O. Such a run counts as
    interrupted and can be resumed; any other error would happen again.

    >>> is_passing(OSError(28, "No space left on device")), is_passing(ZeroDivisionError())
    (True, False)
    """
    cause = getattr(error, "cause", None) or error.__cause__
    if isinstance(cause, BaseException) and not isinstance(error, CheckpointError):
        return is_passing(cause) or _is_outside(error)
    return _is_outside(error)


def _is_outside(error: BaseException) -> bool:
    known = isinstance(error, OSError | MemoryError | EOFError | KeyboardInterrupt | SystemExit)
    no_memory = isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _NO_MEMORY)
    return known or no_memory or bool(getattr(error, "passing", False))


def nearest(word: str, allowed: Iterable[str]) -> str:
    """A hint for a misspelt word, with the allowed ones.

    >>> nearest("sampels", ["samples", "uniform"])
    "did you mean 'samples'? allowed: samples, uniform"
    >>> nearest("smaple", ["sample", "simple"])
    "did you mean 'sample'? allowed: sample, simple"
    >>> nearest("SGD", ["sgd", "sgld"])
    "did you mean 'sgd'? allowed: sgd, sgld"
    """
    names = sorted(allowed)
    close = _likely(word, names)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}allowed: {', '.join(names) if names else '(nothing)'}"


_ELSEWHERE = {
    "eta": "lr", "learning_rate": "lr", "local_lr": "lr", "step_size": "lr", "lambda": "lam", "lamda": "lam",
    "lmbda": "lam", "local_epochs": "epochs", "num_epochs": "epochs", "n_clients": "clients", "num_clients": "clients",
    "num_rounds": "rounds", "n_rounds": "rounds",
}  # fmt: skip
"""What other libraries call settings."""


def _likely(word: str, names: list[str]) -> list[str]:
    """What was probably meant: the same word in another spelling, another library's name, a close or a longer one."""

    def plain(name: str) -> str:
        return name.casefold().replace("-", "").replace("_", "").replace(" ", "")

    return (
        [name for name in names if plain(name) == plain(word) or name == _ELSEWHERE.get(word)]
        or [name for name in names if sorted(name) == sorted(word)]
        or difflib.get_close_matches(word.casefold(), names, n=1)
        or difflib.get_close_matches(word, names, n=1)
        or [name for name in names if len(word) > 1 and name.startswith(word)]
    )

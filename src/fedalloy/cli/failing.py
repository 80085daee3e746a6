"""Messages for errors that are not bugs of fedalloy (disk full, no permission, ...): one line, no traceback."""

from __future__ import annotations

import errno

from fedalloy.core.errors import AlgorithmError, FedalloyError, RegistryError, SpecError

USAGE = (SpecError, RegistryError, AlgorithmError)
_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space, then use 'run' with --resume, or the same 'compare' command",
    errno.EDQUOT: "your disk quota is used up; free some space, then continue with --resume",
    errno.EACCES: "you may not write or read there; choose another path (-o) or change its permissions",
    errno.EPERM: "you may not write or read there; choose another path (-o) or change its permissions",
    errno.EROFS: "that file system is read-only; choose another path (-o)",
    errno.ENOTDIR: "a file is where a folder is needed; choose another path (-o)",
    errno.EEXIST: "a file is where a folder is needed; choose another path (-o)",
    errno.EISDIR: "a folder is where a file is needed; name a file in it",
    errno.ENOENT: "it does not exist and cannot be created there",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n)",
    errno.ENOMEM: "the machine has no memory left; fewer processes (-j 1) or smaller blocks need less",
}


def sentence(error: BaseException) -> str | None:
    """The message for an error that a user can cause; None for all others, whose traceback is needed."""
    if isinstance(error, FedalloyError):
        return str(error)
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):  # a reader that closes the pipe early
        return _about_files(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        reason = (str(error).splitlines() or [""])[0]
        return f"out of memory: {reason or 'the machine has none left'}; smaller batches, blocks or -j 1 need less"
    return None


def exit_code(error: BaseException) -> int:
    """2 for wrong usage, 1 for everything else."""
    return 2 if isinstance(error, USAGE) else 1


def _about_files(error: OSError) -> str:
    where = " -> ".join(_short(str(name)) for name in (error.filename, error.filename2) if name is not None)
    reason = error.strerror or str(error) or type(error).__name__
    advice = _ADVICE.get(error.errno or 0, "")
    return ": ".join(part for part in (where, reason) if part) + (f"; {advice}" if advice else "")


def _short(name: str) -> str:
    return name if len(name) <= 120 else f"{name[:60]}...{name[-40:]}"

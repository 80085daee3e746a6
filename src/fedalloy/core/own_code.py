"""Errors in the user's code, reported with the user's lines and without those of libraries."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from fedalloy.core import registry
from fedalloy.core.errors import FedalloyError

_OURS = str(Path(__file__).resolve().parents[1])
_MOST = 8


@contextmanager
def own_code(what: str, kind: type[FedalloyError]) -> Iterator[None]:
    """Turn exceptions of the user's code inside into one error of this kind that shows the user's lines; ``what`` names
    the code. Errors of fedalloy itself are raised unchanged."""
    try:
        yield
    except FedalloyError:
        raise
    except Exception as error:
        raise kind(f"{what} raised {type(error).__name__}: {error}{own_lines(error)}") from error


def import_own(module: str, what: str, kind: type[FedalloyError]) -> ModuleType:
    """Import a module of the user, with different errors for a missing module and one that fails."""
    if not module or module.startswith("."):
        raise kind(f"{what} cannot be imported: write its full name, package.module")
    try:
        with own_code(what, kind):
            return registry.load(module)
    except kind as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError):
            raise kind(
                f"{what} cannot be imported ({cause}): install it, put its folder on PYTHONPATH, or run the command in "
                "its folder with --allow-imports"
            ) from cause
        raise


def own_lines(error: BaseException) -> str:
    """The lines of the user's files in an error's traceback, outermost first; empty if there are none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    if isinstance(error, SyntaxError) and error.filename and _is_own(error.filename):
        return f"\n  {error.filename}, line {error.lineno}: {(error.text or '').strip()}"
    return "".join(f"\n  {one.filename}, line {one.lineno}, in {one.name}: {one.line}" for one in frames[-_MOST:])


def _is_own(filename: str) -> bool:
    """Whether a file is neither fedalloy's, nor Python's, nor an installed package's."""
    paths = sysconfig.get_paths()
    installed = (paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], sys.base_prefix + "/lib")
    return not filename.startswith(("<frozen", _OURS, *installed))

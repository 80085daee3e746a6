"""Output of the commands: tables and lines on stdout, errors on stderr, JSON on request."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


def console(stderr: bool = False) -> Console:
    """A console that writes plain text unless it is a terminal."""
    from rich.console import Console

    found = Console(stderr=stderr, highlight=False)
    if not found.is_terminal:
        found.width = 10_000  # a file or a pipe has no width: do not fold its lines
    return found


def complain(message: str) -> None:
    """Print an error as one red line on stderr."""
    typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)


def tell_notes() -> None:
    """Print the library's log messages on stderr as notes, each once."""
    logger = logging.getLogger("fedalloy")
    for earlier in [one for one in logger.handlers if isinstance(one, _Notes)]:
        logger.removeHandler(earlier)
    logger.addHandler(_Notes())


class _Notes(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in self._said:
            self._said.add(message)
            typer.echo(f"note: {message}", err=True)


def print_json(value: Any) -> None:
    """One JSON object on one line; numbers that are not finite become null."""
    typer.echo(json.dumps(_finite(value), default=str, allow_nan=False))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", numbers: Sequence[int] = ()
) -> None:
    """Print a table; the columns in ``numbers`` are right-aligned."""
    from rich import box
    from rich.table import Table

    out = console()
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD if out.is_terminal else box.ASCII2)
    table.title_style, table.expand = "bold", False
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_plain, row))
    out.print(table)


def number(value: float | None, digits: int = 3) -> str:
    """A number for a table; empty for None."""
    return "" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value

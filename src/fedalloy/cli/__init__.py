"""The command line: one file per command; whatever is heavy is imported when a command needs it."""

from __future__ import annotations

import sys


def main() -> None:
    """The command ``fedalloy``. ``--debug`` is understood anywhere on the line."""
    from fedalloy.cli.app import app

    debug = [word for word in sys.argv[1:] if word == "--debug"][:1]
    app(args=debug + [word for word in sys.argv[1:] if word != "--debug"], prog_name="fedalloy")

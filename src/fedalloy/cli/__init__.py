"""The command line: one file per command. Heavy imports happen only in the commands that need them."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """The command ``fedalloy``. ``--debug`` may appear anywhere on the line."""
    from fedalloy.cli.app import app

    # Threads that wait for each other spin by default, which costs several times the work itself on a busy machine.
    # OpenMP reads this when torch is loaded, so it must be set before.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

    debug = [word for word in sys.argv[1:] if word == "--debug"][:1]
    app(args=debug + [word for word in sys.argv[1:] if word != "--debug"], prog_name="fedalloy")

"""Run a Flower program, a node with the bundle guard: ``python -P -m fedalloy.flower.prefork PROGRAM ARGUMENTS``."""

from __future__ import annotations

import os
import sys

from fedalloy.core.errors import SpecError
from fedalloy.flower import bundle_guard
from fedalloy.flower.prefork import ON, SWITCH
from fedalloy.flower.prefork.forkserver import entry, preforked


def main(arguments: list[str]) -> None:
    """Run the program named by the first argument; the environment selects the way."""
    sys.argv, allowed = bundle_guard.take_allowed(arguments)
    program = arguments[0]
    run = entry(program)
    if program == "flower-supernode":
        try:
            bundle_guard.install(allowed)
        except SpecError as error:
            sys.exit(str(error))
    sys.exit((preforked(program, run) if os.environ.get(SWITCH) == ON else run)())


if __name__ == "__main__":
    main(sys.argv[1:])

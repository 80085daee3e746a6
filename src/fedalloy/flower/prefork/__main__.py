"""Run one of Flower's programs, a node under guard: ``python -P -m fedalloy.flower.prefork PROGRAM ARGUMENTS``."""

from __future__ import annotations

import os
import sys

from fedalloy.core.errors import SpecError
from fedalloy.flower import bundle_guard
from fedalloy.flower.prefork import ON, SWITCH
from fedalloy.flower.prefork.forkserver import entry, preforked


def main(arguments: list[str]) -> None:
    """Run the program that is named first; in which way, the environment says."""
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

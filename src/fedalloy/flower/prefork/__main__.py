"""Run a Flower program, a node with the bundle guard: ``python -P -m fedalloy.flower.prefork PROGRAM ARGUMENTS``."""

from __future__ import annotations

import os
import sys
import threading

from fedalloy.core.errors import SpecError
from fedalloy.flower import bundle_guard, knock
from fedalloy.flower.prefork import ON, SWITCH
from fedalloy.flower.prefork.forkserver import entry, preforked
from fedalloy.flower.supervision import announce, end_with_parent


def main(arguments: list[str]) -> None:
    """Run the program named by the first argument; the environment selects the way."""
    end_with_parent()
    program = arguments[0]
    rest, kept = knock.take_option(arguments)
    sys.argv, allowed = bundle_guard.take_allowed(rest)
    announce(program, sys.argv)
    run = entry(program)
    if program == "flower-supernode":
        threading.excepthook = in_a_line
        try:
            bundle_guard.install(allowed)
            if kept:
                knock.wait_until_let_in(sys.argv, kept)
        except SpecError as error:
            sys.exit(str(error))
    try:
        sys.exit((preforked(program, run) if os.environ.get(SWITCH) == ON else run)())
    except KeyboardInterrupt:  # Flower's way to end a helper whose program is gone
        sys.exit(130)


def in_a_line(fault: threading.ExceptHookArgs) -> None:
    """A node's sign of life that the server refuses, as after its key was replaced, is said in a line: Flower's thread
    for it dies of the answer. Everything else is shown as it is."""
    status = getattr(getattr(fault.exc_value, "response", None), "status_code", None)
    if status is None:
        threading.__excepthook__(fault)
    else:
        print(f"the server answers {status} to this node's sign of life; it will ask to be let in again", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

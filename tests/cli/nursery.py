"""A process that has imported torch and forks one child per command line: real processes without the import each time.

Reads one JSON object a line: {"argv", "cwd", "out", "err"} starts `fedalloy ARGV` (or runs {"code"}) and answers with
its pid; {"wait": pid} answers with its exit code, negative for a signal.
"""

import json
import os
import signal
import sys
import time

LIMIT = 120.0
"""Seconds that a command may take once somebody waits for it."""


def child(order: dict) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(order["cwd"])
    # A shell that runs the tests in the background makes them ignore Ctrl-C; a person's terminal does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        if "code" in order:
            exec(order["code"], {"__name__": "child"})
        else:
            from fedalloy.cli import main

            sys.argv = ["fedalloy", *order["argv"]]
            main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait(pid: int) -> int:
    """The exit code of a child; one that hangs is killed, so that the test fails instead of hanging as well."""
    end = time.monotonic() + LIMIT
    while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(found[1])


def serve() -> None:
    import torch

    import fedalloy
    import fedalloy.cli.app
    import fedalloy.experiment.recipe

    torch.set_num_threads(1)
    # What is imported at the first gradient or the first data set is then there for every child.
    fedalloy.fit("fedavg", fedalloy.task(), rounds=1, cohort=1, engine="loop")
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answer = wait(order["wait"])
        elif answer := os.fork():
            pass
        else:
            child(order)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()

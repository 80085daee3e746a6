"""``fedalloy.fit`` with the engine ``workers``: two single-threaded processes."""

from __future__ import annotations

import sys

from benchmarks.peers.runners.run_fedalloy import Fedalloy
from benchmarks.peers.runners.turns import Load
from fedalloy.engines.workers import Workers

if __name__ == "__main__":
    Fedalloy(Load.read(sys.argv[1]), engine=Workers(2)).run()

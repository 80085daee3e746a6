"""``fedalloy.fit`` with the engine ``ray``: two single-threaded workers on a Ray of its own."""

from __future__ import annotations

import sys

from benchmarks.peers.runners.run_fedalloy import Fedalloy
from benchmarks.peers.runners.turns import Load
from fedalloy.engines.ray import Ray

if __name__ == "__main__":
    Fedalloy(Load.read(sys.argv[1]), engine=Ray(workers=2)).run()

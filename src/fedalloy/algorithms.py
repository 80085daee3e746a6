"""The published methods under their public name: ``fedalloy.algorithms.fedavg(lr=0.1)``."""

from fedalloy.methods.published import *  # noqa: F403 - whatever is published there

"""Kernels for local steps: faster ways to do what the loop does, each tested against it."""

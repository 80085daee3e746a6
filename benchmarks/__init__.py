"""Benchmarks and long measurements; not part of the tests."""

"""Timing races and long measurements; never part of the tests."""

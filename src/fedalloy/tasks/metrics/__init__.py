"""Metrics by name: the evidence per example, and the score per client computed from it."""

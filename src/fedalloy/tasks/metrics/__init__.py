"""Metrics by name: what is kept of every example, and how clients are scored from it."""

"""Engines: ways to run the local program of a cohort's clients."""

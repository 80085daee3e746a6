"""Engines: ways to run the client half over a cohort."""

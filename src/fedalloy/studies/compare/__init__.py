"""Comparing algorithms: planning the runs, running them in parallel, reading and summarising their results."""

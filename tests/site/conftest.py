"""Pages run their commands where the tests of the command line do."""

from __future__ import annotations

from tests.cli.conftest import cli

__all__ = ["cli"]

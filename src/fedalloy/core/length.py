"""Whether rounds depend on the length of the run: only if they do not, can a run be extended afterwards."""

from __future__ import annotations

from fedalloy.core.declared import declared


class AnyLength:
    """Base of all rules; a rule that reads ``ctx.rounds`` overrides ``uses_length``."""

    @declared
    def uses_length(self) -> str:
        """How the rule depends on the number of rounds of the run, as text; empty if it does not."""
        return ""

"""Whether rounds depend on how many there will be: a run can only be made longer afterwards where they do not."""

from __future__ import annotations

from fedalloy.core.declared import declared


class AnyLength:
    """What every rule says about the length of the run; a rule that looks at ``ctx.rounds`` says why."""

    @declared
    def uses_length(self) -> str:
        """In what way the rule depends on the number of rounds of the run, in words; empty where it does not."""
        return ""

"""Names of nodes: they are names of files and appear in every record."""

from __future__ import annotations

import re

from fedalloy.core.errors import SpecError

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.IGNORECASE)


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a node."""
    if not _NAME.fullmatch(name) or name == "server":
        raise SpecError(
            f"'{name}' is not a valid node name: letters, digits, dots, dashes, underscores, and not 'server'"
        )

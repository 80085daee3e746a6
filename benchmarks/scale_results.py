"""The file of results of the measurements of size: benchmarks/results/scale.json."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.machine import describe


def keep(path: Path, name: str, found: Any) -> None:
    """Put the figures of one program into the file, with the machine and the day."""
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    told = {**describe(), "torch": torch.__version__, "date": datetime.now(UTC).date().isoformat()}
    known[name] = {"found": _short(found), "machine": told}
    path.write_text(json.dumps(known, indent=1) + "\n")


def _short(value: Any) -> Any:
    """Real numbers with four digits."""
    if isinstance(value, dict):
        return {name: _short(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value

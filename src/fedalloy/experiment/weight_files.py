"""Files of learned weight tables, read and written here because rules use no files."""

from __future__ import annotations

import json
from pathlib import Path

from fedalloy.core.errors import SpecError
from fedalloy.experiment.records import atomic
from fedalloy.methods.weightings.weight_table import FORMAT, WeightTable


def save_table(table: WeightTable, path: str | Path) -> None:
    """Write a table atomically."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(Path(path), json.dumps(table.to_json(), indent=1) + "\n")


def load_table(path: str | Path) -> WeightTable:
    """A table from a file."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"its format is not '{FORMAT}'")
        return WeightTable.from_json(found)
    except FileNotFoundError:
        raise SpecError(f"there is no table {path}; learn one with 'fedalloy unfold RECIPE -o {path}'") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(f"{path} is not a table of weights: {error}") from error

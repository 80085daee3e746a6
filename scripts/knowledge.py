"""The facts of ``fedalloy advise`` from docs/results: ``python -m scripts.knowledge`` writes the file in the package,
``--check`` only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from fedalloy.studies.advise.facts import FILE, gathered, text_of

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def main(arguments: list[str]) -> int:
    """Write the file, or compare it."""
    text = text_of(gathered(RESULTS))
    if arguments == ["--check"]:
        same = FILE.read_text(encoding="utf-8") == text
        print("up to date" if same else f"{FILE.name} differs from docs/results: run python -m scripts.knowledge")
        return 0 if same else 1
    FILE.write_text(text, encoding="utf-8")
    print(f"{text.count('federation')} facts")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

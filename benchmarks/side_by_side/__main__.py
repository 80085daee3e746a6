"""The methods side by side on six federations, each tuned with the same budget.

    fedalloy compare recipes/side-by-side/heart.toml --tune 8 -o runs/side-by-side/heart      # and the five others
    python -m benchmarks.side_by_side --gather runs/side-by-side      # pack what the page needs
    python -m benchmarks.side_by_side --gather runs/fedavg-24 --to docs/results/data/side-by-side/longer  # longer.py
    python -m benchmarks.side_by_side --advice runs/advise            # pack the answers of `fedalloy advise`
    python -m benchmarks.side_by_side                                 # write the page from what is packed
    python -m benchmarks.side_by_side --check                         # fail where the page is not what the data give

Packed are the settings that the search found, the curve of every reported run and its clients' last scores, in
docs/results/data/side-by-side; the page is docs/results/side-by-side.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.side_by_side import advised, page
from benchmarks.side_by_side.gathering import gather


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gather", type=Path, metavar="FOLDER", help="a folder with the comparison of each federation")
    parser.add_argument("--advice", type=Path, metavar="FOLDER", help="a folder with the advice on each federation")
    parser.add_argument("--to", type=Path, default=page.DATA, help="where the packed federations are written")
    parser.add_argument("--check", action="store_true", help="compare the page with the packed data")
    given = parser.parse_args(arguments)
    if given.gather:
        for place in sorted(file.parent for file in given.gather.glob("*/comparison.json")):
            print(gather(place, given.to))
        return 0
    if given.advice:
        known = [place for place in sorted(given.advice.iterdir()) if (page.RECIPES / f"{place.name}.toml").is_file()]
        for place in known:
            print(advised.gather(place, given.to / "advice"))
        return 0
    return page.check() if given.check else page.write()


if __name__ == "__main__":
    sys.exit(main())

"""Command line of :mod:`scripts.docs`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import scripts.docs
from scripts.docs.blocks import ROOT, pages
from scripts.docs.running import PageResult, run_page
from scripts.docs.shell import clone_shell, page_shell


def main() -> int:
    """Run pages, print what became of their blocks, and fail where a page does not do what it says."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.docs",
        description=scripts.docs.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("pages", nargs="*", type=Path, help="pages to run (default: README.md, CONTRIBUTING.md, docs/)")
    parser.add_argument("-j", type=int, default=2, dest="processes", help="pages at once (default: 2)")
    parser.add_argument("--clone", action="store_true", help="run the README in a fresh clone, installs included")
    given = parser.parse_args()
    chosen = [ROOT / "README.md"] if given.clone else [page.resolve() for page in given.pages] or pages()
    with ThreadPoolExecutor(given.processes) as pool:
        result = list(pool.map(lambda page: _page(page, given.clone), chosen))
    return told(result)


def _page(page: Path, clone: bool) -> PageResult:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fedalloy-docs-") as base:
        shell = clone_shell(Path(base)) if clone else page_shell(Path(base))
        result = run_page(page, shell, () if clone else ("install",))
    took = time.monotonic() - start
    print(f"{page.relative_to(ROOT)}: {_listed(result.counts)} ({took:.0f} s)", *result.faults, sep="\n  ", flush=True)
    return result


def told(result: list[PageResult]) -> int:
    """Print the sums; 1 where there is a fault."""
    faults = sum(len(one.faults) for one in result)
    total = sum((one.counts for one in result), Counter[str]())
    print(f"{len(result)} pages, {total.total()} blocks: {_listed(total)}; {faults} faults")
    return int(faults > 0)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {what}" for what, number in counts.most_common())


if __name__ == "__main__":
    sys.exit(main())

"""How much code one round executes: calls, files and changes of package, on the loop and the batched engine.

    PYTHONPATH=src python scripts/round_calls.py [--packages FILE.toml] [--json FILE]

The recipe: FedAvg with its defaults but batches of 32, the embedded digits, an MLP with 16 hidden units, 10 clients
with equal shares that all take part (5 local steps each), one thread. Records stay in memory, because writing
to a folder depends on the clock; the round has no evaluation. Everything between the end of round 2 and the end of
round 3, as reported to the watcher of ``fit``, is counted, so that caches between rounds are warm.

- A *call* is a Python function of fedalloy's own source that begins to run in the run's thread: functions, methods,
  properties and lambdas. A generator counts once, no matter how often it is resumed. Comprehensions, generator
  expressions and class bodies belong to the function that contains them, and module bodies are not counted. What Python
  generates (the ``__init__`` of a dataclass) has no file and does not count, but what it calls does.
- *Files* are the distinct files of the functions that were called.
- A *crossing* is a call whose caller is in another package. The caller is the innermost function of fedalloy's own
  source that is still running: frames of torch or the standard library in between are skipped.
- A *package* is the first name below ``fedalloy``. ``--packages`` names others, to count an old source by the packages
  of a new one: each line is ``"fedalloy.old.module" = "new"``, the longest prefix is used, others keep their own.

Of fedalloy only ``fit``, ``task`` and ``algorithms.fedavg`` are used, so that any version of the source can be counted.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ENGINES = ("loop", "batched")
COUNTED_ROUND = 3
_INNER = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_MANY_TIMES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass
class Calls:
    """What was called between ``start`` and ``stop``, of the modules of one package's source folder."""

    root: Path
    packages: Mapping[str, str] = field(default_factory=dict)
    by_file: Counter[str] = field(default_factory=Counter)
    crossings: Counter[tuple[str, str]] = field(default_factory=Counter)
    _package_of: dict[CodeType, str | None] = field(default_factory=dict)
    _running: set[FrameType] = field(default_factory=set)

    def start(self) -> None:
        """Count from now on."""
        sys.setprofile(self._note)

    def stop(self) -> None:
        """Stop counting."""
        sys.setprofile(None)
        self._running.clear()

    def total(self) -> dict[str, Any]:
        """The counts, and their parts."""
        pairs = {f"{caller} -> {callee}": number for (caller, callee), number in self.crossings.most_common()}
        return {
            "calls": self.by_file.total(),
            "files": len(self.by_file),
            "crossings": self.crossings.total(),
            "calls by file": dict(self.by_file.most_common()),
            "crossings by packages": pairs,
        }

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or (callee := self._package(frame.f_code)) is None or self._resumed(frame):
            return
        self.by_file[str(Path(frame.f_code.co_filename).relative_to(self.root.parent))] += 1
        caller = self._caller(frame.f_back)
        if caller not in (None, callee):
            self.crossings[str(caller), callee] += 1

    def _resumed(self, frame: FrameType) -> bool:
        """Whether this resumes a function that was already counted; such frames are kept alive, so that no other frame
        gets their address."""
        if not frame.f_code.co_flags & _MANY_TIMES:
            return False
        known = frame in self._running
        self._running.add(frame)
        return known

    def _caller(self, frame: FrameType | None) -> str | None:
        while frame is not None:
            package = self._package(frame.f_code)
            if package is not None:
                return package
            frame = frame.f_back
        return None

    def _package(self, code: CodeType) -> str | None:
        """The package of a function; None for what is not counted."""
        if code not in self._package_of:
            self._package_of[code] = self._find_package(code)
        return self._package_of[code]

    def _find_package(self, code: CodeType) -> str | None:
        file = Path(code.co_filename)
        # Functions have their own locals; bodies of modules and classes do not.
        if code.co_name in _INNER or not code.co_flags & inspect.CO_NEWLOCALS or not file.is_relative_to(self.root):
            return None
        names = file.relative_to(self.root.parent).with_suffix("").parts
        prefixes = (".".join(names[:end]) for end in range(len(names), 0, -1))
        return next((self.packages[one] for one in prefixes if one in self.packages), names[min(1, len(names) - 1)])


def count_round(engine: str, packages: Mapping[str, str]) -> dict[str, Any]:
    """The counts of the third round on one engine."""
    import fedalloy

    calls = Calls(Path(str(fedalloy.__file__)).parent, packages)
    task = fedalloy.task("digits", {"kind": "mlp", "hidden": [16]}, "iid", 10)
    fedalloy.fit(
        fedalloy.algorithms.fedavg(batch_size=32), task, rounds=COUNTED_ROUND + 1, engine=engine, threads=1,
        evaluate_every=COUNTED_ROUND + 1, checkpoint_every=1e9, watcher=_between(calls),
    )  # fmt: skip
    return calls.total()


def _between(calls: Calls) -> Callable[[Any], None]:
    """A watcher that counts one round: from the end of the one before to its own end."""

    def watch(event: Any) -> None:
        calls.stop()
        if event.row["round"] == COUNTED_ROUND - 1:
            calls.start()

    return watch


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """One line per engine.

    >>> print(table({"loop": {"calls": 12, "files": 3, "crossings": 4}}))
    engine        calls    files  crossings
    loop             12        3          4
    """
    lines = [f"{'engine':10} {'calls':>8} {'files':>8} {'crossings':>10}"]
    for name, one in found.items():
        lines.append(f"{name:10} {one['calls']:8} {one['files']:8} {one['crossings']:10}")
    return "\n".join(lines)


def main() -> None:
    """Count both engines and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, metavar="FILE.toml", help="which package a module counts for")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures by file and by packages")
    asked = parser.parse_args()
    packages = tomllib.loads(asked.packages.read_text(encoding="utf-8")) if asked.packages else {}
    found = {engine: count_round(engine, packages) for engine in ENGINES}
    print(table(found))
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

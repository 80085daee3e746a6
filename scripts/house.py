"""Metrics of the source: sizes, lengths of functions, names used more than once, and imports between packages.

    python scripts/house.py [SOURCE_FOLDER] [--packages FILE.toml] [--json FILE]

- *Code lines* are lines that hold code: no blank lines, comments or docstrings.
- The *length* of a function is from its ``def`` to its last line, decorators not counted, inner functions included.
- A *base name* is that of a file without its folders (``__init__`` and ``__main__`` left out).
- An *edge* leads from a package to one that it imports anywhere, in functions and under TYPE_CHECKING too. A *cycle* is
  a set of packages each of which reaches every other along edges.
- A *duplicated block* is a run of ten or more code lines that occurs in two places, ignoring the indentation.

``--packages`` counts by other packages than the first name below ``fedalloy``, as ``scripts/round_calls.py`` does: each
line is ``"fedalloy.old.module" = "new"``, and the longest prefix is used.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import statistics
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

SHORT_FILE = 50
BLOCK = 10
_QUIET = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
Graph = dict[str, set[str]]


@dataclass
class House:
    """Everything that is counted."""

    files: int = 0
    code_lines: int = 0
    functions: int = 0
    median_length: float = 0.0
    p95_length: int = 0
    longest: list[tuple[str, int]] = field(default_factory=list)
    short_files: int = 0
    base_names: dict[str, int] = field(default_factory=dict)
    class_names: dict[str, list[str]] = field(default_factory=dict)
    cycles: list[list[str]] = field(default_factory=list)
    duplicates: list[str] = field(default_factory=list)


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path, default=Path(__file__).parents[1] / "src" / "fedalloy")
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    packages = tomllib.loads(given.packages.read_text()) if given.packages else {}
    house = look(given.source, packages)
    print("\n".join(described(house)))
    if given.json:
        given.json.write_text(json.dumps(asdict(house), indent=1))


def look(source: Path, packages: Mapping[str, str] | None = None) -> House:
    """All counts of a source folder, the package's own."""
    texts = {file: file.read_text() for file in sorted(source.rglob("*.py"))}
    lines = {file: code_lines(text) for file, text in texts.items()}
    lengths = sorted(
        ((f"{file.relative_to(source)}:{name}", length) for file in texts for name, length in functions(texts[file])),
        key=lambda one: -one[1],
    )
    ordered = sorted(length for _, length in lengths) or [0]
    return House(
        files=len(texts),
        code_lines=sum(map(len, lines.values())),
        functions=len(lengths),
        median_length=statistics.median(ordered),
        p95_length=ordered[int(0.95 * (len(ordered) - 1))],
        longest=lengths[:10],
        short_files=sum(len(text.splitlines()) < SHORT_FILE for text in texts.values()),
        base_names=_repeated(file.stem for file in texts if not file.stem.startswith("__")),
        class_names=_repeated_classes(source, texts),
        cycles=cycles(import_graph(source, texts, packages or {})),
        duplicates=duplicates({str(file.relative_to(source)): found for file, found in lines.items()}),
    )


def described(house: House) -> Iterator[str]:
    """A readable summary."""
    yield f"{house.files} files, {house.code_lines} code lines, {house.short_files} files under {SHORT_FILE} lines"
    yield f"{house.functions} functions: median {house.median_length:g} lines, 95 % within {house.p95_length}"
    yield "longest: " + ", ".join(f"{name} {length}" for name, length in house.longest)
    yield f"base names used more than once: {len(house.base_names)} ({_some(house.base_names)})"
    yield f"class names used more than once: {len(house.class_names)} ({_some(house.class_names)})"
    yield f"import cycles: {'; '.join(' - '.join(cycle) for cycle in house.cycles) or 'none'}"
    yield f"duplicated blocks of {BLOCK} code lines or more: {'; '.join(house.duplicates) or 'none'}"


def functions(code: str) -> Iterator[tuple[str, int]]:
    """Every function and its length."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def code_lines(text: str) -> list[tuple[int, str]]:
    """The lines that hold code, with their numbers, stripped.

    >>> code_lines('\"\"\"About.\"\"\"\\n\\nx = 1  # why\\n')
    [(3, 'x = 1  # why')]
    """
    rows, docs = set(), _docstring_lines(text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _QUIET and token.type != tokenize.ENDMARKER:
            rows |= set(range(token.start[0], token.end[0] + 1))
    every = text.splitlines()
    return [(row, every[row - 1].strip()) for row in sorted(rows - docs)]


def _docstring_lines(text: str) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        for statement in getattr(node, "body", []) if isinstance(getattr(node, "body", []), list) else ():
            alone = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if alone and isinstance(statement.value.value, str):
                found |= set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return found


def import_graph(source: Path, texts: Mapping[Path, str], packages: Mapping[str, str]) -> Graph:
    """The packages that each package imports, anywhere in its files."""
    top, graph = source.name, defaultdict(set)
    for file, text in texts.items():
        parts = file.relative_to(source.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        here = package_of(module, packages)
        for name in _imported(text, ".".join(parts[:-1])):
            there = package_of(name, packages) if name.startswith(f"{top}.") else here
            if here and there and there != here:
                graph[here].add(there)
    return dict(graph)


def package_of(module: str, packages: Mapping[str, str]) -> str:
    """The package of a module: by the longest prefix that is mapped, else the first name below the top.

    >>> package_of("fedalloy.run.driver", {"fedalloy.run": "experiment"}), package_of("fedalloy.core.tree", {})
    ('experiment', 'core')
    """
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (found := packages.get(".".join(parts[:length]))) is not None:
            return found
    return parts[1] if len(parts) > 1 else ""


def _imported(text: str, package: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")
            origin = ".".join(base[: len(base) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (origin, node.module) if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def cycles(graph: Graph) -> list[list[str]]:
    """Sets of packages that all reach each other, largest first.

    >>> cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    [['a', 'b', 'c']]
    """
    reach = {package: _reached(graph, package) for package in graph}
    groups = {
        frozenset(other for other in reach if package in reach[other] and other in reach[package]) for package in reach
    }
    return sorted((sorted(group) for group in groups if len(group) > 1), key=lambda group: (-len(group), group))


def _reached(graph: Graph, start: str) -> set[str]:
    seen, left = set[str](), [start]
    while left:
        for other in graph.get(left.pop(), ()):
            if other not in seen:
                seen.add(other)
                left.append(other)
    return seen


def duplicates(lines: Mapping[str, list[tuple[int, str]]]) -> list[str]:
    """Runs of code lines that occur in two places; import lines and lone brackets are ignored."""
    places: dict[tuple[str, ...], tuple[str, int]] = {}
    found: list[str] = []
    for file, code in lines.items():
        telling = [(row, text) for row, text in code if not text.startswith(("import ", "from ")) and len(text) > 1]
        row = 0
        while row + BLOCK <= len(telling):
            block = tuple(text for _, text in telling[row : row + BLOCK])
            other = places.setdefault(block, (file, telling[row][0]))
            same = other == (file, telling[row][0])
            if not same:
                found.append(f"{file}:{telling[row][0]} and {other[0]}:{other[1]}")
            row += 1 if same else BLOCK
    return found


def _repeated_classes(source: Path, texts: Mapping[Path, str]) -> dict[str, list[str]]:
    where: dict[str, list[str]] = defaultdict(list)
    for file, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(str(file.relative_to(source)))
    return {name: files for name, files in sorted(where.items()) if len(files) > 1}


def _repeated(names: Iterator[str]) -> dict[str, int]:
    return {name: count for name, count in sorted(Counter(names).items()) if count > 1}


def _some(names: Mapping[str, object], most: int = 12) -> str:
    return ", ".join(list(names)[:most]) + (", ..." if len(names) > most else "")


if __name__ == "__main__":
    main()

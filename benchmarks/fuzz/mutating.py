"""Mutations: one small change to a valid input, chosen by a generator whose seed Hypothesis has drawn."""

from __future__ import annotations

import copy
import io
import json
import math
import tomllib
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

from benchmarks.fuzz.canary import NAME
from fedalloy.experiment.records import toml

Case = dict[str, bytes]
"""An input: named pieces of bytes, often the files of a folder."""

_DEEP: Any = 1
for _ in range(300):
    _DEEP = [_DEEP]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30,
    0.5, -0.0, 1e-320, 1e30, 1e308, -1e308, math.inf, -math.inf, math.nan,
    "", " ", "a", "nan", "0", "-1", "1e400", "\x00", "\ud800", "é" * 40, "x" * 3000, "..", ".", "/", "../../outside",
    "/etc/passwd", "~/.ssh/id_rsa", "file:///etc/passwd", "C:\\windows", "%s%n", "${HOME}", "{0.__class__}",
    NAME, "os:getcwd", "subprocess:Popen", "turtle:Turtle", "antigravity:fly", "builtins:eval", "fedalloy.cli:main",
    [], {}, [[]], [None], [0] * 500, ["a", 1, None], {"": 1}, {"kind": NAME}, {"__class__": "os.system"}, _DEEP,
    {"kind": "subprocess:Popen", "args": ["true"]}, [["kind", NAME], ["args", ["true"]]],
    [["kind", "subprocess:Popen"], ["args", ["true"]]],
]  # fmt: skip
"""Difficult values: limits of numbers, paths, names of functions, empty values, deep nesting."""
_BYTES = [b"", b"\x00", b"\xff" * 8, b"\n", b"\r\n", b"{", b"[" * 3000, b'"', b"NaN", b"1e999", b"-1", b"=",
          b"\xef\xbb\xbf", b"PK\x03\x04", b"\x93NUMPY", b"(dp0\n.", b"cos\nsystem\n(S'true'\ntR.", b"null",
          b"\xc3\x28"]  # fmt: skip


def changed(case: Case, random: Random) -> Case:
    """One piece of a case mutated, taken out, or replaced by another one."""
    names = sorted(case)
    name = names[random.randrange(len(names))]
    way = random.randrange(24)
    if way == 0 and len(names) > 1:
        return {other: data for other, data in case.items() if other != name}
    if way == 1:
        return {**case, name: case[names[random.randrange(len(names))]]}
    return {**case, name: mutated(name, case[name], random)}


def mutated(name: str, data: bytes, random: Random) -> bytes:
    """One piece, changed according to its file type; every fifth time only its bytes."""
    edit = next((known for ending, known in EDITS.items() if name.endswith(ending)), None)
    if edit is None or random.randrange(5) == 0:
        return mutated_bytes(data, random)
    try:
        return edit(data, random)
    except Exception:
        return mutated_bytes(data, random)  # an earlier change has made it something else


def mutated_bytes(data: bytes, random: Random) -> bytes:
    """A piece overwritten, taken out, repeated or put in; or the end cut off."""
    start = random.randrange(len(data) + 1)
    end = min(len(data), start + (1, 1, 4, 16, 64, 1000)[random.randrange(6)])
    way = random.randrange(6)
    if way == 0:
        return data[:start]
    if way == 1:
        return data[:start] + data[end:]
    if way == 2:
        return data[:end] + data[start:]
    if way == 3:
        return data[:start] + _BYTES[random.randrange(len(_BYTES))] + data[start:]
    if way == 4:
        return data[:start] + bytes([random.randrange(256)]) + data[start + 1 :]
    return data[:start] + _BYTES[random.randrange(len(_BYTES))] + data[end:]


def mutated_tree(tree: Any, random: Random) -> Any:
    """A nested value in which one place is changed: replaced, removed, renamed, repeated or moved."""
    tree = copy.deepcopy(tree)
    places = list(_places(tree))
    if not places:
        return VALUES[random.randrange(len(VALUES))]
    holder, key = places[random.randrange(len(places))]
    way = random.randrange(10)
    if way == 0:
        del holder[key]
    elif way == 1 and isinstance(holder, dict):
        holder[_name(random)] = holder.pop(key)
    elif way == 2 and isinstance(holder, dict):
        holder[_name(random)] = copy.deepcopy(holder[key])
    elif way == 2:
        holder.insert(key, copy.deepcopy(holder[key]))
    elif way == 3:
        other, place = places[random.randrange(len(places))]
        holder[key] = copy.deepcopy(other[place])
    elif way == 4:
        holder[key] = _bent(holder[key], random)
    else:
        holder[key] = copy.deepcopy(VALUES[random.randrange(len(VALUES))])
    return tree


def _places(tree: Any) -> Any:
    """Every place of a nested value, as its holder and its key there."""
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(inside):
        yield tree, key
        yield from _places(value)


def _name(random: Random) -> str:
    words = [value for value in VALUES if isinstance(value, str)]
    return words[random.randrange(len(words))]


def _bent(value: Any, random: Random) -> Any:
    """The same value in another form, which a lax reader would accept."""
    if isinstance(value, dict):
        return [list(pair) for pair in value.items()]
    if isinstance(value, bool) or value is None or isinstance(value, list):
        return [value]
    if isinstance(value, str):
        return (value.upper(), value + "x", value[:1], [value], {"kind": value})[random.randrange(5)]
    factor = (-1, 0, 0.5, 2, 1e6, 1e30)[random.randrange(6)]
    return value * factor if random.randrange(4) else str(value)


def mutated_json(data: bytes, random: Random) -> bytes:
    """A JSON document with one place changed."""
    return json.dumps(mutated_tree(json.loads(data), random)).encode("utf-8", "surrogatepass")


def mutated_lines(data: bytes, random: Random) -> bytes:
    """A file of JSON lines: one changed, taken out, repeated or moved."""
    lines = data.splitlines(keepends=True)
    if not lines:
        return b"{}\n"
    place, way = random.randrange(len(lines)), random.randrange(8)
    if way == 0:
        del lines[place]
    elif way == 1:
        lines.insert(place, lines[random.randrange(len(lines))])
    elif way == 2:
        lines[place] = lines[place].rstrip(b"\n")
    else:
        lines[place] = mutated_json(lines[place], random) + b"\n"
    return b"".join(lines)


def mutated_toml(data: bytes, random: Random) -> bytes:
    """A TOML document with one place changed; TOML has no null, so that is left out."""
    return toml.dumps(_without_null(mutated_tree(tomllib.loads(data.decode()), random))).encode("utf-8", "replace")


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(one) for key, one in value.items() if one is not None}
    return [_without_null(one) for one in value if one is not None] if isinstance(value, list) else value


def mutated_array(data: bytes, random: Random) -> bytes:
    """An array in numpy's format: mostly its header, which describes the bytes after it."""
    if data[:6] != b"\x93NUMPY":
        raise ValueError("no array")
    size = int.from_bytes(data[8:10], "little")
    head, rest = data[10 : 10 + size].decode("latin-1"), data[10 + size :]
    swaps = [
        ("'descr': '", "'descr': '|O"), ("<f4", "|O"), ("<f4", "<f8"), ("<f8", "<U999999999"), ("<i8", "<M8[ns]"),
        ("(", f"({2**40}, "), ("(", "(-1, "), ("(", "(0, "), ("(", "(" + "1, " * 40), ("False", "True"),
        ("False", NAME), ("'shape'", "'shape': (), 'x'"), ("}", ", 'y': 1}"), ("{", "__import__('turtle') or {"),
    ]  # fmt: skip
    old, new = swaps[random.randrange(len(swaps))]
    head = head.replace(old, new, 1) if old in head else mutated_bytes(head.encode("latin-1"), random).decode("latin-1")
    body = mutated_bytes(rest, random) if random.randrange(4) == 0 else rest
    return data[:8] + len(head).to_bytes(2, "little", signed=False) + head.encode("latin-1") + body


def mutated_archive(data: bytes, random: Random) -> bytes:
    """An archive of arrays: one of them changed, renamed or repeated, or a claim about its size."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = [(info.filename, archive.read(info)) for info in archive.infolist()]
    place, way = random.randrange(len(parts)), random.randrange(7)
    name, content = parts[place]
    if way == 0:
        del parts[place]
    elif way == 1:
        parts[place] = (("../outside.npy", "x", "y.npy", "/abs.npy", "")[random.randrange(5)], content)
    elif way == 2:
        parts[place] = (name, content + bytes(1 << 20))  # small when compressed
    else:
        parts[place] = (name, mutated("x.npy", content, random))
    made = io.BytesIO()
    packed = zipfile.ZIP_DEFLATED if way == 2 or random.randrange(3) == 0 else zipfile.ZIP_STORED
    with zipfile.ZipFile(made, "w", packed) as archive:
        for name, content in parts:
            archive.writestr(name or "empty", content)
    return made.getvalue()


EDITS: dict[str, Callable[[bytes, Random], bytes]] = {
    ".jsonl": mutated_lines,
    ".json": mutated_json,
    ".toml": mutated_toml,
    ".npy": mutated_array,
    ".npz": mutated_archive,
}
"""How to change a piece, by the ending of its name."""

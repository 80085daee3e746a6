"""Checkpoints: files with a valid checksum but foreign content, and damaged files."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.fuzz.driving import Way
from benchmarks.fuzz.mutating import Case, mutated_bytes, mutated_tree

_FILE = "round-000002.safetensors"


@functools.cache
def examples() -> list[Case]:
    """States of every form that occurs."""
    from fedalloy.experiment.records import checkpoint

    states: list[dict[str, Any]] = [
        _state(),
        {"round": 1, "clients": {}, "server": {}, "extra": {}, "lengths": {"rounds": 0, "clients": 0}},
    ]
    found = []
    for state in states:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.write(Path(folder) / _FILE, state)
            found.append({_FILE: (Path(folder) / _FILE).read_bytes()})
    return found


def _state() -> dict[str, Any]:
    params = {"weight": torch.ones(2, 3), "bias": torch.zeros(2, dtype=torch.float64)}
    server = {
        "shared": {"params": params, "buffers": {"count": torch.tensor(3)}},
        "weighting": {},
        "server": {"m": params},
    }
    clients = {"0": {"solver": {"c": params}, "wire": {}}, "7": {"solver": {}, "wire": {"0": (1, 2.5, None)}}}
    extra = {
        "progress": {"round": 2, "best": float("nan"), "list": [True, "a"]},
        "odd": torch.ones(2, dtype=torch.complex64),
    }
    return {"round": 2, "lengths": {"rounds": 0, "clients": 0}, "server": server, "clients": clients, "extra": extra}


def change(case: Case, random: Random) -> Case:
    """Mostly a changed header with a new checksum, since otherwise every case would end at the checksum."""
    data = case[_FILE]
    return {_FILE: _signed(data, random) if random.randrange(4) else mutated_bytes(data, random)}


def _signed(data: bytes, random: Random) -> bytes:
    """The file with one change in its state, its list of tensors or its header, and the checksum of its content."""
    try:
        size = int.from_bytes(data[:8], "little")
        listed = json.loads(data[8 : 8 + size])
        header = json.loads(listed["__metadata__"]["fedalloy"])
        way = random.randrange(5)
        if way == 0:
            listed = mutated_tree(listed, random)
        elif way == 1:
            header = mutated_tree(header, random)
        else:
            header["state"] = mutated_tree(header["state"], random)
            header["sha256"] = _digest(data, header["state"])
        if way:
            listed["__metadata__"] = {"fedalloy": json.dumps(header)}
        text = json.dumps(listed).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]
    except Exception:
        return mutated_bytes(data, random)


def _digest(data: bytes, skeleton: Any) -> str:
    from safetensors.torch import load

    from fedalloy.experiment.records.checkpoint import digest

    return digest(load(data), skeleton)


def read(case: Case, folder: Path) -> str:
    """Read as a resumed run does: the newest intact checkpoint, and the records cut to it."""
    from fedalloy.experiment.records.folder import RunFolder

    run = RunFolder.create(folder / "run", {"run": {"rounds": 3}}, {})
    (run.path / "checkpoints" / _FILE).write_bytes(case.get(_FILE, b""))
    said: list[str] = []
    with run.lock():
        found = run.latest(report=said.append)
        if found is None:
            return "refused"
        run.rewind(found)
    return "fine"


WAY = Way("checkpoints", examples, read, 1000, change=change)

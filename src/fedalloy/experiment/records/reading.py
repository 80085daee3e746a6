"""Read a finished or running run, row by row, and its name.

``rounds.jsonl`` has one object per round:

| column | meaning |
|---|---|
| ``round`` | counted from 1 |
| ``ids`` | the clients whose contribution was used, ascending |
| ``weights`` | one number per id, or ``{layer: [...]}`` for finer weights |
| ``dropped`` | ``{id: reason}`` for contributions that were refused |
| ``absent`` | ids that were expected and sent nothing |
| ``idle`` | ids that took no step (no examples, no time); whether they count is up to the rule: see ``ids`` |
| ``refusal`` | why the rule could not be applied to these clients, so that the round had no effect; else null |
| ``train_loss`` | mean training loss over the clients |
| ``bytes_up``, ``bytes_down`` | what was transferred in the round: the bytes of tensors, packed, without headers |
| ``simulated_seconds`` | how long the round takes on the simulated devices |
| ``info`` | ``{name: value}``: intermediate values of the rules |
| ``evaluation`` | ``{metric: {"mean": ..., "worst_served": ..., ...}}`` over clients; only in rounds that evaluate |
| ``evaluation_global`` | the same for the global model, where ``evaluation`` is of the clients' own models |
| ``evaluation_mix`` | ``{metric: {"lambda", "mean", "fixed", "validated", "best_mean", "oracle"}}`` (:mod:`fedalloy.experiment.mixing`) |
| ``global`` | ``{metric: value}`` on the global test set; only in rounds that evaluate |

``worst_served`` and ``best_served`` are the means over the 10 % of clients that are served worst and best; a metric without
a direction has neither. ``worst`` and ``best`` are the lowest and the highest 10 %, of a loss as well. ``variance`` is
that of 100 times the values, of any metric: in percent squared for shares, such as an accuracy.

``clients.jsonl`` has one object per evaluation and model, arrays in the order of ``ids``: ``round``, ``split``
(``train``, ``valid`` or ``test``), ``model``, ``ids``, and one array per metric. ``model`` is ``global``, or, for methods
whose clients have a model of their own, also ``personal``, which then comes last in its round; ``mixed`` rows score
``(1 - mix)`` federated plus ``mix`` local model and have a column ``mix``. A number that is not finite is ``null``:
a client without a score, or one whose loss overflowed (then its other metrics have values), which counts as worst.

An evaluation of very many clients (``parquet_from`` of the run, 100,000) is a file: its line has ``clients``, their
number, and ``parquet``, the name of a file in ``evaluations/`` with a row per client (``id`` and the metrics) and
the line's other columns. :func:`read_run` gives both kinds of row alike.

With pandas::

    rounds = pd.read_json("runs/a/rounds.jsonl", lines=True)
    clients = pd.read_json("runs/a/clients.jsonl", lines=True).explode(["ids", "accuracy"])  # a row per client
    mine = clients[clients["model"] == "personal"]
    many = pd.read_parquet("runs/a/evaluations")  # where there are very many clients: a row per client

With DuckDB::

    duckdb.sql("SELECT round, train_loss FROM read_json_auto('runs/a/rounds.jsonl')")
    duckdb.sql("SELECT round, unnest(ids) AS id, unnest(accuracy) AS accuracy FROM read_json_auto('runs/a/clients.jsonl')")
"""  # noqa: E501 (a one-line read stays one line)

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.core.showing import ShownRuns
from fedalloy.experiment.records import shape
from fedalloy.experiment.records.client_tables import ClientTables, is_line
from fedalloy.experiment.records.lock import holder
from fedalloy.experiment.records.shapes import MANIFEST, STATUS, fault, is_row
from fedalloy.experiment.records.stream import decode

_BLOCK = 1 << 16
_KNOWN = {"status.json": STATUS, "manifest.json": MANIFEST}
GIVEN = "python"
"""``task.dataset`` of a run whose data and model were given in Python and are in no recipe."""


@dataclass(frozen=True, repr=False)
class RunRecord(ShownRuns):
    """The records of one run; rows are read again at every call, so a running run shows its progress."""

    path: Path
    recipe: dict[str, Any]
    environment: dict[str, Any]
    status: dict[str, Any]
    manifest: dict[str, Any] | None

    def __repr__(self) -> str:
        told = f"{name_of(self.recipe)}, seed {seed_of(self.recipe)}"
        return f"<{told}: {self.status.get('state', 'running')} in round {self.last_round}; folder {self.path}>"

    def rounds(self) -> Iterator[dict[str, Any]]:
        """The rows of ``rounds.jsonl``."""
        path = self.path / "rounds.jsonl"
        return (shape.checked_round(row, f"{path}, row {number}") for number, row in enumerate(read_rows(path), 1))

    def clients(self) -> Iterator[dict[str, Any]]:
        """The rows of ``clients.jsonl``, those in files of their own too."""
        path, tables = self.path / "clients.jsonl", ClientTables(self.path)
        rows = enumerate(read_rows(path), 1)
        return (shape.checked_clients(tables.whole(row), f"{path}, row {number}") for number, row in rows)

    def timings(self) -> Iterator[dict[str, Any]]:
        """The rows of ``timings.jsonl``."""
        path = self.path / "timings.jsonl"
        return (shape.checked_timing(row, f"{path}, row {number}") for number, row in enumerate(read_rows(path), 1))

    @property
    def last_round(self) -> int:
        """The last round on record, 0 before the first; reads the end of the file only."""
        row = last_row(self.path / "rounds.jsonl")
        return int(row["round"]) if row else 0

    @property
    def start(self) -> str:
        """A hash of the initial model; empty in a folder of an earlier version."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads((self.path / "identity.json").read_text(encoding="utf-8"))["initial"]["sha256"])
        return ""

    @property
    def columns(self) -> dict[str, list[str]]:
        """The columns of ``rounds`` and ``clients`` in the order in which they appear; reads row by row."""
        return {"rounds": _columns(self.rounds()), "clients": _columns(self.clients())}


def read_run(path: str | Path) -> RunRecord:
    """Open a run for reading; its records may still be growing."""
    if not isinstance(path, str | Path):
        raise SpecError(f"read_run takes the path of one run folder, got {path!r}")
    folder = Path(path)
    if not is_run(folder):
        raise CheckpointError(f"{path} holds no run (no recipe.toml with an environment.json); name a run folder")
    return RunRecord(
        folder,
        read_recipe(folder / "recipe.toml"),
        read_json(folder / "environment.json") or {},
        read_status(folder),
        shape.checked_manifest(read_json(folder / "manifest.json"), folder / "manifest.json"),
    )


def read_runs(folder: str | Path) -> list[RunRecord]:
    """Every run below a folder, such as that of a comparison; a folder that does not exist is refused."""
    if not isinstance(folder, str | Path):
        raise SpecError(f"read_runs takes the path of one folder, got {folder!r}")
    if not Path(folder).is_dir():
        raise CheckpointError(f"{folder} is not a folder; name one that holds runs")
    return [read_run(run) for run in find_runs(folder)]


def read_status(folder: Path) -> dict[str, Any]:
    """The status of a run: ``state``, ``round``, ``reason``. A run with the state running and a free lock was
    interrupted: by SIGKILL, a crash of the machine, or a disk so full that the status could not be written."""
    try:
        told = read_json(folder / "status.json") or {}
    except CheckpointError:
        told = {}
    status = {"state": "running", "round": 0, "reason": "", **told}
    if status["state"] == "running" and holder(folder / "lock") is None:
        status["state"] = "interrupted"
    return status


def find_runs(folder: str | Path) -> list[Path]:
    """Every run in a folder and below, sorted; run folders are not searched further."""
    found = []
    for place, below, _ in os.walk(folder):
        if is_run(Path(place)):
            found.append(Path(place))
            below.clear()
    return sorted(found)


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return (folder / "recipe.toml").is_file() and (folder / "environment.json").is_file()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a stream, without a last line that is still being written."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            row = decode(line)
            if row is not None:
                yield row
            elif next(lines, None) is not None:
                raise _no_row(path, number)


def read_lines(path: Path) -> Iterator[tuple[int, bytes, Callable[[], dict[str, Any]]]]:
    """The same, not parsed: the number of every whole line, the line, and what parses it."""
    if not path.exists():
        return

    def parsed() -> dict[str, Any]:
        row = decode(line)
        if row is None:
            raise _no_row(path, number)
        return row

    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n"):
                yield number, line, parsed


def _no_row(path: Path, number: int) -> CheckpointError:
    return CheckpointError(f"{path}, line {number} is not a JSON object; resume the run or restore the file")


def last_row(path: Path) -> dict[str, Any] | None:
    """The last complete row of a stream, found from its end."""
    return next(newest_rows(path), None)


def newest_rows(path: Path, most: int | None = None) -> Iterator[dict[str, Any]]:
    """The complete rows of a stream, newest first, at most ``most``; reads from the end of the file."""
    rows = (row for row in map(decode, _lines_backwards(path)) if row is not None and is_row(row))
    return islice(rows, most)


def last_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of the last round of a stream in their order, found from its end."""
    found: list[dict[str, Any]] = []
    for line in _lines_backwards(path):
        row = decode(line)
        if row is None or not is_row(row):
            continue
        if found and row["round"] != found[-1]["round"]:
            break
        found.append(row)
    return found[::-1]


def last_clients(run: Path) -> list[dict[str, Any]]:
    """The rows of the last evaluation of clients in their order, those in files of their own too."""
    path, tables = run / "clients.jsonl", ClientTables(run)
    return [
        shape.checked_clients(tables.whole(row), f"the end of {path}") if is_line(row) else row
        for row in last_rows(path)
    ]


def tables_of(run: Path) -> ClientTables:
    """The files with scores of many clients, as the run declared them when it began."""
    least = (read_json(run / "environment.json") or {}).get("parquet_from")
    return ClientTables(run, least if type(least) is int and least > 0 else None)


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """The lines of a file, last one first, read a block at a time."""
    if not path.exists():
        return
    with path.open("rb") as file:
        end, tail = file.seek(0, os.SEEK_END), b""
        while end > 0:
            begin = max(0, end - _BLOCK)
            file.seek(begin)
            lines = (file.read(end - begin) + tail).splitlines(keepends=True)
            end, tail = begin, lines[0]
            yield from reversed(lines[1:])
        yield tail


def _columns(rows: Iterator[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def read_json(path: Path) -> dict[str, Any] | None:
    """A small JSON file, or None where there is none."""
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: no JSON ({error}); restore it, or run again elsewhere") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: no JSON object; restore it, or run again elsewhere")
    wrong = fault(value, _KNOWN.get(path.name, {}))
    if wrong:
        raise CheckpointError(f"{path} is damaged: {wrong} is invalid; restore it, or run again elsewhere")
    return value


def read_recipe(path: Path) -> dict[str, Any]:
    """The recipe of a run; the parts that readers use are checked."""
    try:
        return shape.checked_recipe(tomllib.loads(path.read_text(encoding="utf-8")), path)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: no TOML ({error}); restore it, or run again elsewhere") from None


QUICK = " (quick)"
"""Suffix of the name of a run that was shortened."""


def name_of(recipe: Mapping[str, Any]) -> str:
    """The name of a run: its own, its method's, or that of its parts.

    >>> name_of({"algorithm": {"name": "fedavg"}}), name_of({"weighting": {"kind": "uniform"}})
    ('fedavg', 'fedavg, uniform')

    The parts of FedAvg are FedAvg, and those of another method are listed, whichever settings they have.

    >>> kinds = {"solver": {"kind": "sgd"}, "weighting": {"kind": "samples"}, "server": {"kind": "sgd"}}
    >>> name_of(kinds), name_of({**kinds, "solver": {"kind": "ditto"}})
    ('fedavg', 'ditto, samples, sgd')

    A shortened run is marked, so that it is not mistaken for a result.

    >>> name_of({"name": "mine", "run": {"quick": True}})
    'mine (quick)'
    """
    return _own_name(recipe) + (QUICK if recipe.get("run", {}).get("quick") else "")


def seed_of(recipe: Mapping[str, Any]) -> int:
    """The seed of a one-run recipe; runs started from Python store it as a single number."""
    settings = recipe.get("run", {})
    seeds = settings.get("seeds", [settings.get("seed", 0)])
    return int(seeds[0])


_FEDAVG = ["sgd", "samples", "sgd"]


def _own_name(recipe: Mapping[str, Any]) -> str:
    if recipe.get("name"):
        return str(recipe["name"])
    table = recipe.get("algorithm", {})
    inside = {**table, **recipe}
    parts = [str(inside[part]["kind"]) for part in ("solver", "weighting", "server") if _is_rule(inside.get(part))]
    parts = [] if parts == _FEDAVG else parts
    named = table.get("name") or ("fedavg" if len(parts) < 3 else "")
    return ", ".join([str(named)] * bool(named) + parts)


def _is_rule(value: Any) -> bool:
    return isinstance(value, Mapping) and "kind" in value

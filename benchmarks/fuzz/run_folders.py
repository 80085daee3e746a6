"""Run folders: untrusted ones, read by ``show``, ``report``, ``export``, ``serve`` and a resumed run."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.fuzz.driving import Way
from benchmarks.fuzz.mutating import Case

_HOW = "how"


@functools.cache
def examples() -> list[Case]:
    """A small run of each kind whose pages differ, once for every reader."""
    import fedalloy
    from fedalloy import algorithms
    from fedalloy.testing import small_task

    found = []
    for name in ("fedavg", "ditto"):
        with tempfile.TemporaryDirectory() as place:
            run = Path(place) / "run"
            fedalloy.fit(algorithms.named(name, batch_size=4), small_task(), rounds=3, engine="loop", folder=run)
            files = {str(file.relative_to(run)): file.read_bytes() for file in sorted(run.rglob("*")) if file.is_file()}
        files = {path: data for path, data in files.items() if path != "lock" and data}
        files["recipe.toml"] += b'\nname = "x"\n' if not files["recipe.toml"].startswith(b"[") else b""
        files["manifest.json"] = json.dumps({"clients": 6, "names": list("abcdef"), "sizes": [4] * 6}).encode()
        found += [{**files, _HOW: how.encode()} for how in READERS]
    return found


def read(case: Case, folder: Path) -> str:
    """Write the folder and run one of its readers."""
    run = folder / "runs" / "run"
    (run / "checkpoints").mkdir(parents=True)
    for name, data in case.items():
        if name != _HOW:
            (run / name).write_bytes(data)
    reader = READERS.get(case.get(_HOW, b"").decode("utf-8", "replace"), _outcome)
    reader(run)
    return "fine"


def _outcome(run: Path) -> None:
    from contextlib import redirect_stdout
    from io import StringIO

    from fedalloy.cli.show import show_run

    with redirect_stdout(StringIO()):
        show_run(run, as_json=False)
        show_run(run, as_json=True)


def _report(run: Path) -> None:
    from fedalloy.report.page import write_page

    write_page([run], run.parent / "page.html")


def _export(run: Path) -> None:
    from fedalloy.results.export.latex import write_latex
    from fedalloy.results.export.tables import TABLES, blocks
    from fedalloy.results.export.writing import WRITERS
    from fedalloy.results.runs import runs_in

    chosen = runs_in([run])
    for table in TABLES:
        WRITERS["csv"](run.parent / f"{table}.csv", lambda table=table: blocks(table, chosen))  # type: ignore[misc]
    write_latex(run.parent / "results.tex", chosen)


def _serve(run: Path) -> None:
    from fedalloy.experiment.records.index import Index
    from fedalloy.report.live.answers import clients, details
    from fedalloy.report.live.gathered import gathered
    from fedalloy.report.live.runs import RunStore

    store = RunStore(run.parent)
    store.scan()
    for name in store.folders:
        json.dumps(store.summary(name), allow_nan=False)
        index = Index(store.folder(name), gathered())
        try:
            json.dumps(details(store, name, index), allow_nan=False)
            clients(store, name, index, 1)
        finally:
            index.close()


def _resume(run: Path) -> None:
    from fedalloy.experiment.records.folder import RunFolder

    folder = RunFolder.open(run)
    with folder.lock():
        folder.rewind(folder.latest(report=lambda text: None))


READERS: dict[str, Callable[[Path], None]] = {
    "show": _outcome,
    "report": _report,
    "export": _export,
    "serve": _serve,
    "resume": _resume,
}
WAY = Way("run-folders", examples, read, 1000)

"""How fast the live page is shown: ``python -m benchmarks.serve [FOLDER]`` measures it in headless Chromium.

Writes a run of 10,000 rounds x 1000 clients and a folder of 1000 runs (once; FOLDER keeps them) and opens the page over
each: first without an index, then with it, then while it is already open. One JSON object per line.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from selenium.webdriver.support.ui import WebDriverWait

from benchmarks.long_run import write_long_run, write_many_runs
from fedalloy.experiment.records.index import Index
from fedalloy.report.live.gathered import gathered
from fedalloy.report.live.server import LiveServer
from tests.browser.chromium import chromium

LIST = "return document.querySelectorAll('#runs .run').length ? performance.now() : null"
CURVE = """
return document.querySelector('#curves path.line') ? performance.getEntriesByName('fedalloy-drawn')[0].startTime : null
"""


@contextmanager
def serving(root: Path) -> Iterator[tuple[LiveServer, float]]:
    """A server and the seconds it took to start."""
    begin = time.perf_counter()
    server = LiveServer(root)
    spent = time.perf_counter() - begin
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1})
    thread.start()
    yield server, spent
    server.shutdown()
    server.server_close()
    thread.join()


def _indexed(server: LiveServer, _: Any) -> bool:
    return len(server.watch.index("long")) == 10_000


def opened(driver: Any, url: str, sign: str) -> float:
    """Milliseconds from the start of the navigation until the list or a curve is drawn."""
    driver.get("about:blank")
    driver.get(url)
    drawn: float = WebDriverWait(driver, 120, 0.02).until(lambda one: one.execute_script(sign))
    return round(drawn)


def long_run(driver: Any, root: Path) -> dict[str, Any]:
    """The page over one very long run, ticked."""
    run = root / "long"
    if not run.exists():
        write_long_run(run)
    (run / "index.sqlite").unlink(missing_ok=True)
    size = sum(file.stat().st_size for file in run.glob("*.jsonl"))
    begin = time.perf_counter()
    index = Index(run, gathered())
    index.update_fully()
    made = time.perf_counter() - begin
    index.close()
    kept = (run / "index.sqlite").stat().st_size
    (run / "index.sqlite").unlink()
    measured = {}
    for what in ("without_index_ms", "with_index_ms"):
        with serving(root) as (server, _):
            measured[what] = opened(driver, f"{server.url}#run=long", CURVE)
            if what == "without_index_ms":
                WebDriverWait(driver, 300, 0.1).until(partial(_indexed, server))
            else:
                measured["again_ms"] = opened(driver, f"{server.url}#run=long", CURVE)
    return {"case": "10,000 rounds x 1000 clients", "records_mb": round(size / 1e6), "index_s": round(made, 1),
            "index_mb": round(kept / 1e6, 1), **measured}  # fmt: skip


def many_runs(driver: Any, root: Path) -> dict[str, Any]:
    """The page over a list of a thousand runs."""
    if not root.exists():
        write_many_runs(root)
    with serving(root) as (server, spent):
        listed = opened(driver, server.url, LIST)
        begin = time.perf_counter()
        server.watch.look(scan=True)
        look = time.perf_counter() - begin
    return {"case": "1000 runs", "start_s": round(spent, 2), "listed_ms": listed, "one_look_ms": round(1e3 * look)}


def main() -> None:
    """Measure both."""
    with tempfile.TemporaryDirectory() as scratch, chromium() as driver:
        root = Path(sys.argv[1] if len(sys.argv) > 1 else scratch)
        print(json.dumps(long_run(driver, root / "one")), flush=True)
        print(json.dumps(many_runs(driver, root / "many")), flush=True)
        print(json.dumps({"peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))


if __name__ == "__main__":
    main()

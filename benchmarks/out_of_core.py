"""Aggregation of contributions that are larger than memory: 200 clients x 25 M float32 parameters, 20 GB on disk.

    PYTHONPATH=src python -m benchmarks.out_of_core [--clients 200] [--parameters 25000000] [--folder PATH]
                                                    [--only fedavg fedadp trimmed_mean] [--cached] [--json]
                                                    [--output PATH]

Rows of distinct normal numbers arrive one by one and are written as an engine writes them; then the whole server step
of every rule is run on the handle. Before every pass the files are removed from the page cache (``--cached``: they are
not), and the share that is cached is measured and printed. `bandwidth` is bytes read divided by the time of the server
step, per pass over the rows (FedAvg: 1, FedAdp: 3, trimmed mean: 1), beside a plain read of the same file just before,
in blocks of 4 MB by one thread. The trimmed mean is compared with its kernel on a part of the rows that is in memory.
`memory` is the peak of anonymous plus shared memory of this process during the pass. Results are compared with
sums in float64 that are made row by row from the same draws, for a sample of the columns in the case of the trimmed
mean. Exits with 1 when a requirement is not met: 4 GB, half the bandwidth of the plain read, 80 % of the kernel in
memory, an error above 1e-6 of sum |w x|.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.scale_results import keep
from fedalloy.core.algorithm import Algorithm, ServerState, server_step
from fedalloy.core.elements import combine_elements
from fedalloy.core.gathering import Gathering
from fedalloy.core.keys import Key
from fedalloy.core.protocols import ElementWeighting, Weighting
from fedalloy.core.types import Cohort, Context, Contributions, Tree, Work
from fedalloy.engines.out_of_core import MappedContributions, StorageLimit
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.fedadp import Angles
from fedalloy.methods.weightings.robust import TrimmedMean
from fedalloy.methods.weightings.samples import Samples

LAYERS = 5
MOST_GB, LEAST_OF_READ, LEAST_OF_KERNEL, MOST_ERROR = 4.0, 0.5, 0.8, 1e-6
BLOCK = 4 << 20
SAMPLED = 20_000
"""Columns of every layer for which the trimmed mean is recomputed."""
IN_MEMORY = 500_000
"""Columns of the part that is trimmed in memory for comparison."""
RULES: dict[str, tuple[Weighting, int]] = {
    "fedavg": (Samples(), 1), "fedadp": (Angles(), 3), "trimmed_mean": (TrimmedMean(0.1), 1),
}  # fmt: skip
"""Every rule with its passes over the rows."""


@dataclass
class Memory:
    """The peak of anonymous plus shared memory of this process while it is watched, in GB."""

    peak: float = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look every 5 ms from another thread."""
        stop = threading.Event()

        def look() -> None:
            while not stop.wait(0.005):
                self.peak = max(self.peak, held())

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.peak = max(self.peak, held())


def held() -> float:
    """Anonymous plus shared memory in GB; mapped files are page cache."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kinds = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return sum(int(kinds[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024 / 1e9


@dataclass
class Rows:
    """The contributions and what is known of them: sums in float64 made while they were drawn."""

    cohort: MappedContributions
    leaves: dict[str, int]
    sizes: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    picked: dict[str, Tensor] = field(default_factory=dict)

    @property
    def file(self) -> int:
        """The descriptor of the file."""
        return self.cohort.kept._file.fileno()

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self.cohort.kept.size


def row_of(client: int, width: int) -> Tensor:
    """One client's numbers."""
    return torch.empty(width).normal_(generator=Key.of(client).generator())


def make(clients: int, parameters: int, folder: Path | None) -> tuple[Rows, float]:
    """Draw and write all rows; returns them and the seconds it took to write them and sync the file."""
    width = parameters // LAYERS
    leaves = {f"layer{number}.weight": width for number in range(LAYERS)}
    like = {"delta": {name: torch.empty(width) for name in leaves}}
    storage = StorageLimit(0.0, folder)
    gathering = Gathering(Work.of(torch.arange(clients)), exact=True, like=like, storage=storage)
    picks = {name: Key.of(7).fold(name).permutation(width)[:SAMPLED] for name in leaves}
    # Allocated at once: small tensors that outlive large ones would leave gaps between them in memory.
    picked = {name: torch.empty(clients, len(pick)) for name, pick in picks.items()}
    sizes, writing = torch.arange(1, clients + 1, dtype=torch.float64), 0.0
    for client in range(clients):
        row = dict(zip(leaves, row_of(client, width * LAYERS).split(width), strict=True))
        for name, pick in picks.items():
            torch.index_select(row[name], 0, pick, out=picked[name][client])
        begin = time.perf_counter()
        stats = {"num_examples": sizes[[client]], "num_steps": torch.ones(1, dtype=torch.float64)}
        wrong = gathering.add(torch.tensor([client]), {"delta": {n: leaf[None] for n, leaf in row.items()}}, stats)
        assert wrong is None, wrong
        writing += time.perf_counter() - begin
    found = gathering.cohort()
    assert isinstance(found, MappedContributions)
    rows = Rows(found, leaves, sizes, picks, picked)
    begin = time.perf_counter()
    os.fsync(rows.file)
    return rows, writing + time.perf_counter() - begin


def cached_share(rows: Rows) -> float:
    """The share of the file that is in the page cache, by ``mincore``."""
    libc, count = ctypes.CDLL(None, use_errno=True), -(-rows.nbytes // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * count)()
    start = ctypes.c_void_p(rows.cohort.kept.bytes.data_ptr())
    assert libc.mincore(start, ctypes.c_size_t(rows.nbytes), flags) == 0
    return float((torch.frombuffer(flags, dtype=torch.uint8) & 1).float().mean())


def drop_cache(rows: Rows) -> None:
    """Remove the file from the page cache. Pages that are mapped stay, so they are unmapped first."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise(ctypes.c_void_p(rows.cohort.kept.bytes.data_ptr()), ctypes.c_size_t(rows.nbytes), 4)  # MADV_DONTNEED
    os.posix_fadvise(rows.file, 0, 0, os.POSIX_FADV_DONTNEED)


def plain_read(rows: Rows) -> float:
    """Seconds of reading the file from its beginning to its end."""
    buffer, at, begin = bytearray(BLOCK), 0, time.perf_counter()
    while count := os.preadv(rows.file, [buffer], at):
        at += count
    return time.perf_counter() - begin


def step(rule: Weighting, rows: Rows) -> tuple[ServerState, Any]:
    """The whole server step of a rule from a model of zeros."""
    algorithm = Algorithm(Sgd(), rule, ServerSgd())
    state = algorithm.init({name: torch.zeros(width) for name, width in rows.leaves.items()}, len(rows.cohort))
    found = server_step(algorithm, state, rows.cohort, Context(1, len(rows.cohort), Key.of(3), local_lr=0.1))
    return found.state, found.weights


def stream_error(rows: Rows, weights: Tensor, model: Tree) -> float:
    """The largest error of the new model relative to sum |w x|, from one pass over freshly drawn rows in float64."""
    total = torch.zeros(sum(rows.leaves.values()), dtype=torch.float64)
    size = torch.zeros_like(total)
    for client, weight in enumerate(weights.tolist()):
        term = row_of(client, len(total)).double().mul_(weight)
        total += term
        size += term.abs_()
    flat = torch.cat([model[name] for name in rows.leaves])
    return float(((flat.double() - total).abs() / size).max())


def trimmed_error(rows: Rows, model: Tree, cut: int) -> float:
    """The same for some columns of every layer, trimmed in float64."""
    worst = 0.0
    for name, pick in rows.columns.items():
        kept = rows.picked[name].double().sort(dim=0).values[cut : len(rows.cohort) - cut]
        size = kept.abs().mean(0)
        worst = max(worst, float(((model[name][pick].double() - kept.mean(0)).abs() / size).max()))
    return worst


def kernel_rate(rule: ElementWeighting, clients: int) -> float:
    """Bytes a second of an element-wise rule on rows in memory."""
    matrix = torch.stack([row_of(client, IN_MEMORY) for client in range(clients)])
    cohort: Contributions = Cohort(torch.arange(clients), {"delta": {"w": matrix}})
    begin = time.perf_counter()
    combine_elements(rule.open(cohort, {}, Context(1, clients, Key.of(3))), cohort, "delta", ("delta",))
    return matrix.numel() * 4 / (time.perf_counter() - begin)


def measure(name: str, rows: Rows, cached: bool) -> dict[str, Any]:
    """One rule: the plain read, the pass, the memory and the error."""
    rule, passes = RULES[name]
    told: dict[str, Any] = {"rule": name, "passes": passes}
    if not cached:
        drop_cache(rows)
    told["cached_before_read"] = cached_share(rows)
    told["read_gb_s"] = rows.nbytes / plain_read(rows) / 1e9
    if not cached:
        drop_cache(rows)
    told["cached_before"], memory = cached_share(rows), Memory()
    begin = time.perf_counter()
    with memory.watched():
        state, weights = step(rule, rows)
    told["seconds"] = time.perf_counter() - begin
    told["gb_s_per_pass"] = passes * rows.nbytes / told["seconds"] / 1e9
    told["memory_gb"] = memory.peak
    model = state["shared"]["params"]
    if isinstance(rule, ElementWeighting):
        told["kernel_gb_s"] = kernel_rate(rule, len(rows.cohort)) / 1e9
        told["error"] = trimmed_error(rows, model, -(-len(rows.cohort) // 10))
    else:
        told["error"] = stream_error(rows, weights, model)
    return told


def faults(told: dict[str, Any]) -> list[str]:
    """The requirements that are not met."""
    found = []
    if told["memory_gb"] > MOST_GB:
        found.append(f"{told['memory_gb']:.2f} GB of memory")
    floor = LEAST_OF_KERNEL * told["kernel_gb_s"] if "kernel_gb_s" in told else LEAST_OF_READ * told["read_gb_s"]
    if told["gb_s_per_pass"] < floor:
        found.append(f"{told['gb_s_per_pass']:.2f} GB/s, required {floor:.2f}")
    if told["error"] > MOST_ERROR:
        found.append(f"an error of {told['error']:.1e}")
    return [f"{told['rule']}: {one}" for one in found]


def line(told: dict[str, Any]) -> str:
    """A line of the table."""
    against = (
        f"kernel in memory {told['kernel_gb_s']:.3f}" if "kernel_gb_s" in told else f"read {told['read_gb_s']:.2f}"
    )
    return (
        f"{told['rule']:>13}: {told['seconds']:6.1f} s, {told['gb_s_per_pass']:.3f} GB/s a pass ({against}; plain read "
        f"{told['read_gb_s']:.2f}), memory {told['memory_gb']:.2f} GB, error {told['error']:.1e}, cached before "
        f"{100 * told['cached_before']:.0f} % (read: {100 * told['cached_before_read']:.0f} %)"
    )


def arguments() -> argparse.Namespace:
    """The command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--folder", type=Path, help="Where the rows are written; default: the temporary folder.")
    parser.add_argument("--only", nargs="*", choices=list(RULES), default=list(RULES))
    parser.add_argument("--cached", action="store_true", help="Leave the files in the page cache.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path, help="A file of results that the figures are added to.")
    return parser.parse_args()


def main() -> int:
    """Print a line for every rule; returns 1 if a requirement is not met."""
    chosen, memory = arguments(), Memory()
    with memory.watched():
        rows, writing = make(chosen.clients, chosen.parameters, chosen.folder)
    arriving = {"gb": rows.nbytes / 1e9, "write_s": writing, "memory_gb": memory.peak}
    if not chosen.json:
        print(f"{arriving['gb']:.1f} GB written and synced in {writing:.1f} s, memory {memory.peak:.2f} GB", flush=True)
    broken = [f"arriving: {memory.peak:.2f} GB of memory"] if memory.peak > MOST_GB else []
    every = []
    for name in chosen.only:
        told = measure(name, rows, chosen.cached)
        broken += faults(told)
        every.append(told)
        print(json.dumps({**arriving, **told}) if chosen.json else line(told), flush=True)
    if chosen.output:
        given = {"clients": chosen.clients, "parameters": chosen.parameters, "cached": chosen.cached}
        keep(chosen.output, "out_of_core", {**given, "arriving": arriving, "rules": every})
    if not chosen.json:
        print("; ".join(broken) or "All requirements are met.")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

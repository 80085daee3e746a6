"""Other frameworks beside fedalloy: four workloads, plain FedAvg, evaluation off, milliseconds a round.

    python -m benchmarks.peers [--repeats 3]         # measure; about ten minutes for three repeats on two idle cores
    python -m benchmarks.peers --only W1,W4 --peers fedalloy,loop,fedjax --scale 0.1 --output FILE
    python -m benchmarks.peers --prepare             # only make the peers' environments in .peers/
    python -m benchmarks.peers --check               # measures nothing: do the pages match the stored measurements?

Every peer runs in a process and a virtual environment of its own, which is made when it is missing (pip's own settings
apply; about five gigabytes in all), loads the same examples and the same initial model, and first shows that it does
the same work: after the same number of rounds its model must have moved as far as fedalloy's, within 10 %. Then the
peers take turns of a few seconds, in another order in every repeat, each with the better of one thread and all cores. A
turn begins when the machine is idle, the other peers being stopped; one in which other processes used a core is marked
as disturbed, and counts only if all are. fedalloy runs through the public ``fit`` with engine ``auto`` and its records
on. The results are written to benchmarks/results/peers.json, from which the table of docs/engines.md and the README's
sentence are generated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import page
from benchmarks.peers.environments import PEERS, ROOT, Peer
from benchmarks.peers.machine import describe
from benchmarks.peers.measuring import measure
from benchmarks.workloads import WORKLOADS, Workload


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", action="store_true", help="only make the environments")
    parser.add_argument("--check", action="store_true", help="only compare the pages with the stored measurements")
    parser.add_argument("--write", action="store_true", help="only write the pages from the stored measurements")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default=",".join(load.name for load in WORKLOADS), help="workloads")
    parser.add_argument("--peers", default=",".join(peer.module for peer in PEERS), help="some of the peers")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a turn")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one command of a peer")
    parser.add_argument("--patience", type=float, default=5.0, help="seconds to wait for an idle machine, per turn")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the clients, to try things out")
    parser.add_argument("--output", type=Path, help="where to write the results, instead of the committed file")
    return parser.parse_args()


def chosen_peers(names: str) -> tuple[Peer, ...]:
    """The peers by their modules; fedalloy is always among them."""
    wanted = {"fedalloy", *names.split(",")}
    if unknown := wanted - {peer.module for peer in PEERS}:
        raise SystemExit(f"unknown peers: {', '.join(sorted(unknown))}; known: {', '.join(p.module for p in PEERS)}")
    return tuple(peer for peer in PEERS if peer.module in wanted)


def chosen_loads(names: str) -> tuple[Workload, ...]:
    """The workloads by their names."""
    wanted, known = set(names.split(",")), [load.name for load in WORKLOADS]
    if unknown := wanted - set(known):
        raise SystemExit(f"unknown workloads: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    return tuple(load for load in WORKLOADS if load.name in wanted)


def check_output(options: argparse.Namespace, peers: tuple[Peer, ...], loads: tuple[Workload, ...]) -> None:
    """Refuse to replace the committed measurements, which README and docs quote, by those of less work."""
    whole = peers == PEERS and loads == WORKLOADS and options.scale == 1
    if not whole and options.output is None:
        raise SystemExit(
            "--only, --peers and --scale measure a part: give --output FILE, because without it the results replace "
            f"those of all workloads in {page.RESULTS.relative_to(ROOT)} and in the pages"
        )


def prepare(peers: tuple[Peer, ...]) -> None:
    """Make the environments that are missing."""
    for peer in peers:
        if peer.is_ready:
            continue
        print(f"{peer.name}: making its environment in {peer.folder} ...", flush=True)
        try:
            peer.prepare()
        except subprocess.CalledProcessError as error:
            raise SystemExit(
                f"{peer.name}: its environment could not be made, because '{' '.join(map(str, error.cmd))}' failed; "
                "name the others with --peers to measure without it"
            ) from None


def scaled(load: Workload, scale: float) -> Workload:
    return replace(load, clients=max(load.cohort, round(load.clients * scale)))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the chosen workloads; what is known is written after each of them."""
    peers, loads = chosen_peers(options.peers), chosen_loads(options.only)
    check_output(options, peers, loads)
    prepare(peers)
    told: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(), "machine": describe(), "torch": torch.__version__,
        "repeats": options.repeats, "workloads": {},
    }  # fmt: skip
    place = Path(tempfile.mkdtemp(prefix="peers-"))
    try:
        for load in loads:
            found = measure(
                scaled(load, options.scale), peers, place / load.name, options.repeats, options.seconds,
                options.limit, options.patience,
            )  # fmt: skip
            told["workloads"][load.name] = found
            print(_lines(load.name, found), flush=True)
            (options.output or page.RESULTS).write_text(json.dumps(told, indent=1) + "\n")
            shutil.rmtree(place / load.name)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return told


def _lines(name: str, found: dict[str, Any]) -> str:
    rows = [f"{name}  {found['what']}"]
    for who, one in found["runs"].items():
        if "error" in one:
            rows.append(f"  {who:18} {one['error']}")
            continue
        ratio = found["ratios"].get(who, {"ratio": 1.0, "low": 1.0, "high": 1.0})
        spread = f"{one['ms']:9.2f} ms ({one['ms_low']:.2f}-{one['ms_high']:.2f})"
        marks = f"disturbed: {sum(one['disturbed'])} of {len(one['disturbed'])}" if any(one["disturbed"]) else ""
        rows.append(f"  {who:18} {spread:34} {ratio['ratio']:6.2f} x ({ratio['low']:.2f}-{ratio['high']:.2f}) {marks}")
    return "\n".join(rows)


def main() -> int:
    options = arguments()
    if options.prepare:
        prepare(PEERS)
        return 0
    if options.check:
        wrong = page.outdated()
        for path in wrong:
            print(f"{path.name} does not match {page.RESULTS.name}: run 'python -m benchmarks.peers --write'")
        return 1 if wrong else 0
    if not options.write:
        run(options)
    if options.output is None:
        page.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())

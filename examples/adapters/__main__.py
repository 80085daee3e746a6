"""Runs every method in a simulation and on two Flower nodes on this machine, and compares the trained adapters."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from examples.adapters import model
from fedalloy.experiment.recipe import parse, resolve
from fedalloy.experiment.records.checkpoint import load as load_state
from fedalloy.flower.local import LocalFederation
from fedalloy.flower.project_templates import FederationPlan, write_federation
from fedalloy.flower.submission import Study

METHODS = ("fedavg", "fedprox", "scaffold", "ditto", "fedlayerwise", "aaggff_d", "superfed_mm")
AGREE = 1e-5


def main() -> int:
    """Print one line per method; the exit code is 1 if a federation and its simulation differ."""
    parser = argparse.ArgumentParser(prog="python -m examples.adapters", description=__doc__)
    parser.add_argument("methods", nargs="*", default=list(METHODS), help="methods (default: all seven)")
    parser.add_argument("--simulate", action="store_true", help="only the simulations, without Flower")
    parser.add_argument("--folder", type=Path, help="where the federation and its logs are kept (default: nowhere)")
    wanted = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
    with tempfile.TemporaryDirectory() as scratch:
        folder = wanted.folder or Path(scratch)
        simulations = {method: _simulated(method, folder) for method in wanted.methods}
        return 0 if wanted.simulate else _compare(simulations, folder / "federation")


def _simulated(method: str, folder: Path) -> dict[str, Any]:
    """The shared parts after a simulation by the loop engine, with which the batched engine must agree."""
    parts: dict[str, Any] = {}
    for engine in ("loop", "batched"):
        ending, _ = resolve(parse(model.simulated(method, folder / "all", engine))).run()
        far = _apart(ending.state["shared"], parts) if parts else 0.0
        parts = parts or ending.state["shared"]
    print(f"{method:14} simulated, {len(parts['params'])} leaves sent; batched differs by {far:.0e}", flush=True)
    return parts


def _compare(simulations: dict[str, dict[str, Any]], place: Path) -> int:
    wrong = 0
    with _federation(place) as federation:
        for method, expected in simulations.items():
            began, folder = perf_counter(), (place / "runs" / method).absolute()
            ended = Study(federation.cli, parse(model.on_nodes(method)), folder).run_to_end(lambda _: None)
            newest = max((folder / "checkpoints").glob("*.safetensors"), default=None)
            found = {} if newest is None else load_state(newest)["server"]["shared"]
            far = _apart(found, expected) if found else float("inf")
            wrong += not far <= AGREE
            print(f"{method:14} two nodes: {ended}, differs by {far:.0e}, {perf_counter() - began:.0f} s", flush=True)
    return 1 if wrong else 0


def _federation(place: Path) -> LocalFederation:
    """Two nodes with their data, whose policies allow the example's model."""
    root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    write_federation(place, FederationPlan(nodes=tuple(f"node-{client}" for client in range(len(model.SIZES)))))
    for client in range(len(model.SIZES)):
        node = place / "nodes" / f"node-{client}"
        model.write_share(node / "data", client)
        kept = [
            line
            for line in (node / "node.toml").read_text().splitlines()
            if not line.startswith(("data =", "client ="))
        ]
        (node / "node.toml").write_text("\n".join([*kept, 'data = "data"', f'client = "{client}"']) + "\n")
        (node / "policy.toml").write_text(f"models = {json.dumps([model.MODEL])}\n")
    return LocalFederation.of(place)


def _apart(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference between two sets of shared parts."""
    pairs = [(found[part][name], leaf) for part, leaves in expected.items() for name, leaf in leaves.items()]
    return max(float((one - other).abs().max()) for one, other in pairs if isinstance(other, torch.Tensor))


if __name__ == "__main__":
    sys.exit(main())

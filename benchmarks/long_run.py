"""Runs of any size without training: ``python -m benchmarks.long_run FOLDER [ROUNDS] [CLIENTS]``.

Rows have the columns and the digits of a real run with full participation that is evaluated every round.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

from fedalloy.experiment.records.folder import RunFolder

VARIANTS = 23


def write_long_run(path: Path, rounds: int = 10_000, clients: int = 1000, seed: int = 0) -> Path:
    """A finished run; long lists repeat after some rounds, the numbers of curves do not."""
    recipe = {"name": "long", "run": {"rounds": rounds, "seeds": [seed], "target_metric": "accuracy"}}
    folder = RunFolder.create(path, recipe, {"python": "3"}, {"clients": clients, "sizes": [60] * clients})
    dice = random.Random(seed)
    lists = [_lists(dice, clients) for _ in range(VARIANTS)]
    with folder.lock():
        for round in range(1, rounds + 1):
            drawn = lists[round % VARIANTS]
            folder.append("rounds", _row(round, rounds, clients, drawn, dice))
            scores = {"ids": list(range(clients)), "accuracy": drawn["accuracy"], "loss": drawn["loss"]}
            folder.append("clients", {"round": round, "split": "test", "model": "global", **scores})
            folder.append("timings", {"round": round, "clients": 0.5 + dice.random(), "server": 0.1 * dice.random()})
        folder.set_status("finished", rounds)
    return path


def write_many_runs(root: Path, runs: int = 1000, rounds: int = 20) -> Path:
    """A folder of small runs."""
    for number in range(runs):
        write_long_run(root / f"experiment-{number // 10}" / f"seed-{number % 10}", rounds, 10, number % 10)
    return root


def _lists(dice: random.Random, clients: int) -> dict[str, list[float]]:
    weights = [dice.random() for _ in range(clients)]
    return {
        "weights": [one / sum(weights) for one in weights],
        "accuracy": [dice.random() for _ in range(clients)],
        "loss": [2 * dice.random() for _ in range(clients)],
    }


def _row(round: int, rounds: int, clients: int, drawn: dict[str, list[float]], dice: random.Random) -> dict[str, Any]:
    level = 1 - math.exp(-5 * round / rounds) + 0.02 * dice.random()
    tails = {"worst": level - 0.2, "best": level + 0.1, "worst_served": level - 0.2, "best_served": level + 0.1}
    summary = {"mean": level, "std": 0.1, **tails, "gini": 0.1, "variance": 3.0}
    return {
        "round": round, "ids": list(range(clients)), "weights": drawn["weights"], "num_steps": [12] * clients,
        "train_loss": 2 * math.exp(-round / rounds), "bytes_up": 10**6, "bytes_down": 10**6,
        "dropped": {"3": "not finite"} if round % 50 == 0 else {}, "info": {}, "simulated_seconds": 1.5, "absent": [],
        "late": [], "resent": [], "evaluation": {"accuracy": summary, "loss": summary}, "global": {"accuracy": level},
    }  # fmt: skip


def main() -> None:
    """Write one run."""
    rounds, clients = (*map(int, sys.argv[2:4]), *(10_000, 1000)[len(sys.argv) - 2 :])
    print(write_long_run(Path(sys.argv[1]), rounds, clients))


if __name__ == "__main__":
    main()

"""Scores finished runs that make samples with another classifier of the server; the runs themselves are not changed.

    PYTHONPATH=. python -m benchmarks.rescored runs/digits-k5 --epochs 1

Prints a row per run: the mean accuracy over the clients' own test parts in percent, with the classifier that the run
has (``own``, which must be what its record says), and with one trained for ``--epochs`` passes over the samples.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import torch

from fedalloy.experiment.evaluate import evaluate
from fedalloy.experiment.recipe import reopen
from fedalloy.experiment.trained import Trained


def mean_accuracy(trained: Trained) -> float:
    """The server's classifier on the clients' test parts, in percent."""
    found = evaluate(trained, ("accuracy",), torch.arange(trained.fed.task.population))
    return 100 * found.summary["accuracy"]["mean"]


def with_epochs(trained: Trained, epochs: int) -> Trained:
    """The same run, whose server's classifier is trained for so many passes."""
    config = trained.fed.config
    changed = replace(config, classifier=replace(config.classifier, epochs=epochs))
    return replace(trained, fed=replace(trained.fed, config=changed))


def main() -> None:
    """Every finished run below a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()
    for run in sorted(path for path in options.folder.glob("*/seed-*") if re.fullmatch(r"seed-\d+", path.name)):
        try:
            trained = reopen(run)
        except Exception as error:  # a run that was interrupted has nothing to score
            print(json.dumps({"run": f"{run.parent.name}/{run.name}", "failed": str(error)[:120]}), flush=True)
            continue
        own, other = mean_accuracy(trained), mean_accuracy(with_epochs(trained, options.epochs))
        row = {"run": f"{run.parent.name}/{run.name}", "round": trained.round, "own": round(own, 2)}
        print(json.dumps({**row, f"{options.epochs} epochs": round(other, 2)}), flush=True)


if __name__ == "__main__":
    main()

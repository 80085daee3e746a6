"""Are synthetic samples as good in another precision? Class-wise statistics and a classifier's accuracy over seeds.

    PYTHONPATH=src python -m benchmarks.generative_quality train fedevg tf32 --data FOLDER --out FOLDER --keep FOLDER
    PYTHONPATH=src python -m benchmarks.generative_quality compare --out FOLDER --keep FOLDER

``train`` runs every seed of one method in one variant (``tf32``, ``bf16``, ``before``: tf32 as ``kernel = "mapped"``
has it) and adds a row for each to ``OUT/generative.jsonl``; the samples go to ``KEEP``. ``compare`` says for every
method how far the variants are apart, and how much that is of what two seeds are apart: it writes
``OUT/generative.json``, and all samples to ``OUT/samples.npz``. The classifier is trained in tf32, whatever made the
samples, and scored on all real test images. ``FEDALLOY_TINY=1`` takes small models of 8 x 8 pixels
that are drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_federations import images
from fedalloy.algorithms import named
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Objective
from fedalloy.engines.batched import Batched
from fedalloy.experiment.fit import fit
from fedalloy.methods.classifier import ClassifierTraining, classifier_of, train_classifier
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.federation import FederatedTask
from fedalloy.tasks.objective import ModuleObjective

TINY = bool(os.environ.get("FEDALLOY_TINY"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODELS: dict[str, Any] = {
    "fedevg": "resnet10", "fedcgan": {"kind": "acgan", "norm": "group"}, "fedcvae": {"kind": "cvae", "norm": "group"},
}  # fmt: skip
SMALL: dict[str, Any] = {
    "fedevg": "energy_cnn", "fedcgan": {"kind": "acgan", "norm": "group", "width": 4},
    "fedcvae": {"kind": "cvae", "norm": "group", "width": 4},
}  # fmt: skip
ROUNDS = {"fedevg": 20, "fedcgan": 15, "fedcvae": 20}
"""Rounds of a whole epoch; FedEvg takes 20 local steps, with which a round is a second."""
PER_CLASS = 20
"""Samples of every class that statistics are taken of; FedEvg has ten."""
LIMIT = 2.776
"""Student's t with four degrees of freedom, 95 %: two times three seeds."""
LIMIT_OF_TEN = 5.598
"""The same where ten classes are looked at at once (Bonferroni)."""
Rows = list[dict[str, Any]]


def engine_for(variant: str) -> Batched:
    """The engine of a variant."""
    if variant == "before":
        return Batched(precision="tf32", kernel="mapped")
    return Batched(precision=variant)  # type: ignore[arg-type]


def task_for(method: str, seed: int) -> FederatedTask:
    """MNIST at 32 pixels over ten clients with Dirichlet(1) labels, split by the seed."""
    data: Any = images(300, (1, 8, 8)) if TINY else {"kind": "mnist", "flat": False, "side": 32}
    classifier = "energy_cnn" if TINY else "resnet10"
    clients, split = 3 if TINY else 10, {"kind": "dirichlet", "alpha": 1.0}
    return make_task(data, (SMALL if TINY else MODELS)[method], split, clients, seed=seed, classifier=classifier)


def class_statistics(x: Tensor, y: Tensor, real: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """Of every class: mean and spread of the values, how far two samples are apart, and how far the mean sample is from
    the mean real example.

    >>> found = class_statistics(torch.ones(2, 3), torch.zeros(2), torch.zeros(1, 3), torch.zeros(1))
    >>> found["mean"], found["apart"]
    ([1.0], [0.0])
    """
    found: dict[str, list[float]] = {"mean": [], "spread": [], "apart": [], "from real": []}
    for label in sorted(set(labels.tolist())):
        mine, theirs = x[y == label].flatten(1).double(), real[labels == label].flatten(1).double()
        found["mean"].append(float(mine.mean()))
        found["spread"].append(float(mine.std()))
        found["apart"].append(float(torch.pdist(mine).mean()) if len(mine) > 1 else 0.0)
        found["from real"].append(float((mine.mean(0) - theirs.mean(0)).norm()))
    return found


def accuracy(objective: Objective, x: Tensor, y: Tensor, test: tuple[Tensor, Tensor], engine: Batched) -> float:
    """That of a classifier trained on samples, on real examples, in percent."""
    settings = ClassifierTraining(epochs=2 if TINY else 200)
    params, buffers = train_classifier(objective, x, y, Key.of(11), engine, settings)
    right = 0
    with torch.no_grad():
        for some, labels in zip(test[0].split(1000), test[1].split(1000), strict=True):
            logits = objective.outputs(params, buffers, some.to(DEVICE))
            right += int((logits.argmax(1).cpu() == labels).sum())
    return 100 * right / len(test[1])


def train(method: str, variant: str, seeds: Iterable[int], out: Path, keep: Path, rounds: int | None) -> None:
    """All seeds of one method in one variant."""
    steps = {"iterations": 20} if method == "fedevg" else {}
    scorer, engine = Batched(precision="tf32"), engine_for(variant)
    judge: Objective | None = None
    count = 1 if TINY else rounds or ROUNDS[method]
    for seed in seeds:
        begin, task = time.perf_counter(), task_for(method, seed)
        algorithm = named(method, batch_size=16 if TINY else 64, **steps)
        quick = ClassifierTraining(epochs=1)
        result = fit(algorithm, task, rounds=count, seed=seed, device=DEVICE, engine=engine, evaluate_every=count,
                     classifier=quick)  # fmt: skip
        x, y = (value.to(DEVICE) for value in result.synthetic(PER_CLASS))
        trained = time.perf_counter() - begin
        found = classifier_of(task)
        assert isinstance(found, ModuleObjective)
        judge = judge or found.to(DEVICE)
        assert task.global_test is not None
        test = task.global_test.x, task.global_test.y
        few = x.shape[0] // (10 * 10) or 1  # as many samples teach in all methods
        row = {
            "method": method, "variant": variant, "seed": seed, "rounds": count, "seconds": round(trained, 1),
            "accuracy": accuracy(judge, x[::few], y[::few], test, scorer),
            "fallback": engine._unbatchable or engine._uncaptured,
            "classes": class_statistics(x.cpu(), y.cpu(), *test),
        }  # fmt: skip
        with (out / "generative.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print({name: value for name, value in row.items() if name != "classes"}, flush=True)
        np.savez_compressed(
            keep / f"{method}-{variant}-{seed}.npz", x=x.cpu().numpy().astype(np.float16), y=y.cpu().numpy()
        )


def t_value(one: list[float], other: list[float]) -> float:
    """The difference of two means in units of its standard error, from the seeds' common spread.

    >>> round(t_value([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]), 3)
    1.225
    """
    error = ((statistics.variance(one) / len(one)) + (statistics.variance(other) / len(other))) ** 0.5
    gap = statistics.mean(other) - statistics.mean(one)
    return gap / error if error else (0.0 if not gap else float("inf"))


def compared(rows: Rows, base: str = "tf32") -> Rows:
    """For every method and every variant but the first: differences to it, in units of the seeds' noise."""
    found = []
    for method, variant in sorted({(row["method"], row["variant"]) for row in rows if row["variant"] != base}):
        pairs = [[row for row in rows if row["method"] == method and row["variant"] == one] for one in (base, variant)]
        if min(map(len, pairs)) < 2:
            found.append({"method": method, "variant": variant, "seeds": list(map(len, pairs)), "within_noise": None})
            continue
        found.append({"method": method, "variant": variant, "against": base, **_judged(*pairs)})
    return found


def _judged(one: Rows, other: Rows) -> dict[str, Any]:
    scores = [[row["accuracy"] for row in rows] for rows in (one, other)]
    by_score, worst = t_value(*scores), {}
    for name in one[0]["classes"]:
        values = [list(zip(*(row["classes"][name] for row in rows), strict=True)) for rows in (one, other)]
        each = [t_value(list(a), list(b)) for a, b in zip(*values, strict=True)]
        worst[name] = {"largest_t": max(map(abs, each)), "beyond_alone": sum(abs(t) > LIMIT for t in each)}
    within = abs(by_score) < LIMIT and all(one["largest_t"] < LIMIT_OF_TEN for one in worst.values())
    return {
        "seeds": [len(one), len(other)], "accuracy": [statistics.mean(one) for one in scores],
        "accuracy_sd": [statistics.stdev(one) for one in scores], "accuracy_t": by_score, "classes": worst,
        "within_noise": within,
    }  # fmt: skip


def compare(out: Path, keep: Path) -> Rows:
    """What all finished seeds say."""
    rows = [json.loads(line) for line in (out / "generative.jsonl").read_text().splitlines()]
    found = compared(rows)
    (out / "generative.json").write_text(json.dumps({"runs": rows, "compared": found}, indent=1) + "\n")
    arrays: dict[str, Any] = {}
    for path in sorted(keep.glob("*.npz")):
        with np.load(path) as file:
            arrays |= {f"{path.stem}-{name}": file[name] for name in file.files}
    np.savez_compressed(out / "samples.npz", **arrays)
    for row in found:
        print(json.dumps(row), flush=True)
    return found


def main(given: list[str] | None = None) -> None:
    """Train, or compare what was trained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "compare"))
    parser.add_argument("method", nargs="?", choices=sorted(MODELS))
    parser.add_argument("variant", nargs="?", choices=("tf32", "bf16", "before"), default="tf32")
    parser.add_argument("--data", type=Path, help="folder of the .npz files; default: FEDALLOY_DATA")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args(given)
    if options.data is not None:
        os.environ["FEDALLOY_DATA"] = str(options.data)
    for folder in (options.out, options.keep):
        folder.mkdir(parents=True, exist_ok=True)
    steps: dict[str, Callable[[], Any]] = {
        "train": lambda: train(
            options.method, options.variant, range(options.seeds), options.out, options.keep, options.rounds
        ),
        "compare": lambda: compare(options.out, options.keep),
    }
    if options.what == "train" and options.method is None:
        parser.error("train needs a method")
    steps[options.what]()


if __name__ == "__main__":
    main()

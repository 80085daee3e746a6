"""Files of other sizes for ``ewwa``, ``fedopt`` and ``fedcams``, made by formulas of their own in numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedalloy.testing.vectors.replay import Report, replay

Rng = np.random.Generator


def replayed(folder: Path, group: str, params: dict[str, Any], rounds: list[Any]) -> Report:
    pairs = [{"inputs": inputs, "expected": expected} for inputs, expected in rounds]
    case = {"params": params, "init": {}, "rounds": pairs}
    (folder / "file.json").write_text(json.dumps({"group": group, "dtype": "float64", "cases": [case]}))
    return replay(folder / "file.json")


def problems(report: Report) -> list[str]:
    return [f"{f.name}: {f.status} by {f.error} in {f.worst}" for f in report.fields if f.status != "pass"]


def cohorts(rng: Rng, population: int, rounds: int) -> list[list[int]]:
    sizes = rng.integers(1, population + 1, rounds)
    return [sorted(rng.choice(population, size, replace=False).tolist()) for size in sizes]


def second(kind: str, v: Any, g: Any, beta2: float) -> Any:
    if kind == "adam":
        return beta2 * v + (1 - beta2) * g**2
    return v + g**2 if kind == "adagrad" else v - (1 - beta2) * g**2 * np.sign(v - g**2)


@pytest.mark.parametrize("kind", ["adam", "adagrad", "yogi"])
@pytest.mark.parametrize("correct", [False, True])
def test_fedopt_of_any_size(kind, correct, tmp_path):
    rng = np.random.default_rng(11)
    n, lr, b1, b2, tau = rng.integers(1, 50, 7), 0.3, 0.6, 0.8, 0.05
    w, m, v, rounds = rng.normal(size=9), np.zeros(9), np.full(9, tau**2), []
    for t, ids in enumerate(cohorts(rng, 7, 4), 1):
        W = w + rng.normal(size=(len(ids), 9))
        delta = (n[ids] / n[ids].sum()) @ (W - w)
        m, v = b1 * m + (1 - b1) * delta, second(kind, v, delta, b2)
        scale = np.sqrt(1 - b2**t) / (1 - b1**t) if correct else 1.0
        new = w + lr * scale * m / (np.sqrt(v) + tau)
        expected = {"delta": delta.tolist(), "m": m.tolist(), "v": v.tolist(), "w": new.tolist()}
        rounds.append(({"ids": ids, "w": w.tolist(), "W": W.tolist()}, expected))
        w = new
    params = {"kind": kind, "lr": lr, "beta1": b1, "beta2": b2, "tau": tau, "bias_correction": correct, "n": n.tolist()}
    assert problems(replayed(tmp_path, "fedopt", params, rounds)) == []


@pytest.mark.parametrize("kind", ["adam", "adagrad", "yogi"])
def test_ewwa_of_any_size_and_with_clients_that_come_and_go(kind, tmp_path):
    rng = np.random.default_rng(12)
    lr, b1, b2, eps, size = 0.7, 0.6, 0.8, 0.01, 5
    w, rounds = rng.normal(size=size), []
    m, v, count = np.zeros((6, size)), np.zeros((6, size)), np.zeros(6, dtype=int)
    for ids in cohorts(rng, 6, 5):
        W = w + rng.normal(size=(len(ids), size))
        g, count[ids] = w - W, count[ids] + 1
        m[ids], v[ids] = b1 * m[ids] + (1 - b1) * g, second(kind, v[ids], g, b2)
        r = count[ids][:, None]
        s = np.exp(lr * np.sqrt(1 - b2**r) / (1 - b1**r) * m[ids] / (np.sqrt(v[ids]) + eps))
        share = s / s.sum(0)
        new = w - (share * g).sum(0)
        inputs = {"ids": ids, "w": w.tolist(), "W": W.tolist()}
        rounds.append((inputs, {"proportions": share.tolist(), "w": new.tolist()}))
        w = new
    params = {"optimiser": kind, "mode": "paper", "lr": lr, "beta1": b1, "beta2": b2, "eps": eps}
    assert problems(replayed(tmp_path, "ewwa", params, rounds)) == []


@pytest.mark.parametrize("compressor", ["none", "topk", "sign"])
@pytest.mark.parametrize("option", ["max", "plus"])
@pytest.mark.parametrize("correct", [False, True])
def test_fedcams_of_any_size(compressor, option, correct, tmp_path):
    rng = np.random.default_rng(13)
    lr, b1, b2, eps, size, ratio = 0.3, 0.6, 0.8, 0.05, 13, 0.4
    w, m, v, vhat = rng.normal(size=size), np.zeros(size), np.zeros(size), np.full(size, 0.1)
    errors: dict[int, Any] = {}
    rounds = []
    for t, ids in enumerate(cohorts(rng, 5, 4), 1):
        W = w + rng.normal(size=(len(ids), size))
        x = np.stack([W[row] - w + errors.get(k, 0.0) for row, k in enumerate(ids)])
        sent = x.copy()
        if compressor == "topk":
            small = np.argsort(-np.abs(x), axis=1)[:, max(int(ratio * size), 1) :]
            np.put_along_axis(sent, small, 0.0, axis=1)
        elif compressor == "sign":
            sent = np.sign(x) * np.abs(x).mean(1, keepdims=True)
        errors |= {k: x[row] - sent[row] for row, k in enumerate(ids)}
        m, v = b1 * m + (1 - b1) * sent.mean(0), b2 * v + (1 - b2) * sent.mean(0) ** 2
        vhat = np.maximum(np.maximum(vhat, v), eps) if option == "max" else np.maximum(vhat, v)
        top, bottom = (m / (1 - b1**t), vhat / (1 - b2**t)) if correct else (m, vhat)
        new = w + lr * top / (np.sqrt(bottom) if option == "max" else np.sqrt(bottom) + eps)
        expected = {"sent": sent.tolist(), "errors": {str(k): e.tolist() for k, e in errors.items()}}
        expected |= {"vhat": vhat.tolist(), "w": new.tolist()}
        rounds.append(({"ids": ids, "w": w.tolist(), "W": W.tolist()}, expected))
        w = new
    params = {"option": option, "lr": lr, "beta1": b1, "beta2": b2, "eps": eps, "vhat0": 0.1}
    params |= {"bias_correction": correct, "compressor": compressor, "ratio": ratio}
    assert problems(replayed(tmp_path, "fedcams", params, rounds)) == []

"""Weightings replayed from files of any size, made by formulas of their own in numpy."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedalloy.testing.vectors.replay import replay

Shape = dict[str, Any]


@st.composite
def federations(draw: st.DrawFn) -> Shape:
    """Any subset of clients in any order in each round."""
    clients = draw(st.integers(2, 7))
    some = st.permutations(range(clients)).flatmap(lambda ids: st.integers(2, clients).map(lambda m: list(ids[:m])))
    return {
        "n": draw(st.lists(st.integers(1, 60), min_size=clients, max_size=clients)),
        "rounds": draw(st.lists(some, min_size=1, max_size=4)),
        "layers": draw(st.lists(st.integers(2, 4), min_size=1, max_size=3)),
        "seed": draw(st.integers(0, 2**20)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found: Path = tmp_path_factory.mktemp("vectors")
    return found


def problems(folder: Path, group: str, params: Shape, rounds: list[Any]) -> list[str]:
    pairs = [{"inputs": inputs, "expected": expected} for inputs, expected in rounds]
    case = {"params": params, "init": {}, "rounds": pairs}
    path = folder / f"{group}.json"
    path.write_text(json.dumps({"group": group, "dtype": "float64", "cases": [case]}))
    return [f"{f.name}: {f.status} by {f.error}" for f in replay(path).fields if f.status != "pass"]


def share(values: np.ndarray) -> np.ndarray:
    return values / values.sum()


def start(shape: Shape) -> tuple[np.random.Generator, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(shape["seed"])
    return rng, rng.normal(size=sum(shape["layers"])), np.array(shape["n"])


def contributions(rng: np.random.Generator, ids: list[int], w: np.ndarray) -> tuple[np.ndarray, Shape]:
    W = w + 0.3 * rng.normal(size=(len(ids), len(w)))
    return W, {"ids": ids, "w": w.tolist(), "W": W.tolist()}


def angle_rounds(shape: Shape, layers: list[int], alpha: float) -> list[Any]:
    rng, w, n = start(shape)
    edges = np.cumsum([0, *layers])
    past, count, rounds = np.zeros((len(layers), len(n))), np.zeros(len(n)), []
    for ids in shape["rounds"]:
        W, inputs = contributions(rng, ids, w)
        g, p = w - W, share(n[ids])
        count[ids] += 1
        theta, psi, new = [], [], []
        for layer, (lo, hi) in enumerate(pairwise(edges)):
            mean = p @ g[:, lo:hi]
            cosine = g[:, lo:hi] @ mean / np.linalg.norm(g[:, lo:hi], axis=1) / np.linalg.norm(mean)
            theta.append(np.arccos(np.clip(cosine, -1, 1)))
            past[layer, ids] += (theta[-1] - past[layer, ids]) / count[ids]
            psi.append(share(n[ids] * np.exp(alpha * (1 - np.exp(-np.exp(-alpha * (past[layer, ids] - 1)))))))
            new.append(psi[-1] @ W[:, lo:hi])
        w = np.concatenate(new)
        rounds.append((inputs, (np.array(psi), np.array(theta), past[:, ids], w)))
    return rounds


@given(federations(), st.sampled_from([5.0, 7.0]))
@settings(max_examples=20)
def test_fedadp_of_any_size(folder, shape, alpha):
    whole = [sum(shape["layers"])]
    rounds = [
        (inputs, {"weights": psi[0].tolist(), "instant_angle": now[0].tolist(), "smoothed_angle": smooth[0].tolist()})
        for inputs, (psi, now, smooth, _) in angle_rounds(shape, whole, alpha)
    ]
    assert problems(folder, "fedadp", {"n": shape["n"], "alpha": alpha, "lr": 0.1}, rounds) == []


@given(federations())
@settings(max_examples=20)
def test_fedlayerwise_of_any_size(folder, shape):
    rounds = [
        (inputs, {"weights": psi.tolist(), "smoothed_angle": smooth.tolist(), "w": w.tolist()})
        for inputs, (psi, _, smooth, w) in angle_rounds(shape, shape["layers"], 3.0)
    ]
    params = {"n": shape["n"], "alpha": 3.0, "lr": 0.005, "layers": shape["layers"]}
    assert problems(folder, "fedlayerwise", params, rounds) == []


@given(federations(), st.sampled_from([(0.5, 1, 1.0), (0.2, 2, 0.7), (1.0, 3, 1.3)]))
@settings(max_examples=20)
def test_fedfa_of_any_size(folder, shape, kind):
    (alpha, b, server_lr), c, gamma = kind, 1e-4, 0.6
    rng, w, n = start(shape)
    momentum, count, rounds = np.zeros_like(w), np.zeros(len(n)), []
    for number, ids in enumerate(shape["rounds"], 1):
        W, inputs = contributions(rng, ids, w)
        accuracy = rng.uniform(size=len(ids)) * (rng.uniform(size=len(ids)) > 0.2)
        count[ids] += 1
        a = share(accuracy) if accuracy.sum() else np.full(len(ids), 1 / len(ids))
        rare, there = -np.log2(np.where(a > 0, a, c)), -np.log2(1 - share(count[ids]))
        weights = alpha * share(rare) + (1 - alpha) * share(there)
        average = weights @ W
        momentum = gamma * momentum + server_lr * (w - average)
        w = w - momentum if number % b == 0 else average
        expected = {"weights": weights, "average": average, "momentum": momentum, "w": w}
        inputs["acc"] = accuracy.tolist()
        rounds.append((inputs, {name: value.tolist() for name, value in expected.items()}))
    params = {"alpha": alpha, "beta": 1 - alpha, "c": c, "b": b, "gamma_server": gamma, "server_lr": server_lr}
    assert problems(folder, "fedfa", params, rounds) == []


@given(federations(), st.sampled_from([(0.0, 0.0), (1.0, 0.5), (3.0, 5.0)]))
@settings(max_examples=20)
def test_sizes_and_losses_of_any_size(folder, shape, kind):
    (q, tilt), M, gap = kind, 1.5, 0.3
    rng, w, sizes = start(shape)
    rounds = []
    for ids in shape["rounds"]:
        _, inputs = contributions(rng, ids, w)
        F, T, V, n = (
            rng.uniform(0, 2, len(ids)),
            rng.uniform(size=len(ids)),
            rng.uniform(size=(len(ids),) * 2),
            sizes[ids],
        )
        abroad = V.sum(1) - np.diag(V)
        weights = {
            "dr": n * F ** (q + 1),
            "qffl": n * F**q,
            "term": n * np.exp(tilt * F),
            "propfair": n / np.maximum(M - F, gap),
            "fedboosting": np.exp(share(np.exp(T)) * abroad),
        }
        inputs |= {"losses": F.tolist(), "train_scores": T.tolist(), "cross_val": V.tolist()}
        rounds.append((inputs, {"weights": {name: share(value).tolist() for name, value in weights.items()}}))
    params = {"n": shape["n"], "q": q, "tilt": tilt, "M": M, "propfair_eps": gap}
    assert problems(folder, "size_and_loss", params, rounds) == []


@given(federations(), st.sampled_from([0.0, 0.3, 1.0, 4.0]))
@settings(max_examples=20)
def test_qfedavg_of_any_size(folder, shape, q):
    everyone = {**shape, "rounds": [sorted(range(len(shape["n"])))]}
    rng, w, n = start(shape)
    W, inputs = contributions(rng, everyone["rounds"][0], w)
    F, D = rng.uniform(0.1, 2, len(n)), (w - W) / 0.05
    h = q * F ** (q - 1) * (D**2).sum(1) + F**q / 0.05
    inputs["losses"] = F.tolist()
    expected = {
        "qfedavg_h": h.tolist(),
        "qfedavg_w": (w - F**q @ D / h.sum()).tolist(),
        "qfedavg_weighted_w": (w - (n * F**q) @ D / (n * h).sum()).tolist(),
    }
    params = {"n": shape["n"], "q": q, "lr": 0.05, "eps": 0.5, "afl_step": 0.1, "server_lr": 1.0}
    assert problems(folder, "fair", params, [(inputs, expected)]) == []

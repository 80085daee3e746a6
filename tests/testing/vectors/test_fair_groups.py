"""Files of the fair groups with other sizes, ids in any order and settings of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedalloy.core import registry
from fedalloy.core.errors import SpecError
from fedalloy.testing.vectors.files import read
from fedalloy.testing.vectors.replay import Report, replay

VECTORS = Path(__file__).resolve().parents[2] / "vectors"


def replayed(folder: Path, group: str, params: Any, init: Any, rounds: list[Any]) -> Report:
    pairs = [{"inputs": inputs, "expected": expected} for inputs, expected in rounds]
    case = {"params": params, "init": init, "rounds": pairs}
    path = folder / "file.json"
    path.write_text(json.dumps({"group": group, "dtype": "float64", "cases": [case]}))
    return replay(path)


def problems(report: Report) -> list[str]:
    return [f"{f.name}: {f.status} by {f.error}" for f in report.fields if f.status != "pass"]


@pytest.mark.parametrize(("K", "m", "C1", "C2"), [(30, 4, 0.0, 4 / 30), (7, 7, 0.05, 0.8)])
def test_many_clients_in_any_order(tmp_path, K, m, C1, C2):
    rng, C = np.random.default_rng(3), m / K
    p, G, rounds = np.full(K, 1 / K), np.zeros(K), []
    for t in (1, 2, 3):
        ids, losses = rng.permutation(K)[:m], rng.lognormal(size=m)
        x = losses / losses.mean()
        r = C1 + (C2 - C1) * np.exp(-np.exp(1 - x))
        dr = np.full(K, r.mean())
        dr[ids] += (r - r.mean()) / C
        g = -dr / (1 + r.mean()) + r.mean() * (p @ (dr - r.mean())) / (1 + r.mean()) ** 2
        G = G + g
        L = C2 / (1 + C1) + 2 * (C2 - C1) / (C * (1 + C1))
        p = np.exp(-np.sqrt(np.log(K)) * G / L / np.sqrt(t + 1))
        p = p / p.sum()
        expected = {"r": r, "dr": dr, "g": g, "p": p, "participant_weights": p[ids] / p[ids].sum()}
        inputs = {"ids": ids.tolist(), "losses": losses.tolist()}
        rounds.append((inputs, {name: value.tolist() for name, value in expected.items()}))
    params = {"cdf": "gumbel", "K": K, "C": C, "C1": C1, "C2": C2}
    assert problems(replayed(tmp_path, "aaggff_d", params, {"p": [1 / K] * K}, rounds)) == []


def test_rounds_that_are_not_stored_are_played(tmp_path):
    stored = read(VECTORS / "aaggff_s.json").records[-1]
    assert "stored" in stored.case.params
    inputs, expected = dict(stored.case.rounds[-1]), {"p": stored.expected[-1]["p"].tolist()}
    params, init = dict(stored.case.params), dict(stored.case.init)
    assert problems(replayed(tmp_path, "aaggff_s", params, init, [(inputs, expected)])) == []
    backwards = [({**inputs, "round": round}, expected) for round in (3, 2)]
    with pytest.raises(SpecError, match="round is 2, but 3 rounds were run"):
        replayed(tmp_path, "aaggff_s", params, init, backwards)


def test_the_public_code_can_be_asked_for(tmp_path):
    r = np.array([1 - np.exp(-0.25), 1 - np.exp(-2.25)]) / 2
    g, d = -r / (1 + r.sum()), np.array([1.0, -1.0])
    P = 6 * np.eye(2) + 0.5 * np.outer(g, g)
    x = -(d @ (P @ np.array([0.0, 1.0]) + g)) / (d @ P @ d)
    params = {"cdf": "weibull", "K": 2, "C1": 0.0, "C2": 0.5, "mode": "official"}
    expected = {"r": r.tolist(), "g": g.tolist(), "p": [x, 1 - x]}
    assert problems(replayed(tmp_path, "aaggff_s", params, {}, [({"losses": [1.0, 3.0]}, expected)])) == []


def test_the_model_that_afl_makes_is_the_next_input():
    for recorded in read(VECTORS / "fair.json").records:
        computed = list(registry.find("conform", "fair")(recorded.case))
        for before, after in zip(computed[:-1], recorded.case.rounds[1:], strict=True):
            assert before["afl_w"].tolist() == pytest.approx(after["w"], abs=1e-12)


def test_afl_starts_where_the_file_says(tmp_path):
    inputs = {"ids": [1, 0], "w": [0.0], "W": [[1.0], [2.0]], "losses": [3.0, 1.0]}
    params = {"q": 1.0, "lr": 0.1, "eps": 0.5, "afl_step": 0.1, "n": [5, 5]}
    report = replayed(tmp_path, "fair", params, {"afl": [0.8, 0.2]}, [(inputs, {"afl": [0.7, 0.3]})])
    assert problems(report) == []

"""The golden vectors, group by group, and files of other sizes made by formulas of their own."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedalloy.core import registry
from fedalloy.core.errors import SpecError
from fedalloy.core.measuring import mean_loss
from fedalloy.core.types import Examples
from fedalloy.testing.vectors.cohorts import Quadratics, arrive, flat, split
from fedalloy.testing.vectors.files import Values, VectorCase, read
from fedalloy.testing.vectors.replay import Report, replay

VECTORS = Path(__file__).resolve().parents[2] / "vectors"
FILES = sorted(VECTORS.glob("*.json"))
# Everything else in the vectors waits for its rule; whoever builds one moves its fields here.
BUILT: dict[str, Callable[[str], bool]] = {
    "ewwa": lambda field: True,
    "fedcams": lambda field: True,
    "fednova": lambda field: True,
    "fedopt": lambda field: True,
    "local_solvers": lambda field: True,
    "size_and_loss": lambda field: True,
    "superfed": lambda field: True,
    "fedadp": lambda field: True,
    "fedlayerwise": lambda field: True,
    "fedfa": lambda field: True,
    "metrics": lambda field: True,
    "fair": lambda field: True,
    "aaggff_s": lambda field: True,
    "aaggff_d": lambda field: True,
    "fedevg": lambda field: True,
    "deep_unfolding": lambda field: True,
}

Rng = np.random.Generator


def replayed(content: dict[str, Any]) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.json"
        path.write_text(json.dumps(content))
        return replay(path)


def problems(report: Report) -> list[str]:
    return [f"{f.name}: {f.status} by {f.error} in {f.worst}" for f in report.fields if f.status != "pass"]


def test_there_are_vectors_and_a_group_for_every_built_one():
    assert len(FILES) >= 16
    assert set(BUILT) <= set(registry.names("conform"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_vectors(path):
    report = replay(path)
    built = BUILT.get(report.group, lambda field: False)
    expected = {field.name: "pass" if built(field.name) else "not built" for field in report.fields}
    assert {field.name: field.status for field in report.fields} == expected
    assert report.exit_code == (0 if set(expected.values()) == {"pass"} else 3)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_built_field_can_fail(path):
    """The planted fault: every expected number is off by a little, and every built field must say so."""

    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: spoil(one) for name, one in value.items()}
        return (np.array(value, dtype=float) + 1e-6).tolist()

    content = json.loads(path.read_text())
    for case in content["cases"]:
        for round in case["rounds"]:
            round["expected"] = spoil(round["expected"])
    report, built = replayed(content), BUILT.get(content["group"], lambda field: False)
    assert {f.name for f in report.fields if f.status == "fail"} == {f.name for f in report.fields if built(f.name)}
    assert all(field.error is None or field.error >= 0.9e-6 for field in report.fields)


def test_solvers_that_expect_no_model_still_carry_the_right_one():
    """``prox_w`` is never expected, but the file gives it as the next round's input."""
    for recorded in read(VECTORS / "local_solvers.json").records:
        computed = list(registry.find("conform", "local_solvers")(recorded.case))
        for before, after in zip(computed[:-1], recorded.case.rounds[1:], strict=True):
            for name in ("prox_w", "momentum_w", "scaffold_w", "pfedme_w", "apfl_w"):
                assert torch.allclose(before[name], after.tensor(name, 1), atol=1e-12)


@st.composite
def federations(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of a small federation: any subset of clients in any order in each round, some without a step."""
    clients = draw(st.integers(1, 7))
    some = st.permutations(range(clients)).flatmap(lambda ids: st.integers(1, clients).map(lambda m: list(ids[:m])))
    return {
        "n": draw(st.lists(st.integers(1, 60), min_size=clients, max_size=clients)),
        "rounds": draw(st.lists(some, min_size=1, max_size=3)),
        "size": draw(st.integers(1, 9)),
        "seed": draw(st.integers(0, 2**20)),
    }


def file_of(group: str, params: dict[str, Any], init: dict[str, Any], rounds: list[Any]) -> dict[str, Any]:
    pairs = [{"inputs": inputs, "expected": expected} for inputs, expected in rounds]
    return {"group": group, "dtype": "float64", "cases": [{"params": params, "init": init, "rounds": pairs}]}


def nova_file(shape: dict[str, Any], momentum: float, prox: float) -> dict[str, Any]:
    """FedNova by its closed forms, in numpy."""
    rng = np.random.default_rng(shape["seed"])
    w, rounds = rng.normal(size=shape["size"]), []
    start = w.tolist()
    for ids in shape["rounds"]:
        tau = rng.integers(0, 9, size=len(ids))
        W = w + rng.normal(size=(len(ids), len(w))) * (tau > 0)[:, None]
        a = tau * 1.0
        if momentum:
            a = (tau - momentum * (1 - momentum**tau) / (1 - momentum)) / (1 - momentum)
        if prox:
            a = (1 - (1 - prox) ** tau) / prox
        p = np.array(shape["n"])[ids] / np.array(shape["n"])[ids].sum()
        tau_eff = (p * (tau if prox else a)).sum()
        new = w - tau_eff * (p / np.where(tau, a, 1.0)) @ (w - W)
        inputs = {"ids": ids, "w": w.tolist(), "W": W.tolist(), "tau": tau.tolist()}
        rounds.append((inputs, {"a_norm": a.tolist(), "tau_eff": tau_eff, "w": new.tolist()}))
        w = new
    return file_of("fednova", {"n": shape["n"], "momentum": momentum, "prox": prox}, {"w": start}, rounds)


@given(federations(), st.sampled_from([(0.0, 0.0), (0.7, 0.0), (0.0, 0.2)]))
@settings(max_examples=30)
def test_fednova_of_any_size(shape, kind):
    report = replayed(nova_file(shape, *kind))
    assert problems(report) == []
    assert report.exit_code == 0


@given(federations())
@settings(max_examples=20)
def test_weights_by_size_of_any_size(shape):
    rng = np.random.default_rng(shape["seed"])
    w, rounds = rng.normal(size=shape["size"]), []
    for ids in shape["rounds"]:
        W = rng.normal(size=(len(ids), shape["size"]))
        p = np.array(shape["n"])[ids] / np.array(shape["n"])[ids].sum()
        expected = {"weights": {"fedavg": p.tolist()}, "fedavg_w": (p @ W).tolist()}
        rounds.append(({"ids": ids, "w": w.tolist(), "W": W.tolist()}, expected))
        w = p @ W
    assert problems(replayed(file_of("size_and_loss", {"n": shape["n"]}, {}, rounds))) == []


def solver_file(rng: Rng, clients: int, size: int, steps: int, rounds: int, server_lr: float) -> dict[str, Any]:
    """FedProx and SCAFFOLD (option II) on quadratics, in numpy."""
    root = rng.normal(size=(clients, size, size))
    A, c = root @ root.transpose(0, 2, 1) / size + np.eye(size), rng.normal(size=(clients, size))
    w = {name: rng.normal(size=size) for name in ("prox", "scaffold")}
    lr, mu, mine, ours, pairs = 0.05, 0.3, np.zeros_like(c), np.zeros(size), []
    for _ in range(rounds):
        inputs = {f"{name}_w": model.tolist() for name, model in w.items()}
        y = {name: np.tile(model, (clients, 1)) for name, model in w.items()}
        for _ in range(steps):
            slope = {name: np.einsum("kij,kj->ki", A, y[name] - c) for name in y}
            y["prox"] = y["prox"] - lr * (slope["prox"] + mu * (y["prox"] - w["prox"]))
            y["scaffold"] = y["scaffold"] - lr * (slope["scaffold"] - mine + ours)
        new = mine - ours + (w["scaffold"] - y["scaffold"]) / (steps * lr)
        mine, ours = new, ours + (new - mine).mean(0)
        w = {name: w[name] + server_lr * (y[name].mean(0) - w[name]) for name in w}
        controls = {"scaffold_c_local": mine.tolist(), "scaffold_c": ours.tolist()}
        locals_ = {f"{name}_local": y[name].tolist() for name in y}
        pairs.append((inputs, {**locals_, **controls, **{f"{name}_w": w[name].tolist() for name in w}}))
    params = {"A": A.tolist(), "c": c.tolist(), "lr": lr, "mu": mu, "steps": steps, "server_lr": server_lr}
    return file_of("local_solvers", params, {}, pairs)


@pytest.mark.parametrize(("clients", "size", "steps", "rounds", "server_lr"), [(1, 1, 1, 1, 1.0), (6, 3, 4, 4, 0.7)])
def test_local_solvers_of_any_size(clients, size, steps, rounds, server_lr):
    content = solver_file(np.random.default_rng(5), clients, size, steps, rounds, server_lr)
    assert problems(replayed(content)) == []


def test_metrics_of_other_names_and_sizes():
    logits = [[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]
    inputs = {"logits": logits, "labels": [1, 1], "client_scores": [0.0, 1.0, 0.5, 0.5], "client_counts": [1, 1, 1, 1]}
    expected = {"top1": 0.0, "top2": 0.5, "top4": 1.0, "parity_gap_50": 0.5, "tails": [[0.25, 0.75]]}
    params = {"bins": 4, "fractions": [0.5]}
    assert problems(replayed(file_of("metrics", params, {}, [(inputs, expected)]))) == []


def test_the_gradient_of_a_quadratic_is_exact():
    A, c = torch.tensor([[[2.0, 1.0], [1.0, 3.0]]]), torch.tensor([[1.0, -1.0]])
    task, w = Quadratics(A, c), torch.tensor([0.5, 2.0])
    block = task.data("train", torch.tensor([0]))

    def loss(vector: torch.Tensor) -> torch.Tensor:
        return task.loss(split(vector, [1, 1]), {}, block.x, block.y, torch.tensor([True]), None)[0]

    assert torch.allclose(torch.func.grad(loss)(w), A[0] @ (w - c[0]))
    by_engine = mean_loss(task, split(w), {}, Examples(block.x, block.y))
    assert by_engine == pytest.approx(float(0.5 * (w - c[0]) @ A[0] @ (w - c[0])))


def test_a_cohort_is_sorted_and_goes_back_to_the_order_of_the_file():
    inputs = Values({"w": [0.0, 0.0], "W": [[5.0, 1.0], [2.0, 2.0]], "ids": [5, 2], "losses": [0.5, 0.2]}, "here")
    params = Values({"n": [10, 11, 12, 13, 14, 15], "layers": [1, 1]}, "params")
    case = VectorCase(params, Values({}, "init"), (inputs,), frozenset())
    arrived = arrive(case, inputs, loss_before="losses")
    assert arrived.cohort.ids.tolist() == [2, 5]
    assert arrived.cohort.stats["num_examples"].tolist() == [12.0, 15.0]
    assert arrived.cohort.stats["loss_before"].tolist() == [0.2, 0.5]
    assert list(arrived.cohort.payload["delta"]) == ["layer0", "layer1"]
    assert arrived.to_file(flat(arrived.cohort.payload["delta"])).tolist() == inputs["W"]


def test_layers_must_add_up():
    with pytest.raises(SpecError, match="do not fit"):
        split(torch.zeros(3), [1, 1])

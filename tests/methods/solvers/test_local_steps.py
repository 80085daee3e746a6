"""Local steps put together: schedules, clipping, accumulation and precision against torch, and on every engine."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional
from torch.optim import lr_scheduler

from fedalloy import fit
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import FedalloyError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.types import Context, Plan
from fedalloy.methods import published
from fedalloy.methods.published import fedavg, fednova, scaffold
from fedalloy.methods.solvers import descent
from fedalloy.methods.solvers.descent import clipped, descend, descend_start
from fedalloy.methods.solvers.schedules import Schedule, places
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.solvers.training import LocalTraining
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.federation import FederatedTask

UNITS = 20
CTX, UNIT = (Context(1, 1, Key.of(0), local_lr=lr) for lr in (0.5, 1.0))
SCHEDULES: dict[str, tuple[dict[str, Any], Any]] = {
    "constant": ({}, lambda o, T: lr_scheduler.ConstantLR(o, factor=1.0)),
    "step": ({"factor": 0.5, "every": 3}, lambda o, T: lr_scheduler.StepLR(o, 3, gamma=0.5)),
    "milestones": ({"milestones": (4, 9), "factor": 0.3}, lambda o, T: lr_scheduler.MultiStepLR(o, [4, 9], gamma=0.3)),
    "exponential": ({"factor": 0.9}, lambda o, T: lr_scheduler.ExponentialLR(o, gamma=0.9)),
    "cosine": ({"floor": 0.1}, lambda o, T: lr_scheduler.CosineAnnealingLR(o, T, eta_min=0.1 * 0.7)),
    "linear": ({"floor": 0.2}, lambda o, T: lr_scheduler.LinearLR(o, 1.0, 0.2, total_iters=T)),
}  # fmt: skip


def torchs(kind: str, warmup: int, units: int = UNITS) -> list[float]:
    """The step sizes of torch's scheduler, after its linear warm-up."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.7)
    after = SCHEDULES[kind][1](optimizer, units - warmup)
    if warmup:
        first = lr_scheduler.LinearLR(optimizer, 1 / (warmup + 1), 1.0, total_iters=warmup)
        after = lr_scheduler.SequentialLR(optimizer, [first, after], [warmup])
    sizes = []
    for _ in range(units):
        sizes.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        after.step()
    return sizes


@pytest.mark.parametrize(("kind", "warmup"), [*itertools.product(SCHEDULES, (0, 4))])
def test_schedules_over_rounds_and_over_steps_are_torchs(kind, warmup):
    more = SCHEDULES[kind][0]
    wanted = pytest.approx(torchs(kind, warmup), abs=1e-12)
    over_rounds = Sgd(lr=0.7, schedule=Schedule(kind=kind, warmup=warmup, **more))
    assert [over_rounds.lr_at(round, UNITS) for round in range(1, UNITS + 1)] == wanted
    over_steps = Sgd(lr=0.7, schedule=Schedule(kind=kind, warmup=warmup, over="steps", **more))
    taken = torch.ones(1, UNITS, 1, dtype=torch.bool)
    plan = Plan(taken.long(), taken, torch.zeros(1, UNITS, dtype=torch.int64))
    factors = over_steps.draws(plan, Key.of(0), {}).get("lr_factor", torch.ones(1, UNITS))
    assert [0.7 * float(one) for one in factors[0]] == wanted
    assert over_steps.lr_at(9, UNITS) == 0.7


def test_shares_of_the_run_and_runs_of_unknown_length():
    settings = Sgd(lr=1.0, schedule=Schedule(kind="milestones", milestones=(0.5,)))
    assert [settings.lr_at(round, 10) for round in (5, 6)] == [1.0, 0.1]
    with pytest.raises(ValueError, match="needs the number of rounds"):
        settings.lr_at(3)
    assert "whole run" in settings.uses_length
    assert Sgd(schedule=Schedule(kind="cosine", over="steps")).uses_length == ""


def test_every_phase_has_its_own_schedule():
    taken = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    phase = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    place, count = places(Plan(taken.long().unsqueeze(2), taken.unsqueeze(2), phase))
    assert place.tolist() == [[0, 1, 0, 1, 2], [0, 0, 1, 0, 0]]
    assert count.tolist() == [[2, 2, 3, 3, 3], [1, 2, 2, 0, 0]]


def test_clipping_is_torchs():
    grads = {"a": Key.of(0).normal(3, 2, dtype=torch.float64), "b": 5 * Key.of(1).normal(2, dtype=torch.float64)}
    for settings, clip in (
        (Sgd(clip_norm=0.7), lambda p: nn.utils.clip_grad_norm_(p, 0.7)),
        (Sgd(clip_norm=70.0), lambda p: nn.utils.clip_grad_norm_(p, 70.0)),
        (Sgd(clip_value=0.4), lambda p: nn.utils.clip_grad_value_(p, 0.4)),
    ):
        leaves = [nn.Parameter(torch.zeros_like(leaf)) for leaf in grads.values()]
        for leaf, grad in zip(leaves, grads.values(), strict=True):
            leaf.grad = grad.clone()
        clip(leaves)
        for found, leaf in zip(clipped(settings, grads).values(), leaves, strict=True):
            assert leaf.grad is not None
            torch.testing.assert_close(found, leaf.grad, rtol=1e-12, atol=1e-12)


def small(clients: int = 3, dtype: Any = "float64", sizes: int = 47) -> FederatedTask:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(sizes, 6, generator=draw), torch.randint(3, (sizes,), generator=draw)
    return make_task(Dataset(x, y, 3), "logistic", clients=clients, test_fraction=0.1, dtype=dtype)


SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
    "rmsprop": {"optimizer": "rmsprop", "centered": True, "momentum": 0.5},
    "adagrad": {"optimizer": "adagrad", "lr_decay": 0.1},
    "dampened": {"momentum": 0.9, "dampening": 0.4},
    "clipped": {"clip_norm": 0.3, "clip_value": 0.2, "momentum": 0.9},
    "accumulated": {"accumulate": 3, "weight_decay": 0.1, "momentum": 0.5},
    "by_step": {"schedule": {"kind": "cosine", "over": "steps", "warmup": 2}},
    "both": {
        "accumulate": 4,
        "schedule": {"kind": "linear", "over": "steps", "warmup": 2},
        "momentum": 0.5,
        "clip_norm": 0.3,
        "clip_value": 0.2,
    },
    "all": {"optimizer": "adam", "accumulate": 2, "clip_norm": 0.3, "schedule": {"kind": "linear", "over": "steps"}},
}


@pytest.mark.parametrize("name", ["clipped", "accumulated", "by_step", "both"])
def test_a_client_trains_as_a_loop_of_torch_does(name):
    """One client, one round, in the order of the examples: the same parameters as torch's own parts give. A schedule
    counts the optimizer's steps, not the batches that they accumulate."""
    task, how = small(1), SETTINGS[name]
    done = fit(fedavg(lr=0.2, batch_size=4, shuffle=False, epochs=2, **how), task, rounds=1, engine="loop")
    params = {leaf: value.clone().requires_grad_() for leaf, value in task.objective.init(_model_key())[0].items()}
    own = {key: how[key] for key in ("momentum", "weight_decay") if key in how}
    optimizer = torch.optim.SGD(list(params.values()), lr=0.2, **own)
    data = task.data("train", torch.tensor([0])).client(0)
    batches = [*range(0, len(data), 4)] * 2
    group = how.get("accumulate", 1)
    for step, begin in enumerate(batches):
        held = min(group, len(batches) - step // group * group)
        outputs = task.objective.outputs(params, {}, data.x[begin : begin + 4])
        (functional.cross_entropy(outputs, data.y[begin : begin + 4]) / held).backward()
        if (step + 1) % group and step + 1 < len(batches):
            continue
        if "clip_norm" in how:
            nn.utils.clip_grad_value_(params.values(), 0.2)
            nn.utils.clip_grad_norm_(params.values(), 0.3)
        optimizer.param_groups[0]["lr"] = 0.2 * _factor(how, step // group, -(-len(batches) // group))
        optimizer.step()
        optimizer.zero_grad()
    for leaf, value in params.items():
        torch.testing.assert_close(done.model[leaf], value.detach(), rtol=1e-12, atol=1e-12)


def _model_key() -> Key:
    return Key.of(0).fold("model")


def _factor(how: dict[str, Any], step: int, steps: int) -> float:
    if "schedule" not in how:
        return 1.0
    unit, units = (torch.tensor(float(number), dtype=torch.float64) for number in (step, steps))
    return float(Schedule(**how["schedule"]).at(unit, units))


def models(algorithm: Algorithm, task: FederatedTask, engine: str) -> dict[str, Tensor]:
    options: dict[str, Any] = {"engine_options": {"processes": 1}} if engine == "workers" else {}
    return fit(algorithm, task, rounds=2, engine=engine, evaluate_every=2, **options).model


def apart(algorithm: Algorithm, task: FederatedTask, engine: str) -> float:
    """The largest difference of an engine's model from the loop's."""
    one, other = models(algorithm, task, "loop"), models(algorithm, task, engine)
    assert all(leaf.dtype == other[name].dtype for name, leaf in one.items())
    return max(float((leaf - other[name]).abs().max()) for name, leaf in one.items())


@pytest.mark.parametrize(("name", "engine"), [*itertools.product(SETTINGS, ("batched", "workers"))])
def test_engines_agree(name, engine):
    assert apart(fedavg(lr=0.1, batch_size=4, epochs=2, **SETTINGS[name]), small(), engine) <= 1e-12


@pytest.mark.parametrize("method", ["fedprox", "ditto", "superfed_mm", "apfl", "propfair", "pfedme"])
def test_every_solver_is_composed_of_them(method):
    how: dict[str, Any] = {**SETTINGS["all"], "accumulate": 1 if method == "pfedme" else 2}
    algorithm = published.named(method, lr=0.1, batch_size=4, **how)
    assert apart(algorithm, small(), "batched") <= 1e-12
    plain = published.named(method, lr=0.1, batch_size=4, optimizer="adam")
    changed, before = models(algorithm, small(), "loop"), models(plain, small(), "loop")
    assert any(not torch.allclose(leaf, before[name]) for name, leaf in changed.items())


@pytest.mark.parametrize("name", ["dampened", "clipped", "accumulated", "by_step"])
@pytest.mark.parametrize("method", [fedavg, published.superfed_mm])
def test_a_fused_kernel_that_ignored_a_setting_would_be_caught(name, method, monkeypatch):
    """Planted: solvers that declare their steps plain although they are not."""
    algorithm = method(lr=0.1, batch_size=4, **{**SETTINGS[name], **({"start": 0.0} if method is not fedavg else {})})
    assert algorithm.fusing is None
    monkeypatch.setattr(LocalTraining, "plain_but", lambda self, *others: True)
    lying = method(lr=0.1, batch_size=4, **{**SETTINGS[name], **({"start": 0.0} if method is not fedavg else {})})
    assert lying.fusing is not None
    assert apart(lying, small(), "batched") > 1e-6


@pytest.mark.parametrize("engine", ["batched", "workers"])
def test_bf16_on_every_engine(engine):
    """Products are rounded to eight bits: the engines agree to that, and differ from full precision."""
    task, half = small(dtype="float32"), fedavg(lr=0.1, batch_size=4, precision="bf16")
    assert half.fusing is None
    assert apart(half, task, engine) <= 2e-3
    full = models(fedavg(lr=0.1, batch_size=4), task, "loop")
    found = models(half, task, engine)
    assert all(leaf.dtype == torch.float32 for leaf in found.values())
    assert 1e-6 < max(float((leaf - found[name]).abs().max()) for name, leaf in full.items()) < 2e-2


def test_fp16_scales_every_clients_loss(monkeypatch):
    """On a CPU, with its refusal lifted: the first steps overflow and are skipped, then training goes on."""
    monkeypatch.setattr(descent, "_check_precision", lambda *given: None)
    task = small(dtype="float32")
    start, full = task.objective.init(_model_key())[0], models(fedavg(lr=0.1, batch_size=4, epochs=3), task, "loop")
    for scale, low, high in ((2.0**8, 0.0, 2e-2), (2.0**24, 2e-2, 1.0)):
        half = fedavg(lr=0.1, batch_size=4, epochs=3, precision="fp16", loss_scale=scale)
        assert apart(half, task, "batched") <= 2e-3
        found = models(half, task, "batched")
        assert low <= max(float((leaf - found[name]).abs().max()) for name, leaf in full.items()) <= high
        assert max(float((leaf - start[name]).abs().max()) for name, leaf in found.items()) > 0.05


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["clipped", "accumulated", "by_step", "all"])
@pytest.mark.parametrize("precision", ["full", "bf16", "fp16"])
def test_on_a_gpu(name, precision):
    task, algorithm = small(dtype="float32"), fedavg(lr=0.1, batch_size=4, precision=precision, **SETTINGS[name])
    one, other = (
        fit(algorithm, task, rounds=2, engine=engine, device="cuda", evaluate_every=2).model
        for engine in ("loop", "batched")
    )
    within = 1e-5 if precision == "full" else 5e-3
    assert all(torch.allclose(leaf, other[name], atol=within) for name, leaf in one.items())


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_factors_of_steps_do_not_change_the_precision(engine):
    found = models(fedavg(**SETTINGS["by_step"], momentum=0.5), small(dtype="float32"), engine)
    assert {leaf.dtype for leaf in found.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("settings", "dtype", "said"),
    [({"precision": "bf16"}, "float64", "is for models in float32"),
     ({"precision": "fp16"}, "float32", "is for models on a CUDA device")],
)  # fmt: skip
def test_a_precision_that_would_have_no_effect_is_refused(settings, dtype, said):
    with pytest.raises(FedalloyError, match=said):
        fit(fedavg(**settings), small(dtype=dtype), rounds=1, engine="loop")


def test_overflowing_steps_are_skipped_for_their_client_alone():
    """Two clients under vmap: the gradients of one overflow, its step is skipped and its loss scale halved."""
    settings = Sgd(lr=0.5, precision="fp16", momentum=0.9, loss_scale=8.0)
    params = {"w": torch.ones(2, 3)}
    memory = vmap(lambda leaves: descend_start(settings, leaves))(params)
    grads = {"w": torch.tensor([[1.0, torch.inf, 1.0], [1.0, 1.0, 1.0]])}
    step = vmap(lambda p, g, m: descend(settings, p, g, m, {}, CTX))
    params, memory = step(params, grads, memory)
    assert params["w"].tolist() == [[1.0] * 3, [0.5] * 3]
    assert memory["scale"].tolist() == [4.0, 8.0]
    assert memory["velocity"]["w"].tolist() == [[0.0] * 3, [1.0] * 3]
    for _ in range(2000):
        params, memory = step(params, {"w": torch.zeros(2, 3)}, memory)
    assert memory["scale"].tolist() == [8.0, 16.0]


def test_an_overflow_does_not_enter_an_accumulated_gradient():
    settings = Sgd(lr=1.0, precision="fp16", accumulate=2)
    params = {"w": torch.zeros(1)}
    memory = descend_start(settings, params)
    params, memory = descend(settings, params, {"w": torch.tensor([3.0])}, memory, {"flush": torch.tensor(False)}, UNIT)
    assert float(params["w"]) == 0.0
    bad, flush = {"w": torch.tensor([torch.nan])}, {"flush": torch.tensor(True)}
    params, memory = descend(settings, params, bad, memory, flush, UNIT)
    assert float(params["w"]) == 0.0
    params, memory = descend(settings, params, {"w": torch.tensor([1.0])}, memory, flush, UNIT)
    assert float(params["w"]) == -2.0


@pytest.mark.parametrize("name", ["clipped", "accumulated", "by_step", "dampened"])
def test_what_needs_plain_steps_refuses_others(name):
    with pytest.raises(SpecError, match="scaffold needs optimizer 'sgd'"):
        scaffold(**SETTINGS[name])
    with pytest.raises(FedalloyError, match=r"step_norm|effective_steps"):
        fednova(**SETTINGS[name])
    with pytest.raises(SpecError, match="shared_epochs needs"):
        published.fedrep(**{**SETTINGS[name], "accumulate": 2})

"""The outer loop: Adam, resume, early stop, options, and what a table is."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch

import fedalloy
from fedalloy.algorithms import named
from fedalloy.core.errors import AlgorithmError, CheckpointError, SpecError
from fedalloy.core.keys import Key
from fedalloy.engines.batched import Batched
from fedalloy.engines.loop import Loop
from fedalloy.engines.workers import Workers
from fedalloy.experiment.weight_files import load_table
from fedalloy.methods.weightings.weight_table import WeightTable, average
from fedalloy.studies.unfolding.call import Stopped, progress_file
from fedalloy.studies.unfolding.learning import Learner, Standing, adam, learn, sampled, sizes_of
from fedalloy.studies.unfolding.settings import Learning
from fedalloy.studies.unfolding.shares import first_theta, roughness, shares_of, theta_of
from fedalloy.studies.unfolding.unrolled import UnrolledProblem
from fedalloy.tasks.devices import DeviceProfile
from fedalloy.testing import small_task

FEDAVG = named("fedavg", lr=0.3, batch_size=3)
QUICK: dict[str, Any] = {"rounds": 3, "iterations": 4, "lr": 0.05}


def test_learning_lowers_the_summed_loss():
    table = fedalloy.unfold(FEDAVG, small_task("linear"), rounds=3, iterations=25, lr=0.05)
    assert table.losses[-1] < table.losses[0] - 0.05
    torch.testing.assert_close(table.weights.sum(1), torch.ones(3, dtype=torch.float64))
    assert table.weights.min() >= 0


def test_adam_is_that_of_torch():
    theta = torch.nn.Parameter(torch.tensor([[0.5, 0.7]], dtype=torch.float64))
    theirs, learning = torch.optim.Adam([theta], lr=0.01, betas=(0.8, 0.95)), Learning(lr=0.01, betas=(0.8, 0.95))
    mine = Standing(theta.detach().clone(), torch.zeros(1, 2).double(), torch.zeros(1, 2).double())
    for number in range(5):
        slope = Key.of(number).normal(1, 2, dtype=torch.float64)
        theta.grad = slope.clone()
        theirs.step()
        adam(mine, slope, learning)
        mine.iteration += 1
    torch.testing.assert_close(mine.theta, theta.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("how", ["square", "softmax"])
def test_the_beginning_is_the_share_of_the_examples(how):
    theta = first_theta(torch.tensor([1, 2, 5]), 4, how)
    torch.testing.assert_close(shares_of(theta, how), torch.tensor([[0.125, 0.25, 0.625]] * 4, dtype=torch.float64))
    torch.testing.assert_close(shares_of(theta_of(shares_of(theta, how), how), how), shares_of(theta, how))


def test_an_interrupted_learning_goes_on_as_if_it_had_not_been(tmp_path):
    whole = fedalloy.unfold(FEDAVG, small_task(), **QUICK, patience=9, check_every=1)
    place = tmp_path / "table.json"

    def interrupt(event: Any) -> None:
        if event.iteration == 2:
            os.kill(os.getpid(), signal.SIGINT)

    again = {**QUICK, "output": place, "patience": 9, "check_every": 1}
    with pytest.raises(KeyboardInterrupt) as interrupted:
        fedalloy.unfold(FEDAVG, small_task(), **again, watcher=interrupt)
    assert isinstance(interrupted.value.__context__, Stopped)
    assert re.search("after outer iteration 2: its progress is in .*resume", str(interrupted.value.__context__))
    assert progress_file(place).exists()
    assert not place.exists()
    with pytest.raises(SpecError, match="interrupted learning"):
        fedalloy.unfold(FEDAVG, small_task(), **again)
    with pytest.raises(CheckpointError, match="another learning"):
        fedalloy.unfold(FEDAVG, small_task(), **{**again, "lr": 0.06}, resume=True)
    seen: list[int] = []
    resumed = fedalloy.unfold(
        FEDAVG, small_task(), **again, resume=True, watcher=lambda event: seen.append(event.iteration)
    )
    assert seen == [3, 4]
    assert torch.equal(resumed.weights, whole.weights)
    assert resumed.losses == whole.losses
    assert torch.equal(load_table(place).weights, whole.weights)
    assert not progress_file(place).exists()


def test_early_stop_keeps_the_table_of_the_best_validation_loss():
    problem = UnrolledProblem(FEDAVG, small_task("linear"), 3, learning=Learning(40, lr=5.0, patience=3, check_every=1))
    values: list[float] = []

    def watch(event: Any) -> None:
        assert event.valid_loss is not None
        values.append(event.valid_loss)

    standing, _ = learn(Learner(problem, watcher=watch))
    assert standing.iteration < 40
    assert standing.stale == 3
    best = values.index(min(values))
    assert best == len(values) - 4
    assert standing.best_theta is not None
    assert not torch.equal(standing.best_theta, standing.theta)


def test_early_stop_needs_a_validation_part():
    with pytest.raises(SpecError, match="valid_fraction"):
        fedalloy.unfold("fedavg", fedalloy.task("digits", clients=2), rounds=1, iterations=1, patience=2)


def test_smoothness_makes_rows_alike():
    rough, smooth = (
        fedalloy.unfold(FEDAVG, small_task("linear"), rounds=3, iterations=15, lr=0.05, smoothness=price)
        for price in (0.0, 100.0)
    )
    assert float(roughness(smooth.weights)[0]) < 0.3 * float(roughness(rough.weights)[0])


def test_the_initial_model_is_that_of_a_run_or_a_fresh_one():
    fixed = Learner(UnrolledProblem(FEDAVG, small_task(), 2), seed=3)
    run = fedalloy.fit(FEDAVG, small_task(), rounds=1, seed=3, initial=None)
    assert run.status == "finished"
    first = small_task().objective.init(Key.of(3).fold("model"))[0]
    torch.testing.assert_close(fixed.model(0)[0], first)
    torch.testing.assert_close(fixed.model(7)[0], first)
    fresh = replace(fixed, problem=replace(fixed.problem, learning=Learning(initial="fresh")))
    assert not torch.equal(fresh.model(0)[0]["output.weight"], fresh.model(1)[0]["output.weight"])


def test_a_fraction_of_every_clients_examples_is_used():
    problem = UnrolledProblem(FEDAVG, small_task(), 2, learning=Learning(fraction=0.5))
    part, whole = sampled(problem, 0).task, small_task()
    assert sizes_of(part).tolist() == [1, 2, 4, 6, 2]
    for client in range(5):
        mine, theirs = (task.data("train", torch.tensor([client])).client(0).x for task in (part, whole))
        assert all(any(torch.equal(one, other) for other in theirs) for one in mine)
    table = fedalloy.unfold(FEDAVG, small_task(), **QUICK, fraction=0.5)
    assert table.sizes == (1, 3, 7, 12, 5)


def test_a_table_survives_its_file(tmp_path):
    table = fedalloy.unfold(
        named("fednova", batch_size=3), small_task(), **QUICK, level="layer", output=tmp_path / "t.json"
    )
    again = load_table(tmp_path / "t.json")
    assert torch.equal(again.weights, table.weights)
    assert (again.layers, again.sizes, again.normalise) == (("hidden", "output"), (1, 3, 7, 12, 5), True)
    assert again.weighting() == table.weighting()
    assert json.loads((tmp_path / "t.json").read_text())["learned"]["settings"]["level"] == "layer"
    for text in ("{", "[]", '{"format": "other"}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(SpecError, match="not a table of weights"):
            load_table(tmp_path / "bad.json")
    with pytest.raises(SpecError, match="fedalloy unfold"):
        load_table(tmp_path / "nowhere.json")


def test_averages_count_every_run_alike():
    one, two = (WeightTable(torch.tensor([[share, 1 - share]]), sizes=(3, 4)) for share in (0.2, 0.6))
    both = average([one, two])
    assert both.runs == 2
    assert both.weights[0, 0].item() == pytest.approx(0.4)
    assert average([both, replace(one, weights=torch.tensor([[1.0, 0.0]]))]).weights[0, 0].item() == pytest.approx(0.6)
    with pytest.raises(SpecError, match="sizes"):
        average([one, replace(two, sizes=(3, 5))])
    with pytest.raises(SpecError, match="there is no table"):
        average([])


@pytest.mark.parametrize("level", ["client", "layer"])
def test_a_learned_table_runs_on_every_engine_with_equal_results(level):
    task, devices = small_task(), DeviceProfile(success=0.6, on_failure="resend")
    table = fedalloy.unfold(FEDAVG, task, **QUICK, level=level, devices=devices)
    algorithm = replace(FEDAVG, weighting=table.weighting())
    models = [
        fedalloy.fit(algorithm, task, rounds=5, seed=2, devices=devices, engine=engine).model
        for engine in (Loop(), Batched(), Batched(kernel="mapped"), Workers(2), "auto")
    ]
    for model in models[1:]:
        torch.testing.assert_close(model, models[0], rtol=1e-9, atol=1e-11)
    plain = fedalloy.fit(FEDAVG, task, rounds=5, seed=2, devices=devices).model
    assert not torch.allclose(plain["output.weight"], models[0]["output.weight"], atol=1e-4)


def test_a_rehearsal_is_what_then_runs():
    """The losses that the learning sums are those that a run with the table meets, round by round."""
    from fedalloy.studies.unfolding.gradient import outer_gradient

    problem = UnrolledProblem(FEDAVG, small_task(), 3, DeviceProfile(epochs=(2, 1, 1, 1, 3)))
    theta = first_theta(sizes_of(problem.task), 3, "square")
    root = Key.of(4)
    found = outer_gradient(problem, theta, *problem.task.objective.init(root.fold("model")), root)
    run = fedalloy.fit(FEDAVG, small_task(), rounds=3, seed=4, devices=problem.devices)
    torch.testing.assert_close(found.params, run.model, rtol=1e-9, atol=1e-11)


def test_other_clients_are_refused():
    table = fedalloy.unfold(FEDAVG, small_task(), **QUICK)
    algorithm = replace(FEDAVG, weighting=table.weighting())
    with pytest.raises(AlgorithmError, match="weights for 5 clients, this federation has 3"):
        fedalloy.fit(algorithm, small_task(sizes=(4, 5, 6)), rounds=1)
    with pytest.raises(AlgorithmError, match="client 2 has 8 examples, the table was learned with one of 7"):
        fedalloy.fit(algorithm, small_task(sizes=(1, 3, 8, 12, 5)), rounds=1)


def test_wrong_settings_are_named():
    for settings, says in (
        ({"fraction": 0.0}, "fraction is 0.0"),
        ({"iterations": 0}, "iterations is 0"),
        ({"ilterations": 3}, "did you mean 'iterations'"),
        ({"gradient": "exakt"}, "exact"),
    ):
        with pytest.raises(SpecError, match=says):
            fedalloy.unfold(FEDAVG, small_task(), rounds=1, **settings)

"""docs/corrections.md: the page says what was measured, and the other forms are ours where they ought to agree."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.corrections import exact, local, page, servers, splits, weights
from benchmarks.corrections.__main__ import every_case, main
from benchmarks.corrections.measuring import ACCURACY, APART, Case
from fedalloy.core.algorithm import Algorithm, server_step
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Weighting
from fedalloy.core.types import Cohort, Context, State
from fedalloy.engines.loop import Loop
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.scaffold import Scaffold
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.aaggff_d import AaggffD
from fedalloy.methods.weightings.ewwa import Ewwa
from fedalloy.methods.weightings.fedadp import Angles
from fedalloy.methods.weightings.mgda import FedMgda
from fedalloy.methods.weightings.nova import Nova
from fedalloy.methods.weightings.qfedavg import QFedAvg
from fedalloy.methods.weightings.samples import Samples
from fedalloy.testing import small_task, work

CASES = {case.name: case for case in every_case()}


def cohort(clients: int = 4, seed: int = 0) -> Cohort:
    key = Key.of(seed)
    delta = {"w": key.fold("w").normal(clients, 3, dtype=torch.float64), "b": key.normal(clients, dtype=torch.float64)}
    sizes = torch.arange(1.0, clients + 1, dtype=torch.float64)
    losses = 0.5 + key.fold("loss").uniform(clients, dtype=torch.float64)
    return Cohort(torch.arange(clients), {"delta": delta}, {"num_examples": sizes, "loss_before": losses})


def context(round: int = 1, population: int = 4) -> Context:
    return Context(round, population, Key.of(round), local_lr=0.1)


def weigh(rule: Weighting, given: Cohort, state: State, ctx: Context) -> Any:
    """Weights, state and info; of whatever kind the weights are."""
    return rule.weigh(given, state, ctx)


def test_the_page_is_what_the_stored_readings_give():
    assert main(["--check"]) == 0


def test_the_page_says_how_many_differences_it_shows():
    count = page.count_comparisons(every_case(), page.read())
    text = " ".join(page.PAGE.read_text().split())
    assert f"for all {count} differences on this page" in text
    assert f"of {count} intervals" in text


def test_a_page_that_says_something_else_is_noticed(monkeypatch, tmp_path, capsys):
    changed = tmp_path / "corrections.md"
    changed.write_text(re.sub(r"\| ours \| [\d.]+", "| ours | 99.9", page.PAGE.read_text(), count=1))
    monkeypatch.setattr(page, "PAGE", changed)
    assert main(["--check"]) == 1
    assert "differs from its readings" in capsys.readouterr().err


def test_a_case_without_a_place_is_refused():
    with pytest.raises(SystemExit, match="fedavg-shares"):
        page.filled("no places", [CASES["fedavg-shares"]], {})


def test_every_case_was_measured_with_five_seeds_and_compares_at_least_two_forms():
    stored = page.read()
    assert list(stored) == list(CASES)
    for name, case in stored.items():
        assert case["seeds"] == list(CASES[name].seeds), name
        assert len(case["forms"]) >= 2, name


@pytest.mark.parametrize("name", ["fedfa-quadratic", "aaggff-d-estimate"])
def test_what_takes_no_time_is_measured_again(name):
    stored = page.read()[name]
    for form, columns in page.gather(CASES[name], stored["seeds"]).items():
        for key, values in columns.items():
            assert values == pytest.approx(stored["forms"][form][key], rel=1e-4), (form, key)


def test_a_table_shows_spread_differences_and_runs_that_broke_off():
    case = Case("made up", (ACCURACY, APART), lambda seed: {})
    stored: page.Stored = {
        "ours": {"accuracy": [0.5, 0.6], "apart": [0.0, 0.0]},
        "other": {"accuracy": [0.4, 0.51], "apart": [1e-5, 1e-5]},
        "broken": {"accuracy": [None, None], "apart": [None, None], "broke": [3, 4]},
    }
    rows = page.table(case, stored).splitlines()[2:]
    assert rows[0] == "| ours | 55.0 ± 7.1 | 0.00 |  |"
    assert rows[1] == "| other | 45.5 ± 7.8 | 1.0e-05 | **-9.5 ± 6.4** |"
    assert "| -9.5 ± 6.4 |" in page.table(case, stored, comparisons=50)  # one of fifty such is no news
    assert rows[2] == "| broken | not a number after round 3 |  |  |"


def test_the_unsquared_pull_does_not_depend_on_the_distance():
    def move(away: float) -> float:
        solver = local.UnsquaredProx(lr=1.0, mu=0.5)
        carry = {
            "params": {"w.weight": torch.tensor([away, 0.0])},
            "anchor": {"w.weight": torch.zeros(2)},
            "memory": {},
        }
        still: Any = lambda params: {"w.weight": torch.zeros(2)}  # noqa: E731
        done = solver.step(carry, still, {}, torch.tensor(0), context())
        return away - float(done["params"]["w.weight"][0])

    assert move(1.0) == pytest.approx(0.05, rel=1e-3)
    assert move(100.0) == pytest.approx(0.05, rel=1e-3)
    assert move(0.0) == 0.0


def one_round(algorithm: Algorithm, lr: float) -> torch.Tensor:
    """What the loop's clients and the server make of a small federation in a round."""
    task = small_task("linear")
    params, _ = task.objective.init(Key.of(1))
    state = algorithm.init(params, task.population)
    ctx = Context(1, task.population, Key.of(3), local_lr=lr)
    states = {client: algorithm.init_client(state["shared"], Key.of(client)) for client in range(task.population)}
    outcome = Loop()(algorithm, task, state["shared"], states, work(0, 1, 2, 3, 4, epochs=(1, 2, 3, 1, 2)), ctx)
    moved = server_step(algorithm, state, outcome.cohort, ctx).state["shared"]["params"]
    return torch.cat([(moved[name] - params[name]).flatten() for name in params]) / lr


def test_fednova_inside_the_steps_is_fednova_to_first_order_only():
    task, epochs, batch = small_task("linear"), torch.tensor([1, 2, 3, 1, 2]), 4
    sizes = task.block.size.double()
    effective = float((sizes / sizes.sum() * ((sizes / batch).ceil() * epochs)).sum())
    gaps = []
    for lr in (1e-5, 0.5):
        ours = one_round(Algorithm(Sgd(lr=lr, batch_size=batch), Nova(), ServerSgd()), lr)
        solver = local.StepwiseNova(lr=lr, batch_size=batch, effective=effective)
        theirs = one_round(Algorithm(solver, Samples(), ServerSgd()), lr)
        gaps.append(float((ours - theirs).norm() / ours.norm()))
    assert gaps[0] < 1e-3 < 0.01 < gaps[1]


def test_the_printed_loop_of_fednova_takes_one_step_more():
    plain, printed = (local.StepwiseNova(batch_size=4, extra=extra) for extra in (0, 1))
    sizes, epochs = torch.tensor([3, 9]), torch.tensor([2, 1])
    keys = Key.of(0).each(torch.arange(2))
    assert (printed.plan(sizes, epochs, keys).steps - plain.plan(sizes, epochs, keys).steps).tolist() == [1, 1]


def test_scaffold_by_epochs_is_scaffold_where_an_epoch_is_one_step():
    settings: dict[str, Any] = {"lr": 0.1, "epochs": 2}
    shared = {"params": {"w": torch.zeros(2)}, "control": {"w": torch.zeros(2)}}
    mine, carry = {"control": {"w": torch.zeros(2)}}, {"params": {"w": torch.ones(2)}}
    for steps, equal in ((2.0, True), (6.0, False)):
        ours, theirs = (
            solver.end(carry, shared, mine, torch.tensor(steps), context())[0]["control"]["w"]
            for solver in (Scaffold(**settings), local.ScaffoldByEpochs(**settings))
        )
        assert torch.equal(ours, theirs) is equal


def test_angles_agree_while_everybody_is_there_and_part_when_somebody_is_away():
    rules = [Angles(), weights.AnglesByRound(), weights.AnglesOneBehind()]
    states = [rule.init(4) for rule in rules]
    first = [weigh(rule, cohort(), state, context(1)) for rule, state in zip(rules, states, strict=True)]
    assert torch.allclose(first[0][0], first[1][0])
    assert torch.allclose(first[0][0], first[2][0])
    some = cohort(seed=1).take(torch.tensor([0, 2]))
    ours, by_round, behind = (
        weigh(rule, some, state, context(5)) for rule, (_, state, _) in zip(rules, first, strict=True)
    )
    assert bool((by_round[2]["smoothed_angle"] != ours[2]["smoothed_angle"]).all())
    assert not torch.allclose(behind[2]["smoothed_angle"], ours[2]["smoothed_angle"])
    assert behind[1]["angle"][""][[1, 3]].tolist() == [0.0, 0.0]  # those who are away are forgotten
    assert ours[1]["angle"][""][[1, 3]].tolist() == first[0][1]["angle"][""][[1, 3]].tolist()


def test_the_order_of_clients_matters_to_the_public_code_of_ewwa_alone():
    modes: list[tuple[Any, bool]] = [("paper", True), ("official", False)]
    for mode, equal in modes:
        ahead, back = (
            weigh(rule, cohort(), rule.init(4), context())[0]["w"]
            for rule in (Ewwa(mode=mode), weights.EwwaBackwards(mode=mode))
        )
        assert torch.allclose(ahead, back) is equal


def test_printed_second_moments_turn_negative():
    first, second = weights.EwwaFromFirst().step(torch.tensor([-1.0]), torch.tensor([1.0]), torch.tensor([0.1]))
    assert float(first) < 0 > float(second)
    _, yogi = weights.EwwaPrintedYogi("yogi").step(torch.zeros(1), torch.zeros(1), torch.ones(1))
    assert float(yogi) < 0


def test_the_first_step_matters_to_qfedavg_once_it_has_decayed():
    ours, theirs = QFedAvg(), weights.QFedAvgFirstStep(first_lr=0.1)
    for lr, equal in ((0.1, True), (0.01, False)):
        ctx = replace(context(), local_lr=lr)
        pair = [weigh(rule, cohort(), {}, ctx)[0] for rule in (ours, theirs)]
        assert torch.allclose(*pair) is equal


def test_a_rough_solution_is_off_by_no_more_than_it_says():
    exactly, roughly = (weigh(rule, cohort(), rule.init(4), context()) for rule in (FedMgda(), weights.RoughMgda()))
    gap = (roughly[0] - exactly[0]) * exactly[2]["norms"]
    assert 0 < float(gap.abs().max()) < 1e-4


def test_an_optimizer_that_is_built_anew_remembers_nothing():
    server = servers.Rebuilt("adam", lr=1.0, beta1=0.0, beta2=0.0, tau=1.0)
    w, update = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
    moved, state, _ = server.apply(update, server.init(w), w, context())
    again, _, _ = server.apply(update, state, w, context(2))
    assert moved == again == {"w": torch.tensor([0.5])}
    assert state == {}


def test_only_weights_move_and_the_printed_sign_walks_away():
    w, update = (
        {"a.weight": torch.zeros(1), "a.bias": torch.zeros(1)},
        {"a.weight": torch.ones(1), "a.bias": torch.ones(1)},
    )
    assert servers.OnlyWeights().apply(update, {}, w, context())[0] == {
        "a.weight": torch.ones(1),
        "a.bias": torch.zeros(1),
    }
    away = servers.AwayFromAverage()
    assert float(away.apply(update, away.init(w), w, context())[0]["a.weight"]) == -1.0


def test_the_shared_split_gives_examples_to_several_clients():
    labels = torch.arange(200) % 4
    hands = splits.SharedDirichlet(0.5).assign(labels, 5, Key.of(0))
    given = torch.cat(hands)
    assert len(given.unique()) < len(given)


def test_the_estimate_that_is_counted_is_the_one_that_the_rule_makes():
    losses = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    ids = torch.tensor([1, 3, 4])
    _, _, info = weigh(AaggffD(), Cohort(ids, {}, {"loss_before": losses}), AaggffD().init(6), context(1, 6))
    responses = torch.zeros(6, dtype=torch.float64).index_copy(0, ids, info["responses"])
    assert torch.allclose(exact.doubly_robust(responses, ids), info["estimate"])

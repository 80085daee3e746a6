"""Who gains and who loses: paired by client and seed, in the metric's good direction, and only where clients match."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fedalloy.cli.console import _finite
from fedalloy.experiment.recipe import parse
from fedalloy.results.clients import clients_at
from fedalloy.results.gains import ClientGains, ClientScores, client_gains, lines, read_scores
from fedalloy.results.outcome import RunOutcome
from fedalloy.results.redrawn import Drawn
from fedalloy.results.summaries import gather
from fedalloy.studies.compare.comparing import compare

SAME = {"digest": "one"}


def scores(
    name: str, seed: int, values: Sequence[float], manifest: Mapping[str, Any] = SAME, ids: Sequence[int] | None = None,
    higher: bool | None = True, state: str = "finished",
) -> ClientScores:  # fmt: skip
    outcome = RunOutcome(name, seed, state, metric="accuracy", higher_is_better=higher)
    row = {"ids": list(ids or range(len(values)))}
    return ClientScores(outcome, manifest, tuple(clients_at(row, values, manifest)))


def one(runs: Sequence[ClientScores]) -> ClientGains:
    (found,) = client_gains(runs, "accuracy")
    return found


def gains(found: ClientGains) -> dict[str, float]:
    return {client.label: client.gain for client in found.clients}


def test_gains_are_means_over_seeds_and_the_largest_loss_comes_first():
    found = one([
        scores("a", 0, [0.5, 0.5, 0.5]), scores("a", 1, [0.5, 0.75, 0.5]),
        scores("b", 1, [1.0, 0.75, 0.25]), scores("b", 0, [0.75, 0.5, 0.0]),
    ])  # fmt: skip
    assert list(gains(found).items()) == [("client 2", -0.375), ("client 1", 0.0), ("client 0", 0.375)]
    assert (found.better, found.worse, found.seeds, found.redrawn, found.missing) == (1, 1, (0, 1), False, 0)
    assert (found.clients[0].score, found.clients[0].first) == (0.125, 0.5)
    assert lines([found]) == [
        "Clients against a, mean over 2 seeds (too few to tell from chance):",
        "  b: 1 of 3 clients better off, 1 worse off; loses most: client 2 (-0.375)",
    ]


def test_a_loss_gains_by_falling():
    runs = [scores("a", 0, [2.0, 1.0], higher=False), scores("b", 0, [1.0, 4.0], higher=False)]
    assert gains(one(runs)) == {"client 1": -3.0, "client 0": 1.0}
    assert one(runs).basis.endswith("one seed (a single draw)")


def test_a_metric_without_a_direction_has_neither():
    found = one([scores("a", 0, [1.0], higher=None), scores("b", 0, [2.0], higher=None)])
    assert found.clients == ()
    assert "no direction" in found.reason
    assert lines([found]) == []


def test_clients_with_names_are_found_again_in_another_order():
    runs = [
        scores("a", 0, [0.1, 0.9], {"names": ["anna", "ben"], "digest": "x"}),
        scores("b", 0, [0.2, 0.9], {"names": ["anna", "ben"], "digest": "x"}),
        scores("a", 1, [0.9, 0.1], {"names": ["ben", "anna"], "digest": "y"}),
        scores("b", 1, [0.9, 0.4], {"names": ["ben", "anna"], "digest": "y"}),
    ]
    assert gains(one(runs)) == {"ben": 0.0, "anna": pytest.approx(0.2)}
    assert not one(runs).redrawn


@pytest.mark.parametrize("common", [{}, {"names": ["n", "n"]}])
@pytest.mark.parametrize("digests", [({"digest": "x"}, {"digest": "y"}), ({}, {})])
def test_where_seeds_redraw_the_partition_clients_are_not_mixed_over_seeds(common, digests):
    runs = [scores(name, seed, values, {**common, **digests[seed]}) for name, seed, values in
            (("a", 0, [0.5, 0.5]), ("a", 1, [0.5, 0.5]), ("b", 0, [0.75, 0.25]), ("b", 1, [0.75, 1.0]))]  # fmt: skip
    found = one(runs)
    assert found.redrawn
    assert sorted(client.gain for client in found.clients) == [-0.25, 0.25, 0.25, 0.5]
    assert (found.shares(1), found.shares(-1)) == ([0.5, 1.0], [0.5, 0.0])
    assert found.clients[0].label.endswith("in seed 0")
    assert "75 % of clients better off (50 to 100 %), 25 % worse off (0 to 50 %)" in found.text
    assert found.decided is None


def test_one_seed_needs_no_digest():
    assert not one([scores("a", 0, [0.5], {}), scores("b", 0, [0.25], {})]).redrawn


def test_entries_with_other_clients_are_not_paired():
    found = one([scores("a", 0, [0.5], {"digest": "x"}), scores("b", 0, [0.6], {"digest": "y"})])
    assert found.clients == ()
    assert found.reason == "b and a do not have the same clients"


def test_runs_that_end_at_the_target_are_not_paired():
    runs = [scores("a", 0, [0.5]), scores("b", 0, [0.6])]
    ending = [replace(run, outcome=replace(run.outcome, ends_at_target=True)) for run in runs]
    assert (one(ending).clients, one(ending).text) == ((), "")
    assert "end when they reach the target" in one(ending).reason


@pytest.mark.parametrize("state", ["failed", "running", "stopped", "interrupted"])
def test_only_finished_runs_count(state):
    runs = [scores("a", 0, [0.5]), scores("a", 1, [0.5]), scores("b", 0, [0.6]), scores("b", 1, [0.0], state=state)]
    assert gains(one(runs)) == {"client 0": pytest.approx(0.1)}
    assert "has finished under both" in one([runs[0], runs[3]]).reason


def test_clients_without_a_score_are_counted_and_overflow_is_a_loss():
    first = scores("a", 0, [1.0, math.nan, 2.0, math.inf, math.inf], higher=False)
    found = one([first, scores("b", 0, [math.inf, 1.0, 1.0, 1.0, math.inf], higher=False)])
    assert gains(found) == {"client 0": -math.inf, "client 2": 1.0, "client 3": math.inf}
    assert (found.better, found.worse, found.missing) == (2, 1, 2)
    assert "loses most: client 0 (not finite)" in found.text
    json.dumps(_finite(found.to_json()), allow_nan=False)


def test_infinities_of_both_signs_are_no_gain():
    runs = [scores("a", 0, [1.0], higher=False), scores("b", 0, [math.inf], higher=False),
            scores("a", 1, [math.inf], higher=False), scores("b", 1, [1.0], higher=False)]  # fmt: skip
    assert one(runs).clients == ()
    assert one(runs).missing == 1


def test_rounding_is_no_gain():
    runs = [scores("a", seed, [value]) for seed, value in enumerate([0.5, 0.2])]
    runs += [scores("b", seed, [value]) for seed, value in enumerate([0.6, 0.1])]
    assert gains(one(runs)) == {"client 0": 0.0}


def test_clients_scored_in_some_seeds_only_count_there():
    runs = [scores("a", 0, [0.5, 0.5], ids=[0, 1]), scores("b", 0, [0.6, 0.7], ids=[0, 1]),
            scores("a", 1, [0.5, 0.5], ids=[1, 2]), scores("b", 1, [0.9, 0.4], ids=[1, 2])]  # fmt: skip
    found = one(runs)
    assert gains(found) == pytest.approx({"client 2": -0.1, "client 0": 0.1, "client 1": 0.3})
    assert [len(client.differences) for client in found.clients] == [1, 1, 2]


def spread(seeds: int, clients: int) -> ClientGains:
    """The first client gains in every seed, the last loses in every seed, the others gain and lose in turn."""
    turns = [[0.25 if (seed + client) % 2 else -0.25 for client in range(clients)] for seed in range(seeds)]
    runs = [scores("a", seed, [0.5] * clients) for seed in range(seeds)]
    for seed, turn in enumerate(turns):
        turn[0], turn[-1] = 0.25, -0.25
        runs.append(scores("b", seed, [0.5 + value for value in turn]))
    return one(runs)


def test_single_clients_are_told_from_chance_only_with_enough_seeds():
    assert spread(9, 20).decided is None  # 2 / 2**9 is more than 0.05 / 20
    assert spread(9, 20).seeds_needed == 10
    assert spread(10, 20).decided == (1, 1)
    assert spread(3, 4).decided is None, "equal differences in three seeds decide nothing"
    assert spread(20, 4).decided == (1, 1)


def test_seeds_that_split_the_same_examples_judge_no_single_client():
    drawn = [Drawn(seed, "one", "same", f"rows {seed}", 0.25, ("the initial model",)) for seed in range(10)]
    runs = [scores(name, seed, [value] * 2) for seed in range(10) for name, value in (("a", 0.5), ("b", 0.75))]
    assert one(runs).decided == (2, 0)
    split = [replace(run, outcome=replace(run.outcome, drawn=drawn[run.outcome.seed])) for run in runs]
    assert one(split).resplit
    assert one(split).decided is None


def test_gains_of_real_runs_agree_between_readers(tmp_path):
    recipe = parse({
        "task": {"model": "logistic"}, "partition": {"kind": "dirichlet", "alpha": 0.3, "clients": 5},
        "algorithm": {"lr": 0.5, "batch_size": 128}, "run": {"rounds": 1, "seeds": [0, 1]},
        "compare": [{"name": "fedavg"}, {"name": "slow", "set": {"algorithm.lr": 0.01}},
                    {"name": "other", "set": {"partition.alpha": 9.0}}],
    })  # fmt: skip
    done = compare(recipe, tmp_path, processes=1)
    slow, other = done.gains
    assert slow.redrawn, "a Dirichlet partition is drawn by the seed"
    assert len(slow.clients) == 10
    assert other.reason == "other and fedavg do not have the same clients"
    assert client_gains(gather([tmp_path]), "accuracy") == [slow, other]
    told = done.to_json()["clients"]
    assert [len(one["clients"]) for one in told] == [10, 0]
    last = [json.loads((tmp_path / name / "seed-1" / "clients.jsonl").read_text().splitlines()[-1])["accuracy"]
            for name in ("fedavg", "slow")]  # fmt: skip
    wanted = sorted(mine - before for before, mine in zip(*last, strict=True))
    assert [one.gain for one in slow.clients if one.seed == 1] == pytest.approx(wanted)


def test_a_run_without_a_folder_has_no_clients():
    lost = RunOutcome("b", 0, "failed", "its grid failed")
    assert read_scores(lost).clients == ()
    assert client_gains([scores("a", 0, [0.5]), read_scores(lost)], "accuracy")[0].clients == ()
    assert client_gains([replace(scores("a", 0, [0.5]))], "accuracy") == []
    assert client_gains([], "accuracy") == []

"""Targets of any shape: kinds of task, engines that agree, what does not count, and what is refused in words."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedalloy import fit
from fedalloy.core.errors import DataError, FedalloyError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.objective import StepGradient
from fedalloy.core.program import BlockTraining
from fedalloy.engines import batched
from fedalloy.methods.generative import fedevg
from fedalloy.methods.published import fedavg, fedfa
from fedalloy.report.page import write_page
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.base import Dataset, from_clients
from fedalloy.tasks.evaluation import evaluate_clients, evaluate_pool
from fedalloy.tasks.federation import FederatedTask
from fedalloy.tasks.losses.classes import CrossEntropy
from fedalloy.tasks.objective import ModuleObjective

N, T, WORDS = 45, 5, 7


class Words(nn.Module):
    """One logit vector per token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.output = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.tanh(self.embed(x)))


def tokens(seed: int = 0) -> Dataset:
    """Sequences with padding; in a third of them nothing counts, so that some batches are no steps."""
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(WORDS, (N, T), generator=draw) for _ in range(2))
    y[torch.arange(T) >= torch.randint(1, T + 1, (N, 1), generator=draw)] = -100
    y[::3] = y[15:24] = -100
    return Dataset(x, y, WORDS)


def task_of(kind: str, **more: Any) -> FederatedTask:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(N, 6, generator=draw)
    marks = (torch.rand(N, 4, generator=draw) > 0.5).float()
    images, maps = torch.randn(N, 1, 4, 4, generator=draw), torch.randint(3, (N, 4, 4), generator=draw)
    given: dict[str, Any] = {
        "tokens": {"dataset": tokens(), "model": Words},
        "multilabel": {"dataset": Dataset(x, marks, 0), "loss": "binary"},
        "regression": {"dataset": Dataset(x, torch.randn(N, 2, 3, generator=draw), 0), "model": "logistic"},
        "segmentation": {"dataset": Dataset(images, maps, 3), "model": lambda: nn.Conv2d(1, 3, 3, padding=1)},
    }
    return make_task(clients=3, dtype="float64", **{**given[kind], **more})


KINDS = ("tokens", "multilabel", "regression", "segmentation")


@pytest.mark.parametrize("kind", KINDS)
def test_engines_agree(kind):
    task = task_of(kind)
    assert task.kind == kind
    ends = {}
    for engine in ("loop", "batched"):
        done = fit(fedavg(lr=0.3, momentum=0.9, weight_decay=0.1, batch_size=4), task, rounds=2, engine=engine)
        ends[engine] = done.model
        assert not any("nan" in str(row["evaluation"]) for row in done.rounds())
    for name, leaf in ends["loop"].items():
        assert torch.allclose(leaf, ends["batched"][name], rtol=0, atol=1e-12)


def test_workers_agree_where_batches_are_no_steps():
    task = task_of("tokens")
    settings: dict[str, Any] = {"rounds": 2, "engine_options": {"processes": 1}}
    one = fit(fedavg(lr=0.3, momentum=0.9, batch_size=4), task, engine="workers", **settings).model
    other = fit(fedavg(lr=0.3, momentum=0.9, batch_size=4), task, engine="loop", rounds=2).model
    assert all(torch.allclose(leaf, other[name], rtol=0, atol=1e-12) for name, leaf in one.items())


@pytest.mark.parametrize("engine", ["loop", "batched", "workers"])
def test_a_batch_in_which_nothing_counts_is_no_step(engine):
    empty = tokens()
    task = make_task(replace(empty, y=torch.full_like(empty.y, -100)), Words, clients=2)
    before = task.objective.init(Key.of(0).fold("model"))[0]
    options: dict[str, Any] = {"engine_options": {"processes": 1}} if engine == "workers" else {}
    algorithm = fedavg(lr=0.3, momentum=0.9, weight_decay=0.5)
    after = fit(algorithm, task, rounds=1, seed=0, engine=engine, **options).model
    assert all(torch.equal(leaf, before[name]) for name, leaf in after.items())


@pytest.mark.parametrize("engine", ["loop", "batched", "workers"])
def test_a_kernel_that_takes_such_steps_is_caught(engine, monkeypatch):
    monkeypatch.setattr(StepGradient, "counted", lambda self: torch.tensor(True))
    monkeypatch.setattr(BlockTraining, "counted", property(lambda self: self.block.seen))
    with pytest.raises(AssertionError):
        test_a_batch_in_which_nothing_counts_is_no_step(engine)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_such_a_batch_neither_ends_an_accumulated_step_nor_moves_a_schedule(engine):
    """Of the batches of one example the second, the fourth and the last do not count: three are left, two steps."""
    whole = tokens()
    chosen = torch.tensor([1, 0, 2, 3, 4, 6])
    data = Dataset(whole.x[chosen], whole.y[chosen], WORDS, torch.zeros(6, dtype=torch.int64))
    assert (data.y != -100).any(1).tolist() == [True, False, True, False, True, False]
    task = make_task(data, Words, dtype="float64", test_fraction=0.0)
    settings: dict[str, Any] = {"accumulate": 2, "schedule": {"kind": "linear", "over": "steps"}, "momentum": 0.9}
    algorithm = fedavg(lr=0.5, batch_size=1, shuffle=False, **settings)
    done = fit(algorithm, task, rounds=1, engine=engine).model
    model = Words().double()
    model.load_state_dict(task.objective.init(Key.of(0).fold("model"))[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for factor, rows in ((1.0, (0, 2)), (0.5, (4,))):
        for row in rows:
            loss = functional.cross_entropy(model(data.x[row]), data.y[row]) / len(rows)
            loss.backward()
        optimizer.param_groups[0]["lr"] = 0.5 * factor
        optimizer.step()
        optimizer.zero_grad()
    for name, leaf in model.named_parameters():
        assert torch.allclose(done[name], leaf.detach(), rtol=0, atol=1e-12)


def test_the_loss_is_the_mean_over_counted_tokens():
    task = task_of("tokens")
    params, buffers = task.objective.init(Key.of(3))
    pool = task.global_test
    assert pool is not None
    found = evaluate_pool(task.objective, params, buffers, pool, ("loss", "accuracy"))
    logits = task.objective.outputs(params, buffers, pool.x)
    wanted = functional.cross_entropy(logits.flatten(0, 1), pool.y.flatten())
    counted = pool.y != -100
    assert found["loss"] == pytest.approx(float(wanted), abs=1e-12)
    assert found["accuracy"] == pytest.approx(float((logits.argmax(-1) == pool.y)[counted].double().mean()), abs=1e-12)
    loss, _ = task.objective.loss(params, buffers, pool.x, pool.y, None, None)
    assert float(loss) == pytest.approx(float(wanted), abs=1e-12)
    padded = torch.arange(len(pool)) < 4
    masked, _ = task.objective.loss(params, buffers, pool.x, pool.y, padded, None)
    few = functional.cross_entropy(logits[:4].flatten(0, 1), pool.y[:4].flatten())
    assert float(masked) == pytest.approx(float(few), abs=1e-12)


def test_a_client_in_which_nothing_counts_has_no_score():
    task = task_of("tokens")
    block = task.data("test", torch.arange(3))
    silent = replace(block, y=torch.full_like(block.y, -100))
    found = evaluate_clients(task.objective, *task.objective.init(Key.of(0)), silent, ("loss", "accuracy"))
    assert all(scores.isnan().all() for scores in found.values())


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_num_examples_counts_tokens_if_the_task_says_so(engine):
    plain, by_tokens = task_of("tokens"), task_of("tokens", unit="targets")
    counts = [int((plain.train.block(torch.tensor([k])).client(0).y != -100).sum()) for k in range(3)]
    rows = [next(iter(fit(fedavg(), task, rounds=1, engine=engine).rounds())) for task in (plain, by_tokens)]
    assert rows[0]["num_steps"] == rows[1]["num_steps"]
    weights = torch.tensor(rows[1]["weights"])
    assert torch.allclose(weights, torch.tensor(counts) / sum(counts), atol=1e-6)
    assert not torch.allclose(torch.tensor(rows[0]["weights"]), weights, atol=1e-3)


def test_a_run_on_tokens_is_resumed_exactly(tmp_path):
    task, algorithm = task_of("tokens"), fedavg(lr=0.3, batch_size=4)
    whole = fit(algorithm, task, rounds=4).model
    fit(algorithm, task, rounds=2, folder=tmp_path / "run")
    again = fit(algorithm, task_of("tokens"), rounds=4, folder=tmp_path / "run", resume=True).model
    assert all(torch.equal(leaf, again[name]) for name, leaf in whole.items())
    with pytest.raises(FedalloyError, match=r"task\.train\.y|loss"):
        fit(algorithm, make_task(tokens(seed=2), Words, clients=3, dtype="float64"), rounds=5,
            folder=tmp_path / "run", resume=True)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_runs_without_one_class_per_example_have_a_report_and_a_description(kind, tmp_path):
    """The report divided by the number of classes of an example, and a description counted none of every class."""
    task = task_of(kind)
    fit(fedavg(), task, rounds=1, folder=tmp_path / "run")
    assert write_page([tmp_path / "run"], tmp_path / "report.html") == 1
    assert "Examples by client and class" not in (tmp_path / "report.html").read_text()
    said = str(task.describe())
    assert "examples per class" not in said
    assert ("classes" in said) == (kind in ("tokens", "segmentation"))


def test_the_kind_is_shown_and_decides_the_metrics():
    task = task_of("regression")
    assert "accuracy" not in task.metrics
    assert any("kind of task: regression" in said for said in task.notices)
    assert make_task("digits", clients=2).notices == ()
    with pytest.raises(SpecError, match="metric 'accuracy' is for tasks of the kind"):
        fit(fedavg(), task, rounds=1, metrics=("accuracy",), target_metric="accuracy")


@pytest.mark.parametrize(
    ("y", "both"),
    [
        (torch.ones(9, 4), "'multilabel' or 'regression'"),
        (torch.ones(9, 4, dtype=torch.int64), "'multilabel' or 'tokens'"),
        (torch.ones(9, 4, 4), "'segmentation' or 'regression'"),
    ],
)
def test_an_open_kind_is_refused(y, both):
    with pytest.raises(SpecError, match=f"could be {both}: give the kind"):
        make_task(Dataset(torch.randn(9, 3), y, 0), clients=2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda y: y.float().masked_fill(y == 3, torch.nan), "NaN or infinity as their target"),
        (lambda y: y.masked_fill(y == 3, -1), r"not a class number in 0\.\.6 or -100"),
        (lambda y: y.masked_fill(y == 3, 99), r"not a class number in 0\.\.6"),
    ],
)
def test_bad_targets_are_refused_with_their_client(change, said):
    data = tokens()
    with pytest.raises(DataError, match=said):
        Dataset(data.x, change(data.y), 7 if not change(data.y).is_floating_point() else 0)


def test_marks_outside_of_0_and_1_are_refused():
    task = make_task(Dataset(torch.randn(9, 3), torch.full((9, 4), 1.5), 0), clients=2, loss="binary")
    with pytest.raises(DataError, match=r"a target outside of 0\.\.1"):
        fit(fedavg(), task, rounds=1)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([(torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.int64))], r"y\.reshape\(-1\)"),
        ([(torch.zeros(3, 2), torch.zeros(3, 4)), (torch.zeros(3, 2), torch.zeros(3, 5))], "pad them to one length"),
        ([(torch.zeros(3, 2), torch.zeros(2, 4))], "one row per example"),
        ([(torch.zeros(3, 2), [["a", "b"]] * 3)], "labels must be numbers"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(pairs, said):
    with pytest.raises(DataError, match=said):
        from_clients(pairs)


def test_another_void_class_is_ignored_and_not_counted_as_a_class():
    y = torch.randint(3, (8, 4, 4))
    y[:, 0] = 255
    data = from_clients([(torch.zeros(8, 1, 4, 4), y)], ignore_index=255)
    assert data.classes == 3
    task = make_task(data, lambda: nn.Conv2d(1, 3, 1), test_fraction=0.0)
    counts = task.objective.counts(y)
    assert counts is not None
    assert counts.tolist() == [12] * 8
    assert fit(fedavg(), task, rounds=1).model


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [(None, 0), ("focal", 0), ({"kind": "cross_entropy", "label_smoothing": 0.1}, 0),
     ({"kind": "cross_entropy", "ignore_index": 2}, 2), (CrossEntropy(), -100)],
)  # fmt: skip
def test_what_the_data_ignore_holds_for_a_loss_that_does_not_say_it_itself(loss, ignored):
    data = Dataset(torch.zeros(8, 1, 4, 4), torch.randint(3, (8, 4, 4)), 3, ignore_index=0)
    rule: Any = make_task(data, lambda: nn.Conv2d(1, 3, 1), loss=loss, clients=2).objective.loss_rule
    assert rule.ignored == ignored


def test_a_class_of_whole_examples_is_not_ignored():
    """The examples of such a class would have no loss, but would count: the mean would be too small."""
    data = Dataset(torch.randn(12, 3), torch.arange(12) % 3, 3)
    with pytest.raises(SpecError, match="leave the examples of this class out of the data"):
        make_task(data, loss={"kind": "cross_entropy", "ignore_index": 1}, clients=2)
    make_task(replace(data, ignore_index=255), clients=2)


def test_methods_that_assume_labels_say_so():
    with pytest.raises(SpecError, match=r"needs one class per example, but this task is of the kind 'regression'"):
        fit(fedevg(), task_of("regression"), rounds=1)
    with pytest.raises(SpecError, match="which a regression does not have"):
        fit(fedfa(), task_of("regression"), rounds=1)
    with pytest.raises(DataError, match="deals by class"):
        task_of("tokens", partition={"kind": "dirichlet", "alpha": 0.5})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["classes", "dirichlet", "shards", "mixed", "skewed"])
def test_partitions_by_label_refuse_what_has_no_order(kind, rule):
    """``shards`` sorted every row of marks by itself: an example became as many as it had marks."""
    parts = {"label": {"kind": "dirichlet", "alpha": 1.0}, "quantity": "power_law"}
    given: dict[str, dict[str, Any]] = {
        "classes": {"per_client": 2}, "dirichlet": {"alpha": 1.0}, "shards": {}, "skewed": parts,
        "mixed": {"iid": 1, "non_iid": 2},
    }  # fmt: skip
    with pytest.raises(DataError, match=r"deals by class|sorts examples by label"):
        task_of(kind, partition={"kind": rule, **given[rule]})


def test_shards_of_a_quantity_are_neighbours():
    y = torch.randn(40, generator=torch.Generator().manual_seed(0))
    task = make_task(Dataset(y.unsqueeze(1), y, 0), clients=4, partition={"kind": "shards", "per_client": 1},
                     test_fraction=0.0)  # fmt: skip
    own = [task.train.block(torch.tensor([client])).client(0).y for client in range(4)]
    ends = sorted((float(some.min()), float(some.max())) for some in own)
    assert all(one[1] < other[0] for one, other in pairwise(ends))


def test_fused_kernels_are_not_used_for_several_targets():
    """Planted: with the guard removed, the fused kernel reads a matrix of marks in the wrong order."""
    task = make_task(Dataset(torch.randn(12, 6), (torch.rand(12, 4) > 0.5).float(), 0), nn_linear, clients=2,
                     loss="binary")  # fmt: skip
    assert isinstance(task.objective, ModuleObjective)
    assert task.objective.loss_name == "binary"
    assert not batched.one_target(task.data("train", torch.arange(2)))


def nn_linear() -> nn.Module:
    return nn.Linear(6, 4)

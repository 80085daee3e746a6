"""Models with several inputs: examples are trees of tensors, in every engine and everywhere examples are taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedalloy import algorithms
from fedalloy import task as make_task
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.cross import cross_scores
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.types import Block, Examples
from fedalloy.engines.batched import Batched
from fedalloy.engines.loop import Loop
from fedalloy.engines.workers import Workers
from fedalloy.experiment.fit import fit
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.solvers.superfed import SuPerFed
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.dropout import Dropout
from fedalloy.tasks.evaluation import evaluate_clients, evaluate_models
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.testing import SmallTask, work
from fedalloy.testing.comparing import differences
from fedalloy.testing.toys import Lopsided
from tests.engines.rounds import gaps, play, shared_of

CLASSES, SIZES = 3, (7, 4, 9, 5)


class TwoInputs(nn.Module):
    """Numbers and a picture, given as a dict of its own."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.row, self.picture = nn.Linear(4, 5), nn.Conv2d(1, 2, 2)
        self.norm = nn.BatchNorm1d(13) if norm else nn.Identity()
        self.drop, self.head = Dropout(0.2), nn.Linear(13, CLASSES)

    def forward(self, row: Tensor, seen: dict[str, Tensor]) -> Tensor:
        both = torch.cat([self.row(row), self.picture(seen["picture"]).flatten(1)], dim=1)
        out: Tensor = self.head(self.drop(torch.tanh(self.norm(both))))
        return out


def examples(rows: int, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Any], Tensor]:
    key = Key.of(8)
    picture = key.fold("picture").normal(rows, 1, 3, 3, dtype=dtype)
    y = (key.fold("y").uniform(rows, dtype=torch.float64) * CLASSES).long()
    return {"row": key.fold("row").normal(rows, 4, dtype=dtype) + y.unsqueeze(1), "seen": {"picture": picture}}, y


def several(norm: bool = False) -> SmallTask:
    size = torch.tensor(SIZES)
    objective = ModuleObjective(lambda: TwoInputs(norm), dtype=torch.float64)
    return SmallTask(objective, Block(*examples(int(size.sum())), size.cumsum(0) - size, size))


METHODS = {
    "fedavg": algorithms.fedavg(lr=0.3, batch_size=3, epochs=2),
    "scaffold": algorithms.scaffold(lr=0.3, batch_size=3),
    "every statistic": Algorithm(Sgd(lr=0.3, batch_size=3), Lopsided(), ServerSgd()),
    "two models": Algorithm(SuPerFed(start=0, lr=0.1, batch_size=3), Lopsided(), ServerSgd()),
}


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("name", METHODS)
def test_all_engines_agree(name, norm):
    task, now = several(norm), work(0, 1, 2, 3, epochs=(-1, 2, 1, 0), active=(True, True, False, True))
    algorithm = METHODS[name].bind(task)
    expected, workers = play(Loop(), algorithm, task, now), Workers(2)
    try:
        engines = [Batched(), Batched(block=2), workers]
        assert [gaps(play(engine, algorithm, task, now), expected) for engine in engines] == [[], [], []]
        assert not any(engine._unbatchable for engine in engines if isinstance(engine, Batched))
    finally:
        workers.close()


def test_a_chain_whose_input_has_a_name_is_not_fused():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(4, CLASSES)

        def forward(self, row: Tensor) -> Tensor:
            out: Tensor = self.only(row)
            return out

    block = several().block
    alone = replace(block, x={"row": block.x["row"]})
    task = SmallTask(ModuleObjective(Named, dtype=torch.float64), alone)
    plain = SmallTask(task.objective, replace(block, x=block.x["row"]))
    engine = Batched()
    for name in ("fedavg", "two models"):
        assert gaps(play(engine, METHODS[name], task), play(Loop(), METHODS[name], plain)) == []
    assert engine._unbatchable == ""


def test_a_tree_gives_what_one_tensor_gives():
    """The model cut out of one wide tensor: the same numbers by another way."""

    class OneInput(TwoInputs):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x[:, :4], {"picture": x[:, 4:].reshape(-1, 1, 3, 3)})

    task = several()
    x = torch.cat([task.block.x["row"], task.block.x["seen"]["picture"].flatten(1)], dim=1)
    flat = SmallTask(ModuleObjective(OneInput, dtype=torch.float64), replace(task.block, x=x))
    for engine in (Loop(), Batched()):
        found, expected = (play(engine, METHODS["every statistic"], one) for one in (task, flat))
        assert gaps(found, expected) == []


def test_models_are_scored_and_crossed():
    task = several()
    params, buffers = task.objective.init(Key.of(1))
    block = task.data("test", torch.arange(4))
    together = evaluate_clients(task.objective, params, buffers, block, ("accuracy", "loss"), chunk=6)
    one_by_one = evaluate_models(task.objective, [(params, buffers)] * 4, block, ("accuracy", "loss"))
    assert list(differences(together, one_by_one, 1e-12)) == []
    outcome = play(Loop(), METHODS["fedavg"], task)
    cross = cross_scores(task.objective, shared_of(METHODS["fedavg"], task), outcome.cohort, block)
    assert cross.shape == (4, 4)
    assert bool(cross.isfinite().all())


DATA = Dataset(*examples(60, torch.float32), classes=CLASSES)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_run_learns_and_resumes(tmp_path, engine):
    task = make_task(DATA, TwoInputs, clients=4, test_fraction=0.25, valid_fraction=0.1, standardise="client")
    method = algorithms.fedavg(lr=0.3, batch_size=5, epochs=2)
    settings: dict[str, Any] = {"engine": engine, "checkpoint_every": 0.0, "seed": 3}
    whole = fit(method, task, rounds=4, folder=tmp_path / "whole", **settings)
    fit(method, task, rounds=2, folder=tmp_path / "cut", **settings)
    longer = fit(method, task, rounds=4, folder=tmp_path / "cut", resume=True, **settings)
    assert list(differences(longer.ending.state, whole.ending.state, 0.0)) == []
    other = replace(DATA, x={**DATA.x, "row": DATA.x["row"] + 1e-3})
    changed = make_task(other, TwoInputs, clients=4, test_fraction=0.25, valid_fraction=0.1, standardise="none")
    with pytest.raises(Exception, match=r"task\.train\.x\.row"):
        fit(method, changed, rounds=5, folder=tmp_path / "cut", resume=True, **settings)


def test_what_cannot_be_is_refused():
    with pytest.raises(SpecError, match="row, seen by name need a model"):
        make_task(DATA, "mlp", clients=2)
    bad = {**DATA.x, "seen": {"picture": DATA.x["seen"]["picture"].clone()}}
    bad["seen"]["picture"][5, 0, 0, 0] = torch.nan
    with pytest.raises(DataError, match="1 of 60 examples have NaN or infinity in their features"):
        Dataset(bad, DATA.y, CLASSES)
    with pytest.raises(DataError, match="60 labels but 59 rows of 'x'"):
        Dataset({**DATA.x, "row": DATA.x["row"][:59]}, DATA.y, CLASSES)


def test_one_client_of_a_block_is_a_view():
    block = several().block
    own = block.client(2)
    assert isinstance(own, Examples)
    assert len(own) == 9
    assert own.x["seen"]["picture"].data_ptr() == block.x["seen"]["picture"][11:].data_ptr()


@pytest.mark.parametrize("x", [{}, (), [torch.zeros(4, 2)], {"a": torch.zeros(4, 2).numpy()}])
def test_what_is_no_tensor_is_refused_in_words(x):
    with pytest.raises(DataError, match="examples must be a tensor, or a dict or tuple of tensors, got a"):
        Dataset(x, torch.zeros(4, dtype=torch.int64), classes=2)


def test_energies_of_several_inputs_are_refused_before_the_first_round():
    x, y = examples(40, torch.float32)
    task = make_task(Dataset(x, y, classes=3), model=TwoInputs, clients=2)
    with pytest.raises(SpecError, match="needs examples that are one tensor"):
        fit(algorithms.named("fedevg"), task, rounds=1)

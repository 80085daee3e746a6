"""A solver around another one hides nothing of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedalloy import algorithms
from fedalloy.core import aspects
from fedalloy.core.protocols import LocalSolver
from fedalloy.core.wrappers import SolverWrapper, WrapperBase
from fedalloy.experiment.fit import fit
from fedalloy.testing import small_task
from fedalloy.testing.comparing import differences


def test_everything_passes_but_promises_about_the_program():
    """What solvers are besides is in tests/core/test_aspects.py."""
    offered = {name for name in vars(LocalSolver) if not name.startswith("_")}
    passed = {name for name in vars(WrapperBase) if not name.startswith("_")}
    assert offered - passed == set()
    plain = algorithms.named("fedavg").solver
    assert aspects.fusing(plain) is not None
    assert aspects.fusing(SolverWrapper(plain)) is None


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "superfed_lm", "fedper", "ditto", "fednova"])
def test_a_wrapped_solver_trains_the_same(name):
    plain = algorithms.named(name, lr=0.3, batch_size=4)
    around = replace(plain, solver=SolverWrapper(plain.solver))
    one, other = (
        fit(algorithm, small_task(), rounds=3, cohort=3, engine="loop", metrics=("loss",))
        for algorithm in (plain, around)
    )
    assert list(differences(one.model, other.model)) == []
    assert [row["evaluation"] for row in one.rounds()] == [row["evaluation"] for row in other.rounds()]

"""A run recomputed from its records is the run; with other records it is another one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fedalloy.core.errors import SpecError
from fedalloy.experiment.recipe import Experiment, parse, resolve
from fedalloy.testing.replay import replay


def made(algorithm: str) -> Experiment:
    tables: dict[str, Any] = {
        "task": {"dataset": "digits", "model": "logistic"},
        "partition": {"kind": "iid", "clients": 4},
        "algorithm": {"name": algorithm, "batch_size": 200},
        "devices": {"success": 0.6},
        "run": {"rounds": 3, "seeds": [3]},
        "evaluate": {"every": 100, "clients": 1},
        "engine": {"kind": "loop"},
    }
    return resolve(parse(tables))


def params(experiment: Experiment, rows: list[dict[str, Any]]) -> torch.Tensor:
    return torch.cat([leaf.flatten() for leaf in replay(experiment, rows).state["shared"]["params"].values()])


@pytest.mark.parametrize("algorithm", ["scaffold", "aaggff_s"])
def test_a_replay_is_the_run_and_notices_a_changed_record(algorithm):
    experiment = made(algorithm)
    ending, recorder = experiment.run()
    rows = [dict(row) for row in recorder.streams["rounds"]]  # type: ignore[attr-defined]
    assert {len(row["ids"]) for row in rows} != {4}, "somebody was away"
    wanted = torch.cat([leaf.flatten() for leaf in ending.state["shared"]["params"].values()])
    torch.testing.assert_close(params(experiment, rows), wanted, rtol=0, atol=0)
    changed = copy.deepcopy(rows)
    changed[1]["ids"] = changed[1]["ids"][1:]
    assert float((params(experiment, changed) - wanted).abs().max()) > 1e-6
    with pytest.raises(SpecError, match="no round 3"):
        replay(experiment, rows[:2])

"""Recompute a run from its records: a simulation in which the clients fail that failed in the records.

A federation is checked with this after everything that went wrong in it: its model must be the one that the recorded
rounds make.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.engine import Engine, Outcome
from fedalloy.core.errors import SpecError
from fedalloy.core.protocols import Shared, Task
from fedalloy.core.types import Context, State, Work
from fedalloy.engines.loop import Loop
from fedalloy.experiment.driver import Ending
from fedalloy.experiment.recipe import Experiment


@dataclass(frozen=True)
class RecordedClients(Engine):
    """``loop`` over the clients that count in the ``rows`` of ``rounds.jsonl``, by round; all others fail."""

    rows: Mapping[int, Mapping[str, Any]]

    def __call__(
        self, algorithm: Algorithm, task: Task, shared: Shared, states: Mapping[int, State], work: Work, ctx: Context
    ) -> Outcome:
        if ctx.round not in self.rows:
            raise SpecError(f"the records have no round {ctx.round}; they have {len(self.rows)} rounds")
        row = self.rows[ctx.round]
        counted = torch.isin(work.ids, torch.tensor(row["ids"], dtype=work.ids.dtype))
        some = Work.of(work.ids[counted], work.epochs[counted], work.active[counted])
        outcome = Loop()(algorithm, task, shared, states, some, ctx)
        missing = work.ids[~counted].tolist()
        failures = {client: row["dropped"].get(str(client), "it is not in the records") for client in missing}
        return replace(outcome, failures={**failures, **outcome.failures})


def replay(experiment: Experiment, rows: Sequence[Mapping[str, Any]], folder: Path | None = None) -> Ending:
    """The end of a run in which exactly the recorded clients contributed; the experiment has the clients' data. With a
    ``folder``, the clients' states are there."""
    engine = RecordedClients({int(row["round"]): row for row in rows})
    config = replace(experiment.config, engine=engine, engine_options={})
    return replace(experiment, config=config).run(folder)[0]

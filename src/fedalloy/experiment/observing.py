"""What is measured after a round: scores, mixtures of models, samples; and the engine's notes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.algorithm import ServerState
from fedalloy.experiment.evaluate import Evaluation, evaluate, rows
from fedalloy.experiment.lengthening import Due
from fedalloy.experiment.mixing import evaluate_mixes
from fedalloy.experiment.recorder import Recorder, Row
from fedalloy.experiment.round import Federation
from fedalloy.experiment.trained import Trained
from fedalloy.methods.classifier import synthetic_set


@dataclass(frozen=True)
class Seen:
    """The entries of a round's row besides training, and rows for ``clients.jsonl``; mixtures are kept apart."""

    evaluation: Evaluation | None = None
    brief: Row = field(default_factory=dict)
    full: tuple[Row, ...] = ()
    mixed: Row = field(default_factory=dict)
    mixtures: tuple[Row, ...] = ()
    notes: Row = field(default_factory=dict)

    @property
    def row(self) -> Row:
        """For the row of the round."""
        return {**self.brief, **self.mixed, **self.notes}

    @property
    def clients(self) -> tuple[Row, ...]:
        """For ``clients.jsonl``; the reported model comes last."""
        return (*self.mixtures, *self.full)

    def limited(self, due: Due, notes: Row) -> Seen:
        """The part that ``due`` asks for; ``notes`` are those of training alone."""
        if not due.evaluate:
            return Seen(notes=notes)
        return self if due.mix else replace(self, mixed={}, mixtures=())


def observe(trained: Trained, due: Due, notes: Row) -> Seen:
    """Score the models as far as it is due; ``notes`` are the engine's earlier notes."""
    config, seen = trained.fed.config, Seen()
    if due.evaluate:
        ids = _scored(trained.fed)
        evaluation = evaluate(trained, config.metrics, ids)
        brief, full = rows(evaluation, ids, config.evaluate_part)
        mixed, mixtures = evaluate_mixes(trained, config.metrics, ids) if due.mix else ({}, [])
        seen = Seen(evaluation, brief, tuple(full), mixed, tuple(mixtures))
    told = _together(notes, trained.fed.engine.notes())
    return replace(seen, notes=told) if told else seen


def keep_snapshot(fed: Federation, state: ServerState, recorder: Recorder, round: int) -> None:
    """Keep the samples of a generative method; from the same draws every time, so that rounds can be compared."""
    made = synthetic_set(fed.task, fed.algorithm, state, fed.root.fold("snapshot"), fed.config.classifier.per_class)
    if made is not None:
        recorder.snapshot(round, *made)


def _scored(fed: Federation) -> Tensor:
    """The clients that are scored: all, or some drawn once for the whole run."""
    population, wanted = fed.task.population, fed.config.evaluate_clients
    if wanted is None or wanted >= population:
        return torch.arange(population)
    return fed.root.fold("evaluate").choice(population, wanted)


def _together(first: Mapping[str, Any], second: Mapping[str, Any]) -> Row:
    """Two nested mappings as one."""
    both = {**first, **second}
    return {
        name: _together(first[name], second[name])
        if isinstance(first.get(name), Mapping) and isinstance(second.get(name), Mapping)
        else value
        for name, value in both.items()
    }

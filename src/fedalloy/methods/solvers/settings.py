"""The settings of local training that every published method takes by name, for editors and type checkers.

A method that has an argument of the same name (``eps`` of AMSGrad, ``schedule`` of FedEvg) takes them untyped.

Each is a field of :class:`fedalloy.methods.solvers.training.LocalTraining`, where it is explained and, at the call,
checked.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from fedalloy.methods.solvers.training import Leftover


class LocalSettings(TypedDict, total=False):
    """What a method passes on to its solver."""

    lr: float
    epochs: int
    batch_size: int | None
    shuffle: bool
    momentum: float
    nesterov: bool
    weight_decay: float
    dampening: float
    optimizer: Literal["sgd", "adam", "adamw", "rmsprop", "adagrad"]
    betas: tuple[float, float]
    eps: float
    amsgrad: bool
    smoothing: float
    centered: bool
    lr_decay: float
    accumulator: float
    schedule: Any  # a Schedule, or its table
    clip_norm: float | None
    clip_value: float | None
    accumulate: int
    precision: Literal["full", "bf16", "fp16"]
    loss_scale: float
    decay: float
    decay_every: int
    milestones: tuple[float, ...]
    leftover: Leftover

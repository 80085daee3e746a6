"""Losses: those by name, one file per family, and a user's own function or loss of ``torch.nn``."""

from fedalloy.tasks.losses.loss import Loss, PerExample, choose

__all__ = ["Loss", "PerExample", "choose"]

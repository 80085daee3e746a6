"""The replay of the golden vectors carries theta by itself, as the file's own descent does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fedalloy.core import registry
from fedalloy.testing.vectors.files import Values, read

FILE = Path(__file__).resolve().parents[2] / "vectors" / "deep_unfolding.json"


def test_theta_is_carried_from_round_to_round():
    group = registry.find("conform", "deep_unfolding")
    for recorded in read(FILE).records:
        blind = tuple(Values({}, inputs.where) for inputs in recorded.case.rounds)
        for fields, expected in zip(group(replace(recorded.case, rounds=blind)), recorded.expected, strict=True):
            torch.testing.assert_close(fields["grad"], expected["grad"], rtol=0, atol=1e-9)

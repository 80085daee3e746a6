"""Leaves by name, and parts of a model that are sent without some of them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core.names import NO_NAMES, Names
from fedalloy.core.screening import misfit
from fedalloy.core.types import Part

MODEL = {"body.weight": torch.zeros(2), "body.bias": torch.zeros(1), "head.weight": torch.zeros(3)}


@given(st.lists(st.sampled_from(["head.*", "*.bias", "*", "x"])), st.booleans())
def test_a_split_is_a_partition_in_the_same_order(patterns, others):
    names = Names(tuple(patterns), others)
    meant, rest = names.split(MODEL)
    assert [name for name in MODEL if name in meant] == list(meant)
    assert sorted([*meant, *rest]) == sorted(MODEL)
    assert all(name in names for name in meant)
    assert Names(tuple(patterns), not others).split(MODEL) == (rest, meant)


def test_no_names_mean_nothing():
    assert not NO_NAMES
    assert Names(others=True)
    assert NO_NAMES.split(MODEL) == ({}, MODEL)


def test_what_stays_at_home_is_not_asked_for_and_not_accepted():
    parts, shared = {"delta": Part(without=Names(("head.*",)))}, {"params": MODEL}
    body = {name: MODEL[name] for name in ("body.weight", "body.bias")}
    assert misfit({"delta": body}, parts, shared) is None
    assert misfit({"delta": MODEL}, parts, shared) == "part 'delta' has unexpected head.weight"
    assert misfit({"delta": {"body.bias": MODEL["body.bias"]}}, parts, shared) == "part 'delta' lacks body.weight"

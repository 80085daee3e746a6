"""Runs read from their folders."""

from __future__ import annotations

import pytest

from fedalloy.report import gathering
from fedalloy.results import summaries


def test_the_old_place_of_gather_works_and_says_where_it_went():
    with pytest.warns(DeprecationWarning, match=r"fedalloy\.results\.summaries"):
        assert gathering.gather is summaries.gather
    with pytest.raises(AttributeError, match="no attribute 'gathered'"):
        _ = gathering.gathered

"""Errors: what they say survives a trip between processes."""

from __future__ import annotations

import pickle

import pytest

from fedalloy.core.errors import ClientError, nearest


def test_a_client_error_travels_between_processes():
    error = pickle.loads(pickle.dumps(ClientError("step 1 of 2", ValueError("no"), client=3, round=7)))
    assert (error.stage, error.client, error.round) == ("step 1 of 2", 3, 7)
    assert str(error) == "client 3 failed in round 7 at stage 'step 1 of 2': ValueError: no"


def test_a_hint_without_a_close_word_still_lists_what_is_allowed():
    assert nearest("zzz", ["b", "a"]) == "allowed: a, b"
    assert nearest("x", []) == "allowed: (nothing)"


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("FedAvg", "fedavg"),  # closer by letters alone: fedevg
        ("LG-FedAvg", "lgfedavg"),
        ("SuPerFed-MM", "superfed_mm"),
        ("DITO", "ditto"),
        ("learning_rate", "lr"),
        ("lmbda", "lam"),
        ("f1", "f1_macro"),
    ],
)
def test_other_spellings_and_the_words_of_other_libraries_are_understood(word, meant):
    allowed = ["ditto", "f1_macro", "fedavg", "fedevg", "lam", "leftover", "lgfedavg", "lr", "superfed_mm"]
    assert nearest(word, allowed).startswith(f"did you mean '{meant}'?")

"""Colours: stable, different for every reader, and visible on their paper."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core.showing import tinted
from fedalloy.report.palette import DARK, DASHES, KNOWN, LIGHT, assign, css

# How a colour looks to somebody without one kind of cone, in linear RGB (Machado, Oliveira & Fernandes 2009).
EYES = {
    "all cones": np.eye(3),
    "no red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no blue": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = TO_XYZ.sum(1)


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(colour: str, eye: np.ndarray) -> np.ndarray:
    t = TO_XYZ @ np.clip(eye @ linear(colour), 0, 1) / WHITE
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    bright = sorted(float((TO_XYZ @ linear(colour))[1]) for colour in (one, other))
    return (bright[1] + 0.05) / (bright[0] + 0.05)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("eye", EYES)
def test_no_two_colours_look_alike_to_anybody(colours, eye):
    places = [lab(colour, EYES[eye]) for colour in colours]
    apart = {(a, b): float(np.linalg.norm(places[a] - places[b])) for a, b in itertools.combinations(range(8), 2)}
    assert min(apart.values()) > 18, min(apart.items(), key=lambda item: item[1])


@pytest.mark.parametrize(("colours", "paper"), [(LIGHT, "#ffffff"), (DARK, "#0f1317")], ids=["light", "dark"])
def test_lines_stand_out_from_the_paper(colours, paper):
    assert min(contrast(colour, paper) for colour in colours) >= 2.9


def mixed(colour: str, text: str) -> str:
    share = int(tinted(colour).partition("%")[0][-2:]) / 100
    both = [(int(colour[at : at + 2], 16), int(text[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(share * one + (1 - share) * other):02x}" for one, other in both)


@pytest.mark.parametrize(("text", "paper"), [("#212121", "#ffffff"), ("#e0e0e0", "#111111"), ("#ffffff", "#1e1e1e")])
def test_in_a_notebook_lines_stand_out_and_differ_in_every_theme(text, paper):
    """The themes of JupyterLab and the dark one of Visual Studio Code, whose paper nobody tells us."""
    colours = [mixed(colour, text) for colour in LIGHT]
    assert min(contrast(colour, paper) for colour in colours) >= 2.9
    for eye in EYES.values():
        pairs = itertools.combinations([lab(colour, eye) for colour in colours], 2)
        assert min(float(np.linalg.norm(one - other)) for one, other in pairs) > 14


def test_a_known_method_has_its_colour_in_any_spelling():
    assert assign(["FedAvg", "FedProx"])["FedAvg"].slot == KNOWN["fedavg"]


@given(st.lists(st.text(min_size=1), unique=True, max_size=len(LIGHT) * len(DASHES)))
def test_every_name_gets_its_own_style_whatever_the_order(names):
    styles = assign(names)
    assert set(styles) == set(names)
    assert len(set(styles.values())) == len(names)
    assert assign(reversed(names)) == styles


def test_names_beyond_the_last_style_are_still_there():
    names = [f"variant {number}" for number in range(len(LIGHT) * len(DASHES) + 5)]
    assert set(assign(names)) == set(names)


def test_known_methods_keep_their_colour_among_strangers():
    strangers = [f"mine {number}" for number in range(20)]
    for name, slot in KNOWN.items():
        assert assign([name, *strangers])[name].slot == slot
    assert len(set(KNOWN.values())) == len(KNOWN)


def test_both_themes_know_all_slots():
    for slot, (light, dark) in enumerate(zip(LIGHT, DARK, strict=True)):
        assert css().count(f"--c{slot}: {light};") == 1
        assert css().count(f"--c{slot}: {dark};") == 2

"""Does the advice follow the truth? Generated federations in which a kind of method helps by a strength that is a
parameter: from none, where the answer must be FedAvg, to large, where it must be that kind of method.

    python -m benchmarks.advise --strengths 0 0.5 1 2 --seeds 0 1 2

``personal``: two classes in ten dimensions, separated by ``w0 + strength * v_k`` at client k: with 0 all clients have
the same rule, with much they have nothing in common. Any method may be tried.

``fair``: two small clients out of twelve separate the classes along another direction, at an angle of ``strength``
times 90 degrees to that of the large ones. FedAvg serves the large ones. One model for all is wanted, and the
worst-served tenth counts.

One label in ten is wrong, so that training longer or faster does not help: with strength 0 no method has an advantage.

Every seed is another federation, and its runs draw new examples for every seed of a run, so that nothing is shared.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import fedalloy
from fedalloy.core.keys import Key
from fedalloy.studies.advise.call import Advice
from fedalloy.studies.advise.shortlist import method_notes

CLIENTS, FEATURES, SMALL, WRONG = 12, 10, 2, 0.1
FILE = Path(__file__).parent / "results" / "advise.json"
Answer = dict[str, Any]


def personal(strength: float, world: int) -> Callable[[int], Any]:
    """The task of every seed: clients with rules of their own."""

    def make(seed: int) -> Any:
        key = Key.of(world).fold("personal")
        common = _unit(key.fold("common"))
        rules = [common + strength * _unit(key.fold("own", client)) for client in range(CLIENTS)]
        return _task([_examples(rule, 400, key.fold(seed, client)) for client, rule in enumerate(rules)])

    return make


def fair(strength: float, world: int) -> Callable[[int], Any]:
    """The task of every seed: a few small clients with another rule than the large ones."""

    def make(seed: int) -> Any:
        key, angle = Key.of(world).fold("fair"), strength * math.pi / 2
        first = _unit(key.fold("first"))
        second = _unit(key.fold("second"))
        second = second - (second @ first) * first
        other = math.cos(angle) * first + math.sin(angle) * second / second.norm()
        small = range(CLIENTS - SMALL, CLIENTS)
        return _task([
            _examples(other, 400, key.fold(seed, client)) if client in small
            else _examples(first, 1600, key.fold(seed, client))
            for client in range(CLIENTS)
        ])  # fmt: skip

    return make


WORLDS: dict[str, tuple[Callable[[float, int], Callable[[int], Any]], dict[str, Any], str]] = {
    "personal": (personal, {}, "personal"),
    "fair": (fair, {"aim": "worst", "one_model": True}, "fair"),
}
"""How the task is made, the question, and the kind of method that helps."""


def ask(name: str, strength: float, world: int, folder: Path, **settings: Any) -> Advice:
    """The advice for one generated federation."""
    make, question, _ = WORLDS[name]
    given = {"rounds": 30, "seeds": list(range(8)), "tuning_seeds": [1000, 1001], **settings}
    return fedalloy.advise(make(strength, world), folder, **question, **given)


def right(name: str, strength: float, kind: str) -> bool | None:
    """Whether the kind of the advised method is that which the federation asks for; None between the ends."""
    if strength == 0:
        return kind == "reference"
    return kind == WORLDS[name][2] if strength >= 1 else None


def kind_of(method: str) -> str:
    """What an answer is: FedAvg, or a method of some kind."""
    return "reference" if method == "fedavg" else method_notes()[method].kind


def _unit(key: Key) -> torch.Tensor:
    drawn: torch.Tensor = torch.randn(FEATURES, generator=key.generator(), dtype=torch.float64)
    return torch.nn.functional.normalize(drawn, dim=0)


def _examples(rule: torch.Tensor, count: int, key: Key) -> tuple[Any, Any]:
    x = torch.randn(count, FEATURES, generator=key.fold("x").generator(), dtype=torch.float64)
    wrong = torch.rand(count, generator=key.fold("wrong").generator()) < WRONG
    return x.float().numpy(), ((x @ rule > 0) ^ wrong).long().numpy()


def _task(clients: Sequence[tuple[Any, Any]]) -> Any:
    return fedalloy.task(list(clients), model="logistic", test_fraction=0.7, valid_fraction=0.2)


def _one(name: str, strength: float, world: int, minutes: float) -> Answer:
    with tempfile.TemporaryDirectory() as folder:
        found = ask(name, strength, world, Path(folder), minutes=minutes)
        aim = WORLDS[name][1].get("aim", "mean")
        others = [one for one in found.effects if one.name != "fedavg"]
        nearest = max(others, key=lambda one: one.evidence[aim].estimate)
        shown = next((one for one in others if one.name == found.method), nearest).evidence[aim]
        return {
            "world": name, "strength": strength, "seed": world, "method": found.method, "kind": kind_of(found.method),
            "difference": shown.estimate, "low": shown.low, "high": shown.high, "first": found.first,
            "right": right(name, strength, kind_of(found.method)), "stages": found.record["stages"],
        }  # fmt: skip


def main() -> None:
    """Ask for advice on every world, strength and seed; print and keep the answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    parser.add_argument("--strengths", nargs="+", type=float, default=[0.0, 0.25, 0.5, 1.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=0.3)
    parser.add_argument("--output", type=Path, default=FILE)
    asked = parser.parse_args()
    answers = []
    for name in asked.worlds:
        for strength in asked.strengths:
            for seed in asked.seeds:
                answers.append(_one(name, strength, seed, asked.minutes))
                one = answers[-1]
                told = {True: "right", False: "WRONG", None: ""}[one["right"]]
                print(f"{name:9} strength {strength:<5g} seed {seed}: {told:5} {one['first']}", flush=True)
    asked.output.write_text(json.dumps({"minutes": asked.minutes, "answers": answers}, indent=1) + "\n")


if __name__ == "__main__":
    main()

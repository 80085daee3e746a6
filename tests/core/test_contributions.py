"""The handle on contributions: what is noted, what is answered, and who may ask."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedalloy import algorithms
from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.contributions import QUESTIONS, Notes
from fedalloy.core.engine import check_answers
from fedalloy.core.errors import AlgorithmError, SpecError
from fedalloy.core.protocols import Weighting
from fedalloy.core.types import Cohort, Contribution, Part
from fedalloy.engines.loop import Loop
from fedalloy.experiment.fit import fit
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.tasks.devices import DeviceProfile
from fedalloy.testing import small_task
from fedalloy.testing.handles import SumsOnly
from tests.engines.rounds import play


def cohort() -> Cohort:
    delta = {"a.w": torch.tensor([[3.0, 4.0], [0.0, 1.0], [6.0, 8.0]]), "a.b": torch.tensor([[0.0], [2.0], [0.0]])}
    return Cohort(torch.tensor([1, 4, 9]), {"delta": delta, "factors": {"x": torch.tensor([[2.0], [3.0], [5.0]])}})


def test_lengths_are_noted_whole_and_by_leaf():
    given = cohort()
    assert given.norms("delta").tolist() == [5.0, 5.0**0.5, 10.0]
    assert given.norms("delta", ["a.b"]).tolist() == [0.0, 2.0, 0.0]
    assert given.norms("factors").tolist() == [2.0, 3.0, 5.0]


@pytest.mark.parametrize("exact", [True, False])
def test_what_overflows_a_square_is_still_finite(exact):
    huge = {"delta": {"w": torch.tensor([[1e30, 0.0], [torch.inf, 1.0], [torch.nan, 1.0], [1.0, 1.0]])}}
    notes = Notes.of(huge, exact=exact)
    assert notes.finite.tolist() == [[True, False, False, True]]
    assert float(notes.norms("delta")[0]) == pytest.approx(1e30)


def test_quick_notes_are_as_good_as_single_precision():
    payload = {"delta": {"w": torch.randn(4, 1000)}}
    exact, quick = (Notes.of(payload, exact=one).norms("delta") for one in (True, False))
    assert torch.allclose(exact, quick, rtol=1e-6)
    whole = Notes.of({"buffers": {"n": torch.tensor([[3], [4]])}}, exact=False)
    assert whole.norms("buffers").tolist() == [3.0, 4.0]


def test_selected_clients_leave_nothing_of_the_others():
    given = cohort().take(torch.arange(3))
    given.payload["delta"]["a.w"][1] = torch.nan
    some = given.select(torch.tensor([1, 9]))
    assert some.ids.tolist() == [1, 9]
    assert some.combine("delta", torch.tensor([1.0, 1.0]))["a.w"].tolist() == [9.0, 12.0]
    assert some.norms("delta").tolist() == [5.0, 10.0]


def test_late_clients_say_what_is_neutral_and_their_notes_too():
    received = {"delta": {"a.w": torch.zeros(2), "a.b": torch.zeros(1)}, "factors": {"x": torch.ones(1)}}
    late = cohort().resend(torch.tensor([4]), received)
    assert late.payload["delta"]["a.w"].tolist() == [[3.0, 4.0], [0.0, 0.0], [6.0, 8.0]]
    assert late.stack("factors")["x"].flatten().tolist() == [2.0, 1.0, 5.0]
    assert late.norms("delta").tolist() == [5.0, 0.0, 10.0]
    assert late.norms("factors").tolist() == [2.0, 1.0, 5.0]


def test_a_template_knows_the_form_and_no_numbers():
    like = cohort().template("delta")
    assert {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in like.items()} == {
        "a.w": ((2,), torch.float32), "a.b": ((1,), torch.float32),
    }  # fmt: skip
    assert like["a.w"].untyped_storage().nbytes() == 4


def test_several_parts_come_in_step(monkeypatch):
    monkeypatch.setattr("fedalloy.core.tree._ELEMENTS", 3)
    delta = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.arange(3.0).reshape(3, 1)}
    given = Cohort(torch.arange(3), {"delta": delta, "twice": {name: 2 * leaf for name, leaf in delta.items()}})
    pieces = list(given.chunks(("delta", "twice")))
    assert [chunk.leaf for chunk, _ in pieces] == ["w"] * 4 + ["b"]
    assert all(torch.equal(2 * one, other) for _, (one, other) in pieces)


def test_rows_come_in_the_order_they_are_asked_for():
    assert cohort().rows("delta", torch.tensor([9, 1]))["a.b"].tolist() == [[0.0], [0.0]]
    assert cohort().rows("factors", torch.tensor([9, 1]))["x"].flatten().tolist() == [5.0, 2.0]


def test_nobodys_contributions_are_empty_and_add_up_to_zero():
    assert cohort().rows("delta", torch.tensor([], dtype=torch.int64))["a.w"].shape == (0, 2)
    nobody = cohort().select(torch.tensor([], dtype=torch.int64))
    assert nobody.combine("delta", torch.zeros(0))["a.w"].tolist() == [0.0, 0.0]


def test_inner_products_by_leaf():
    other = {"a.w": torch.tensor([1.0, 1.0]), "a.b": torch.tensor([10.0])}
    found = cohort().dots("delta", other)
    assert found["a.w"].tolist() == [7.0, 1.0, 14.0]
    assert found["a.b"].tolist() == [0.0, 20.0, 0.0]


def test_what_is_kept_is_a_copy():
    given = cohort()
    kept = given.keep()
    given.payload["delta"]["a.w"].zero_()
    assert kept.payload["delta"]["a.w"].tolist() == [[3.0, 4.0], [0.0, 1.0], [6.0, 8.0]]


def test_everything_that_rules_ask_is_a_question():
    asked = {name: getattr(algorithms, name)().asks for name in ("fedavg", "median", "fedadp", "qfedavg", "krum")}
    assert asked["fedavg"] == {"combine"}
    assert asked["fedadp"] == {"combine", "norms", "chunks"}
    assert set().union(*asked.values()) <= QUESTIONS.keys()


class Summing(Loop):
    """A loop whose contributions answer weighted sums at most."""

    answers = frozenset({"combine"})

    def __call__(self, *given):
        outcome = super().__call__(*given)
        return replace(outcome, cohort=SumsOnly(outcome.cohort))


UNREAD = [
    name
    for name in registry.names("algorithm")
    if name not in ("duw_fedavg", "duw_fednova") and registry.find("algorithm", name)().asks == {"combine"}
]


@pytest.mark.parametrize("name", UNREAD)
def test_whoever_does_not_read_payloads_needs_sums_only(name):
    models: dict[str, Any] = {"fedcgan": "acgan", "fedcvae": "cvae"}
    algorithm, task = registry.find("algorithm", name)(batch_size=4), small_task(models.get(name, "batchnorm"))
    slow = DeviceProfile(deadline=1.0, seconds_per_step=0.2, on_failure="resend")
    expected, found = (
        list(fit(algorithm, task, engine=one, rounds=2, seed=3, devices=slow).rounds()) for one in (Loop(), Summing())
    )
    assert found == expected


@pytest.mark.parametrize(
    ("name", "asked"), [("median", "chunks"), ("qfedavg", "norms"), ("fedboosting", "cross_score")]
)
def test_whoever_reads_more_is_refused_before_the_first_round(name, asked):
    with pytest.raises(SpecError, match=rf"\('{asked}'\), which engine Summing does not provide; it answers: combine"):
        fit(registry.find("algorithm", name)(), small_task(), engine=Summing(), rounds=1)


def test_who_stacks_is_named_where_nobody_answers_it():
    class Stacking(Sgd):
        parts = {"delta": Part(), "samples": Part("stack")}  # noqa: RUF012 (a frozen value)

    stacking = replace(algorithms.fedavg(), solver=Stacking())
    with pytest.raises(SpecError, match=r"^solver 'Stacking' needs a part .* \('stack'\), which engine Summing"):
        check_answers(Summing(), stacking)


def test_sums_only_refuses_the_rest():
    given = SumsOnly(cohort())
    assert given.combine("delta", torch.ones(3))["a.b"].tolist() == [2.0]
    for ask in (
        lambda: given.payload, lambda: given.rows("delta", given.ids), lambda: list(given.chunks(("delta",))),
        lambda: given.stack("factors"), lambda: given.norms("delta"), lambda: given.cross,
    ):  # fmt: skip
        with pytest.raises(AlgorithmError, match="only provide weighted sums"):
            ask()


def test_notes_go_by_the_names_of_leaves_in_whatever_order_clients_name_them():
    sent: tuple[dict[str, Tensor], ...]
    sent = {"a": torch.tensor([1.0]), "b": torch.tensor([5.0])}, {"b": torch.tensor([7.0]), "a": torch.tensor([3.0])}
    single = [Contribution({"delta": leaves}, {}, {}, Notes.alone({"delta": leaves})) for leaves in sent]
    cohort = Cohort.gather([0, 1], single)
    assert cohort.norms("delta", ["a"]).tolist() == [1.0, 3.0]
    received = {"b": torch.tensor([9.0]), "a": torch.tensor([2.0])}
    late = cohort.resend(torch.tensor([0]), {"delta": received})
    assert late.norms("delta", ["a"]).tolist() == [2.0, 3.0]
    assert late.norms("delta", ["b"]).tolist() == [9.0, 7.0]


def test_a_cohort_without_anybody_has_notes_of_nobody():
    nobody = Cohort(torch.zeros(0, dtype=torch.int64), {"delta": {"w": torch.zeros(0, 2, 3)}})
    assert nobody.norms("delta").shape == (0,)
    assert [chunk.leaf for chunk, _ in nobody.chunks(("delta",))] == ["w"]


@dataclass(frozen=True)
class ByLength(Weighting):
    """A rule that looks at what was sent and does not say at what."""

    @property
    def reads_payload(self) -> bool:
        return True

    def weigh(self, cohort, state, ctx):
        return torch.ones(len(cohort)) / len(cohort), state, {"norms": cohort.norms("delta")}


def test_a_rule_that_asks_for_rows_gets_exact_norms_too():
    algorithm = Algorithm(Sgd(batch_size=4), ByLength(), ServerSgd())
    assert algorithm.exact_norms
    assert not algorithms.fedavg().exact_norms
    cohort = play(Loop(), algorithm, small_task("mlp")).cohort
    assert torch.equal(cohort.norms("delta"), Notes.of(cohort.payload, exact=True).norms("delta"))

"""Every rule deals disjointly and by its key; those that promise more keep it."""

from __future__ import annotations

import json
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core import registry
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.spec import from_spec
from fedalloy.tasks.partitions.base import Partition, group
from fedalloy.tasks.partitions.classes import Classes, choose_classes
from fedalloy.tasks.partitions.dirichlet import Dirichlet, log_gamma_draws
from fedalloy.tasks.partitions.iid import Iid
from fedalloy.tasks.partitions.manifest import Manifest, digest
from fedalloy.tasks.partitions.margins import apportion, fill, fit, level_up
from fedalloy.tasks.partitions.mixed import Mixed
from fedalloy.tasks.partitions.natural import Natural
from fedalloy.tasks.partitions.power_law import Lognormal, PowerLaw
from fedalloy.tasks.partitions.shards import Shards
from fedalloy.tasks.partitions.sizes import Sizes
from fedalloy.tasks.partitions.skewed import Skewed

COVERING = [
    Iid(),
    Dirichlet(0.1),
    Dirichlet(5.0, balance=True),
    Dirichlet(0.0005, min_samples=1),
    Shards(2),
    Shards(3, deal="stride"),
    Classes(2),
    PowerLaw(1.5),
    Lognormal(2.0),
    Mixed(2, 3),
    Natural(),
    Skewed(Dirichlet(0.1), PowerLaw(1.0), keep="sizes"),
]
PARTIAL = [
    Sizes((5, 9, 1, 3, 2)),
    Mixed(2, 3, samples=7),
    Skewed(Classes(2), PowerLaw(1.0)),
    Skewed(Dirichlet(0.05), Lognormal(1.0)),
    Skewed(Shards(2), Sizes((5, 9, 1, 3, 2)), keep="sizes"),
]
K = 5


def labels_of(size: int, classes: int, seed: int) -> torch.Tensor:
    """Labels of uneven classes, each with enough examples that no rule below has to refuse."""
    drawn = (Key.of(seed).uniform(size) ** 2 * classes).to(torch.int64)
    return torch.cat([torch.arange(classes).repeat(3 * K), drawn])


def owners_of(labels: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(labels)) % K


def assign(rule: Partition, labels: torch.Tensor, seed: int = 0, clients: int = K) -> list[torch.Tensor]:
    return rule.assign(labels, clients, Key.of(seed), owners_of(labels))


def some_labels() -> st.SearchStrategy[torch.Tensor]:
    return st.builds(labels_of, st.integers(40, 200), st.integers(2, 6), st.integers(0, 1000))


@pytest.mark.parametrize("rule", COVERING + PARTIAL, ids=repr)
@given(labels=some_labels(), seed=st.integers(0, 1000))
def test_hands_are_disjoint_sorted_and_never_empty(rule, labels, seed):
    hands = assign(rule, labels, seed)
    rows = torch.cat(hands)
    assert len(hands) == K
    assert min(map(len, hands)) >= 1
    assert len(rows.unique()) == len(rows)
    assert all(torch.equal(hand, hand.sort().values) for hand in hands)


@pytest.mark.parametrize("rule", COVERING, ids=repr)
@given(labels=some_labels(), seed=st.integers(0, 1000))
def test_rules_that_promise_coverage_cover(rule, labels, seed):
    assert torch.equal(torch.cat(assign(rule, labels, seed)).sort().values, torch.arange(len(labels)))


@pytest.mark.parametrize("rule", COVERING + PARTIAL, ids=repr)
def test_a_key_is_an_assignment(rule):
    labels = labels_of(150, 6, 1)
    assert digest(assign(rule, labels, 3)) == digest(assign(rule, labels, 3))
    without_chance = isinstance(rule, Natural) or (isinstance(rule, Shards) and rule.deal == "stride")
    assert (digest(assign(rule, labels, 3)) == digest(assign(rule, labels, 4))) == without_chance


def test_the_same_seed_means_the_same_hands_on_every_machine():
    hands = assign(Dirichlet(0.3), torch.arange(100) % 4, seed=7)
    assert digest(hands) == "eaf6198dff1f72c1ac31349b59093a3e94abd7ef529f9562f03908f70e3e42a6"


def test_every_registered_rule_is_in_the_property_tests():
    tested = {registry.name_of("partition", type(rule)) for rule in COVERING + PARTIAL}
    theirs = {"flower_datasets"}  # compared with the library's own partitions in tests/tasks/sources/test_doors.py
    assert tested | theirs == set(registry.names("partition"))


@given(
    labels=some_labels(),
    seed=st.integers(0, 99),
    alpha=st.sampled_from([1e-4, 0.05, 1.0, 100.0]),
    minimum=st.integers(1, 8),
)
def test_the_minimum_is_respected(labels, seed, alpha, minimum):
    for rule in (
        Dirichlet(alpha, minimum),
        Dirichlet(alpha, minimum, balance=True),
        PowerLaw(3.0, minimum),
        Lognormal(4.0, minimum),
    ):
        assert min(map(len, assign(rule, labels, seed))) >= minimum


def test_dirichlet_ends_quickly_where_hardly_any_draw_would_do():
    labels = torch.arange(60_000) % 10
    begin = time.perf_counter()
    hands = Dirichlet(0.01).assign(labels, 500, Key.of(1))
    assert time.perf_counter() - begin < 2
    assert min(map(len, hands)) >= 2
    assert sum(map(len, hands)) == 60_000


@pytest.mark.parametrize(
    ("rule", "clients", "words"),
    [
        (Dirichlet(0.1, min_samples=30), K, "5 clients with at least 30 examples each need 150, the data have 100"),
        (PowerLaw(1.0, min_samples=30), K, "at most 3 clients"),
        (Iid(), 101, "impossible"),
        (Iid(), 0, "at least 1"),
        (Shards(2), 51, "impossible"),
        (Classes(5), K, "5 classes per client asked for, the data have 4"),
        (Classes(2), 51, "impossible"),
        (Sizes((90, 20)), 2, "110 examples in all, the data have 100"),
        (Sizes((10, 20)), 3, "makes 2 clients but 3 were asked for"),
        (Mixed(3, 3, samples=20), 6, "need 120"),
        (Natural(), 6, "the data have 5 clients"),
        (Skewed(Dirichlet(0.1), Sizes((1, 2))), K, "makes 2 clients"),
    ],
    ids=repr,
)
def test_the_impossible_is_refused_at_once_with_the_reason(rule, clients, words):
    begin = time.perf_counter()
    with pytest.raises(DataError, match=words):
        assign(rule, torch.arange(100) % 4, clients=clients)
    assert time.perf_counter() - begin < 1


def test_few_examples_of_many_classes_are_refused_by_room_not_by_looping():
    with pytest.raises(DataError, match="room for"):
        Classes(2).assign(torch.tensor([0] * 20 + [1]), 10, Key.of(0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dirichlet(0.0),
        lambda: Dirichlet(float("nan")),
        lambda: Dirichlet(1.0, min_samples=0),
        lambda: Shards(0),
        lambda: Shards(2, deal="strides"),  # type: ignore[arg-type]
        lambda: Classes(0),
        lambda: Sizes(()),
        lambda: Sizes((3, 0)),
        lambda: PowerLaw(-1.0),
        lambda: Lognormal(1.0, min_samples=0),
        lambda: Mixed(0, 0),
        lambda: Mixed(1, 1, classes=3, samples=2),
        lambda: Skewed(Iid(), Iid(), keep="size"),  # type: ignore[arg-type]
    ],
)
def test_senseless_arguments_are_refused(make):
    with pytest.raises(SpecError):
        make()


def test_labels_that_are_no_classes_cannot_be_skewed_but_can_be_dealt():
    targets = torch.linspace(0, 1, 50)
    with pytest.raises(DataError, match="use iid, sizes"):
        Dirichlet(1.0).assign(targets, K, Key.of(0))
    assert sum(map(len, PowerLaw(1.0).assign(targets, K, Key.of(0)))) == 50


def test_natural_follows_the_owners_and_leaves_out_nobodys_rows():
    owner = torch.tensor([4, -1, 2, 4, 7])
    hands = Natural().assign(torch.zeros(5, dtype=torch.int64), 3, Key.of(0), owner)
    assert [hand.tolist() for hand in hands] == [[2], [0, 3], [4]]
    assert Natural().clients_for(owner) == 3
    some = Natural().assign(torch.zeros(5, dtype=torch.int64), 2, Key.of(0), owner)
    assert all(len(owner[hand].unique()) == 1 for hand in some)
    with pytest.raises(DataError, match="knows the client"):
        Natural().assign(torch.zeros(5, dtype=torch.int64), 3, Key.of(0))


def test_iid_hands_are_equal():
    assert sorted(map(len, Iid().assign(torch.zeros(17, dtype=torch.int64), 5, Key.of(0)))) == [3, 3, 3, 4, 4]


def test_small_alpha_means_strong_skew():
    labels = torch.arange(6000) % 10
    held = [_classes_held(Dirichlet(alpha).assign(labels, 20, Key.of(0)), labels) for alpha in (0.02, 0.5, 100.0)]
    assert held[0] < 2.5 < held[1] < 9.5 < held[2]


def test_dirichlet_shares_have_the_moments_of_the_law():
    clients, alpha = 4, 0.3
    shares = log_gamma_draws(alpha, (20_000, clients), Key.of(5)).softmax(1)
    variance = (clients - 1) / (clients**2 * (clients * alpha + 1))
    assert torch.allclose(shares.mean(0), torch.full((clients,), 0.25, dtype=torch.float64), atol=0.01)
    assert torch.allclose(shares.var(0), torch.full((clients,), variance, dtype=torch.float64), rtol=0.04)


def test_gamma_draws_survive_a_tiny_alpha():
    shares = log_gamma_draws(1e-6, (200, 3), Key.of(0)).softmax(1)
    assert torch.allclose(shares.sum(1), torch.ones(200, dtype=torch.float64))
    assert (shares.max(1).values > 0.999).all()


def test_balance_makes_sizes_more_equal():
    labels = torch.arange(5000) % 10

    def spread(balance: bool) -> float:
        hands = [Dirichlet(1.0, balance=balance).assign(labels, 10, Key.of(seed)) for seed in range(10)]
        return float(torch.tensor([[len(hand) for hand in one] for one in hands]).double().std(1).mean())

    assert spread(True) < 0.75 * spread(False)


def test_stride_gives_shards_i_and_i_plus_k():
    labels = torch.tensor([3, 0, 1, 2, 3, 0, 1, 2])  # sorted: rows 1 5 2 6 3 7 0 4, four shards of two
    hands = Shards(2, deal="stride").assign(labels, 2, Key.of(0))
    assert [hand.tolist() for hand in hands] == [[1, 3, 5, 7], [0, 2, 4, 6]]


def test_shards_hold_few_classes():
    labels = torch.arange(1000) % 10
    assert _classes_held(Shards(2).assign(labels, 50, Key.of(0)), labels) <= 2


@given(clients=st.integers(1, 30), classes=st.integers(1, 12), per_client=st.integers(1, 12), seed=st.integers(0, 99))
def test_every_client_has_exactly_its_number_of_classes(clients, classes, per_client, seed):
    labels = torch.cat([labels_of(300, classes, seed), torch.arange(classes).repeat(30)])
    if per_client > classes:
        return
    hands = Classes(per_client).assign(labels, clients, Key.of(seed))
    counts = Manifest.of(hands, labels, classes).class_counts
    assert (counts > 0).sum(1).tolist() == [per_client] * clients
    held = counts.sum(0) > 0
    assert int(held.sum()) == min(classes, clients * per_client)
    assert torch.equal(counts.sum(0)[held], torch.bincount(labels)[held])


def test_classes_of_equal_size_give_equal_clients():
    labels = torch.arange(6000) % 10
    sizes = [len(hand) for hand in Classes(2).assign(labels, 20, Key.of(0))]
    assert max(sizes) - min(sizes) <= 2


def test_common_classes_get_more_holders():
    holds = choose_classes(torch.tensor([900, 50, 50]), 10, 1, Key.of(0))
    assert holds.sum(0).tolist() == [8, 1, 1]


def test_sizes_are_as_given():
    hands = Sizes((7, 1, 4)).assign(torch.zeros(20, dtype=torch.int64), 3, Key.of(0))
    assert [len(hand) for hand in hands] == [7, 1, 4]


def test_sizes_come_from_a_spec():
    assert from_spec("partition", {"kind": "sizes", "sizes": [7, 1]}) == Sizes((7, 1))
    with pytest.raises(SpecError, match="whole number"):
        from_spec("partition", {"kind": "sizes", "sizes": [7, 1.5]})


def test_the_power_law_is_one():
    sizes = sorted((len(hand) for hand in PowerLaw(1.0, 1).assign(torch.zeros(50_000), 100, Key.of(0))), reverse=True)
    assert sizes[0] / sizes[9] == pytest.approx(10, rel=0.02)
    assert sizes[0] / sizes[99] == pytest.approx(100, rel=0.05)


def test_the_lognormal_is_one():
    sizes = torch.tensor([len(hand) for hand in Lognormal(1.5, 1).assign(torch.zeros(4_000_000), 2000, Key.of(0))])
    assert float(sizes.double().log().std()) == pytest.approx(1.5, rel=0.06)


@pytest.mark.parametrize("samples", [600, None])
def test_mixed_has_iid_clients_first(samples):
    labels = torch.arange(12_000) % 10
    counts = Manifest.of(Mixed(5, 5, 2, samples).assign(labels, 10, Key.of(0)), labels, 10).class_counts
    assert counts[:5].min() > 30
    assert (counts[5:] > 0).sum(1).tolist() == [2] * 5
    assert counts.sum(1).tolist() == [600 if samples else 1200] * 10 or samples is None
    assert counts.sum() == (6000 if samples else 12_000)


def test_rules_that_know_their_clients_say_so():
    assert [rule.clients_for(None) for rule in (Sizes((1, 2)), Mixed(2, 3), Iid(), Natural())] == [2, 5, None, None]
    assert Skewed(Iid(), Sizes((1, 2))).clients_for(None) == 2
    assert Skewed(Mixed(1, 2), Iid()).clients_for(None) == 3


class TestLabelTimesQuantity:
    labels = torch.arange(6000) % 10
    sizes = (1500, 900, 500, 300, 200, 100, 50, 30, 20, 10)

    def counts(self, label, quantity, keep="labels"):
        hands = Skewed(label, quantity, keep).assign(self.labels, len(self.sizes), Key.of(4))
        return Manifest.of(hands, self.labels, 10).class_counts

    def test_sizes_and_mix_both_hold_where_they_agree(self):
        label, quantity = Dirichlet(1.0), Sizes(self.sizes)
        alone = label.assign(self.labels, 10, Key.of(4).fold("label"))
        mix = _mix(Manifest.of(alone, self.labels, 10).class_counts)
        made = self.counts(label, quantity)
        assert made.sum(1).tolist() == list(self.sizes)
        assert (_mix(made)[:6] - mix[:6]).abs().sum(1).max() < 0.12

    def test_labels_win_when_kept(self):
        label, quantity = Classes(1), Sizes(self.sizes)
        made = self.counts(label, quantity)
        assert (made > 0).sum(1).tolist() == [1] * 10
        assert made.sum(1).tolist() == [600, 600, 500, 300, 200, 100, 50, 30, 20, 10]

    def test_sizes_win_when_kept(self):
        made = self.counts(Classes(1), Sizes(self.sizes), keep="sizes")
        assert made.sum(1).tolist() == list(self.sizes)
        assert (made.max(1).values[2:] / made.sum(1)[2:]).min() > 0.6

    @given(seed=st.integers(0, 500), alpha=st.sampled_from([0.01, 0.1, 1.0]), sigma=st.sampled_from([0.3, 1.0, 2.5]))
    def test_kept_promises(self, seed, alpha, sigma):
        labels, key = labels_of(300, 8, seed), Key.of(seed)
        label, quantity = Dirichlet(alpha), Lognormal(sigma)
        held = Manifest.of(label.assign(labels, 12, key.fold("label")), labels, 8).class_counts > 0
        sizes = Manifest.of(quantity.assign(labels, 12, key.fold("quantity")), labels, 8).sizes
        by_labels = Manifest.of(Skewed(label, quantity).assign(labels, 12, key), labels, 8)
        by_sizes = Manifest.of(Skewed(label, quantity, "sizes").assign(labels, 12, key), labels, 8)
        assert not (by_labels.class_counts[~held] > 0).any()
        assert (by_labels.sizes <= sizes).all()
        assert torch.equal(by_sizes.sizes, sizes)


class TestMargins:
    @given(
        weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=30),
        extra=st.integers(0, 500),
        least=st.integers(0, 5),
    )
    def test_apportion_gives_out_everything(self, weights, extra, least):
        total = least * len(weights) + extra
        shares = apportion(torch.tensor(weights), total, least)
        exact = least + torch.tensor(weights, dtype=torch.float64) / sum(weights) * extra
        assert int(shares.sum()) == total
        assert ((shares - exact).abs() < 1 + 1e-3).all()

    def test_fit_reaches_both_margins(self):
        seed = Key.of(0).uniform(4, 3) + 0.1
        rows, columns = torch.tensor([10, 20, 30, 40]), torch.tensor([50, 25, 25])
        table = fit(seed, rows, columns, cover=True)
        assert torch.allclose(table.sum(0), columns.double())
        assert torch.allclose(table.sum(1), rows.double(), atol=0.1)

    def test_fit_keeps_zeros_and_capacity(self):
        table = fit(torch.eye(2), torch.tensor([10, 10]), torch.tensor([4, 50]), cover=False)
        assert torch.allclose(table, torch.tensor([[4.0, 0.0], [0.0, 10.0]], dtype=torch.float64))

    def test_fill_respects_room_and_zeros(self):
        table = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
        filled = fill(torch.zeros(2, 2, dtype=torch.int64), table, torch.tensor([5, 5]), torch.tensor([6, 3]))
        assert filled.tolist() == [[5, 0], [1, 3]]

    def test_level_up_takes_from_the_largest(self):
        assert level_up(torch.tensor([[9, 1], [0, 3], [0, 0]]), 2).tolist() == [[7, 1], [0, 3], [2, 0]]


def test_group_leaves_clients_without_rows_empty():
    assert [rows.tolist() for rows in group(torch.tensor([2, 0]), 4)] == [[1], [], [0], []]


def test_a_manifest_says_who_has_what():
    labels = torch.tensor([0, 1, 1, 2, 0])
    manifest = Manifest.of([torch.tensor([0, 1]), torch.tensor([2])], labels, 3)
    told = json.loads(json.dumps(manifest.to_json()))
    assert told["sizes"] == [2, 1]
    assert told["class_counts"] == [[1, 1, 0], [0, 1, 0]]
    assert told["unused"] == 2
    assert told["clients"] == 2
    assert len(told["digest"]) == 64


def test_a_digest_tells_hands_apart_that_hold_the_same_rows():
    one, other = torch.tensor([0, 1]), torch.tensor([2])
    variants = [[one, other], [other, one], [torch.tensor([0]), torch.tensor([1, 2])], [torch.tensor([0, 1, 2])]]
    assert len({digest(hands) for hands in variants}) == len(variants)


def test_a_manifest_of_real_targets_has_no_classes():
    assert Manifest.of([torch.tensor([0])], torch.tensor([0.5]), 0).class_counts.shape == (1, 0)


def _classes_held(hands: list[torch.Tensor], labels: torch.Tensor) -> float:
    return sum(len(labels[hand].unique()) for hand in hands) / len(hands)


def _mix(counts: torch.Tensor) -> torch.Tensor:
    return counts / counts.sum(1, keepdim=True)

import timeit

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.tasks.devices import DeviceProfile, EpochRange, Slow

KEY = Key.of(11)
MANY = torch.arange(4000)


def test_the_default_is_perfect_devices():
    profile = DeviceProfile()
    ids = torch.tensor([3, 8])
    assert profile.epochs_for(ids, KEY).tolist() == [-1, -1]
    assert profile.links(ids, KEY).all()
    assert profile.available(ids, KEY).all()
    seconds = profile.seconds(ids, torch.tensor([5, 6]), 1.0, KEY)
    assert seconds.tolist() == [0.0, 0.0]
    assert not profile.late(seconds).any()
    assert profile.round_seconds(seconds) == 0.0


def test_epochs_as_number_list_and_range():
    ids = torch.tensor([2, 0])
    assert DeviceProfile(epochs=3).epochs_for(ids, KEY).tolist() == [3, 3]
    assert DeviceProfile(epochs=(7, 8, 9)).epochs_for(ids, KEY).tolist() == [9, 7]
    drawn = DeviceProfile(epochs=EpochRange(1, 4)).epochs_for(MANY, KEY)
    assert drawn.dtype == torch.int64
    shares = torch.bincount(drawn, minlength=5) / len(MANY)
    assert shares[0] == 0
    torch.testing.assert_close(shares[1:], torch.full((4,), 0.25), rtol=0, atol=0.04)


PROFILE = DeviceProfile(epochs=EpochRange(0, 9), success=0.4, availability=0.6, slow=Slow(0.3, 5.0))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3999), min_size=1, max_size=20, unique=True), st.integers(0, 50))
def test_a_client_draws_the_same_in_any_cohort(ids, round):
    """Never by slot, never by call order."""
    key, some = KEY.fold("round", round), torch.tensor(ids)
    assert torch.equal(PROFILE.epochs_for(some, key), PROFILE.epochs_for(MANY, key)[some])
    assert torch.equal(PROFILE.links(some, key), PROFILE.links(MANY, key)[some])
    assert torch.equal(PROFILE.available(some, key), PROFILE.available(MANY, key)[some])
    assert torch.equal(PROFILE.slowdown(some, key), PROFILE.slowdown(MANY, key)[some])


def test_rounds_differ_and_streams_are_independent():
    one, other = KEY.fold("round", 1), KEY.fold("round", 2)
    assert not torch.equal(PROFILE.epochs_for(MANY, one), PROFILE.epochs_for(MANY, other))
    assert not torch.equal(PROFILE.links(MANY, one), PROFILE.links(MANY, other))
    even = DeviceProfile(success=0.5, availability=0.5)
    agree = (even.links(MANY, one) == even.available(MANY, one)).double().mean()
    assert 0.45 < float(agree) < 0.55


def test_links_work_as_often_as_they_should():
    assert float(PROFILE.links(MANY, KEY).double().mean()) == pytest.approx(0.4, abs=0.03)
    assert float(PROFILE.available(MANY, KEY).double().mean()) == pytest.approx(0.6, abs=0.03)
    sure = DeviceProfile(success=(0.0, 1.0, 0.5))
    drawn = torch.stack([sure.links(torch.tensor([0, 1, 2]), KEY.fold(t)) for t in range(400)])
    assert drawn.double().mean(0).tolist() == pytest.approx([0.0, 1.0, 0.5], abs=0.08)


def test_slow_clients_miss_the_deadline():
    profile = DeviceProfile(slow=Slow(0.25, 4.0), seconds_per_step=0.5, seconds_per_megabyte=2.0, deadline=20.0)
    steps = torch.full((len(MANY),), 10)
    seconds = profile.seconds(MANY, steps, 1.5, KEY)
    assert sorted(set(seconds.tolist())) == [8.0, 23.0]
    late = profile.late(seconds)
    assert torch.equal(late, profile.slowdown(MANY, KEY) == 4.0)
    assert float(late.double().mean()) == pytest.approx(0.25, abs=0.03)
    assert profile.round_seconds(seconds) == 20.0
    assert profile.round_seconds(seconds[~late]) == 8.0
    assert DeviceProfile(seconds_per_step=0.5).round_seconds(torch.tensor([3.0, 9.0])) == 9.0
    assert profile.round_seconds(torch.zeros(0)) == 0.0


def test_megabytes_may_differ_by_client():
    profile = DeviceProfile(seconds_per_megabyte=2.0)
    assert profile.seconds(torch.tensor([0, 1]), torch.tensor([1, 1]), torch.tensor([1.0, 3.0]), KEY).tolist() == [2, 6]


def test_the_cost_does_not_grow_with_the_population():
    """A list of a million entries is not walked for a cohort of ten: asking is far cheaper than one walk."""
    profile = DeviceProfile(success=(0.5,) * 1_000_000)
    ids = torch.arange(0, 1_000_000, 100_000)
    walk = min(timeit.repeat(lambda: torch.tensor(profile.success), number=1, repeat=3))
    assert min(timeit.repeat(lambda: profile.links(ids, KEY), number=1, repeat=10)) < walk / 5


def test_recipe_forms():
    table = {"epochs": [1, 2], "success": [0.2, 1], "slow": {"fraction": 0.5, "factor": 2}, "deadline": 3.0}
    profile = DeviceProfile.read(table | {"on_failure": "resend"})
    assert profile == DeviceProfile(
        epochs=(1, 2), success=(0.2, 1), slow=Slow(0.5, 2), deadline=3.0, on_failure="resend"
    )
    assert DeviceProfile.read({"epochs": {"low": 1, "high": 5}}).epochs == EpochRange(1, 5)
    assert hash(profile)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"epoch": 3}, "did you mean 'epochs'"),
        ({"epochs": {"low": 1, "hihg": 5}}, "did you mean 'high'"),
        ({"epochs": {"low": 1}}, "needed: low, high"),
        ({"epochs": {"low": 5, "high": 1}}, "low <= high"),
        ({"epochs": -2}, "at least 0"),
        ({"epochs": 1.5}, "whole number"),
        ({"epochs": []}, "whole number"),
        ({"epochs": [1, True]}, "whole number"),
        ({"success": 1.2}, r"success is 1.2.*\[0, 1\]"),
        ({"success": [0.2, -1]}, r"\[0, 1\]"),
        ({"availability": "often"}, "availability"),
        ({"slow": {"fraction": 0.5, "factor": 0.5}}, "1 or more"),
        ({"slow": {"fraction": 50, "factor": 2}}, "slow.fraction"),
        ({"slow": 0.5}, "fraction"),
        ({"deadline": -1}, "deadline"),
        ({"seconds_per_step": float("nan")}, "seconds_per_step"),
        ({"on_failure": "dorp"}, "did you mean 'drop'"),
    ],
)
def test_a_bad_profile_says_what_is_allowed(table, message):
    with pytest.raises(SpecError, match=message):
        DeviceProfile.read(table)


def test_lists_must_fit_the_population():
    with pytest.raises(SpecError, match=r"epochs lists 2 values for 3 clients.*one per client"):
        DeviceProfile(epochs=(1, 2)).check(3)
    with pytest.raises(SpecError, match="there is a client 2"):
        DeviceProfile(success=(0.1, 0.2)).links(torch.tensor([2]), KEY)
    DeviceProfile(epochs=(1, 2), success=0.5).check(2)

"""Keys: one address, one number, whichever way it is asked for."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._functorch import is_functorch_wrapped_tensor

from fedalloy.core import cuda_draws, keys
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key, _drawn

LABELS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.text(max_size=8))
SEEDS = st.integers(-(2**40), 2**40)


def tensor_state(key: Key) -> Key:
    """The same key as a batch without axes: every further operation takes the tensor path."""
    assert isinstance(key.state, int)
    return Key(torch.tensor(key.state - (1 << 64) if key.state >> 63 else key.state))


@given(SEEDS, st.lists(LABELS, max_size=4))
def test_folding_ints_and_tensors_agree(seed, labels):
    plain = Key.of(seed).fold(*labels)
    batch = tensor_state(Key.of(seed)).fold(*labels)
    assert plain.seed() == batch.seed()
    assert torch.equal(plain.bits(5), batch.bits(5))


@given(SEEDS, st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5), st.integers(0, 9))
def test_each_is_fold_for_every_label(seed, labels, after):
    batch = Key.of(seed).each(torch.tensor(labels)).fold("x", after)
    for row, label in enumerate(labels):
        assert torch.equal(batch.bits(3)[row], Key.of(seed).fold(label, "x", after).bits(3))


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), st.booleans())
def test_bits_are_mixed_alike_as_an_array_and_by_torch(values, strided):
    batch = torch.tensor(values, dtype=torch.int64)[:: 2 if strided else 1]
    kept = batch.clone()
    assert torch.equal(keys._mix_tensor(batch), keys._mix_anywhere(batch))
    assert torch.equal(batch, kept)


def test_bits_are_mixed_under_vmap():
    batch = torch.arange(12).reshape(3, 4)
    assert torch.equal(torch.func.vmap(keys._mix_tensor)(batch), keys._mix_tensor(batch))


@given(SEEDS, st.integers(1, 30), st.integers(0, 40))
def test_a_cohort_is_that_of_floyds_algorithm(seed, size, more):
    population, chosen = size + more, set()
    for step, draw in enumerate(Key.of(seed).bits(size).tolist()):
        top = population - size + step
        pick = (draw & keys._LAST) % (top + 1)
        chosen.add(top if pick in chosen else pick)
    assert Key.of(seed).choice(population, size).tolist() == sorted(chosen)


def test_each_of_a_batch_adds_axes_at_the_end():
    twice = Key.of(1).each(torch.arange(3)).each(torch.arange(2))
    assert torch.equal(twice.uniform(4)[2, 1], Key.of(1).fold(2, 1).uniform(4))


def test_labels_of_different_kind_or_order_give_different_keys():
    key = Key.of(0)
    paths: list[tuple[int | str, ...]] = [
        (),
        (1,),
        ("1",),
        (1, 2),
        (2, 1),
        ("a", "b"),
        ("ab",),
        ("b", "a"),
        (-1,),
        (0,),
        ("",),
    ]
    seeds = {key.fold(*path).seed() for path in paths}
    assert len(seeds) == len(paths)
    assert Key.of(1).seed() != key.seed()


def test_a_key_never_changes_and_never_touches_the_global_generator():
    before = torch.get_rng_state()
    key = Key.of(3).fold("a")
    first = key.normal(10)
    key.fold("b").permutation(7)
    assert torch.equal(first, key.normal(10))
    assert torch.equal(before, torch.get_rng_state())


@given(SEEDS, st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_a_padded_permutation_permutes_the_valid_part_as_if_alone(seed, sizes):
    valid = torch.tensor(sizes)
    longest = max(*sizes, 1) + 2
    order = Key.of(seed).each(torch.arange(len(sizes))).permutation(longest, valid=valid)
    for row, size in enumerate(sizes):
        assert order[row].sort().values.tolist() == list(range(longest))
        assert order[row, :size].sort().values.tolist() == list(range(size))
        assert torch.equal(order[row, :size], Key.of(seed).fold(row).permutation(size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers_fill_the_half_open_interval_evenly(dtype):
    values = Key.of(5).uniform(200_000, dtype=dtype)
    assert float(values.min()) >= 0
    assert float(values.max()) < 1
    counts = torch.histc(values.double(), 20, 0, 1)
    expected = len(values) / 20
    assert float(((counts - expected) ** 2 / expected).sum()) < 45  # chi-square, 19 degrees, p about 7e-4
    assert abs(float(torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1])) < 0.01


def test_numbers_of_neighbouring_keys_are_independent():
    values = Key.of(5).each(torch.arange(20_000)).uniform(2, dtype=torch.float64)
    assert abs(float(values.mean()) - 0.5) < 0.01
    assert abs(float(torch.corrcoef(values.T)[0, 1])) < 0.03
    assert abs(float(torch.corrcoef(torch.stack([values[:-1, 0], values[1:, 0]]))[0, 1])) < 0.03


def test_the_largest_bits_do_not_round_up_to_one():
    class Highest(Key):
        def bits(self, *shape, device=None):
            return torch.full(shape, -1)

    for dtype in (torch.float32, torch.float64):
        assert float(Highest(0).uniform(1, dtype=dtype)) < 1.0
    assert bool(Highest(0).normal(1, dtype=torch.float64).isfinite())


def test_normal_numbers_have_the_right_moments():
    values = Key.of(6).normal(200_000, dtype=torch.float64)
    moments = [float(values.mean()), float(values.var()), float((values**3).mean()), float((values**4).mean())]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.05)


@given(SEEDS, st.integers(0, 30), st.integers(0, 30))
def test_choice_is_distinct_sorted_and_in_range(seed, size, more):
    chosen = Key.of(seed).choice(size + more, size).tolist()
    assert chosen == sorted(set(chosen))
    assert len(chosen) == size
    assert all(0 <= one < size + more for one in chosen)


def test_choice_takes_every_member_equally_often():
    counts = torch.zeros(7)
    for seed in range(3000):
        counts[Key.of(seed).choice(7, 3)] += 1
    assert counts.tolist() == pytest.approx([3000 * 3 / 7] * 7, rel=0.08)


def test_choice_costs_what_it_chooses_not_the_population():
    begin = time.perf_counter()
    chosen = Key.of(1).choice(10**15, 100)
    assert time.perf_counter() - begin < 1
    assert len(set(chosen.tolist())) == 100


def test_generators_of_one_key_agree():
    one, other = Key.of(9).fold("g").generator(), Key.of(9).fold("g").generator()
    assert torch.equal(torch.rand(4, generator=one), torch.rand(4, generator=other))
    assert 0 <= Key.of(9).seed() < 2**63


@pytest.mark.parametrize("seed", [1.5, "1", None, 1 << 70, 1 << 63, -(1 << 63) - 1])
def test_a_seed_that_would_be_another_one_is_refused(seed):
    with pytest.raises(SpecError, match="a seed must"):
        Key.of(seed)
    assert Key.of(-(1 << 63)).state != Key.of((1 << 63) - 1).state


@pytest.mark.parametrize("label", [1.0, None, (1,)])
def test_a_label_is_a_text_or_a_whole_number_whatever_was_asked_before(label):
    known = Key.of(0).fold(1)
    with pytest.raises(SpecError, match="a label of a key must be a text or a whole number"):
        Key.of(0).fold(label)
    assert Key.of(0).fold(np.int64(1)).state == known.state  # type: ignore[arg-type]


def compiled(digits, tmp_path):
    """The function of the CUDA kernel, compiled for this machine's processor."""
    source, library = tmp_path / f"drawn{digits}.cpp", tmp_path / f"drawn{digits}.so"
    entry = 'extern "C" long drawn_of(long key, long counter) { return drawn<long>(key, counter); }'
    source.write_text(f"{cuda_draws.code(digits)}\n{entry}\n")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)
    function = ctypes.CDLL(str(library)).drawn_of
    function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64, ctypes.c_int64]
    return function


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("digits", [64, 53, 24])
def test_the_cuda_kernel_computes_the_draws_of_a_key(digits, tmp_path):
    function, key = compiled(digits, tmp_path), Key.of(3).each(torch.arange(4))
    states = torch.as_tensor(key.state).tolist()
    found = [[function(state, number) for number in range(1, 8)] for state in states]
    assert torch.tensor(found).equal(key.whole(digits, 7))
    # torch's own reader of such code finds the function in it
    assert torch.cuda.jiterator._CodeParser(cuda_draws.code(digits)).function_name == "drawn"


@pytest.mark.parametrize("digits", [64, 53, 24])
def test_the_operation_of_the_cuda_kernel_under_vmap(digits, monkeypatch):
    monkeypatch.setattr(cuda_draws, "_kernel", lambda wanted: lambda keys, counter: _drawn(keys, counter, wanted))
    states, counter = torch.as_tensor(Key.of(3).each(torch.arange(6)).state).reshape(2, 3), torch.arange(1, 5)

    def one(state):
        return cuda_draws.drawn(state.unsqueeze(-1), counter, digits)

    expected = Key(states).whole(digits, 4)
    assert torch.func.vmap(torch.func.vmap(one))(states).equal(expected)
    assert torch.func.vmap(one)(states).equal(expected)
    assert torch.func.vmap(one, in_dims=1, out_dims=1)(states).equal(expected)
    assert one(states).equal(expected)


@pytest.mark.parametrize("wrong", [False, True])
def test_the_first_use_of_the_kernel_compares_it_even_inside_transforms(wrong, monkeypatch):
    seen = []

    def kernel(digits):
        def call(keys, counter):
            assert not any(map(is_functorch_wrapped_tensor, (keys, counter)))
            return _drawn(keys, counter, digits) + wrong

        return call

    def step(weight, state):
        seen.append(cuda_draws._agrees(torch.device("cpu"), _drawn))
        return weight * cuda_draws.drawn(state.unsqueeze(-1), torch.arange(1, 3), 24).sum()

    monkeypatch.setattr(cuda_draws, "_kernel", kernel)
    states = Key.of(3).each(torch.arange(2)).state
    found = torch.func.vmap(torch.func.grad(step))(torch.ones(2), states)
    assert seen == [not wrong]
    assert found.equal((Key(states).whole(24, 2) + wrong).sum(1).to(torch.float32))


def test_what_is_not_on_cuda_does_not_use_the_kernel():
    assert not cuda_draws.usable(torch.zeros(2, dtype=torch.int64), _drawn)

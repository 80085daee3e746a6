"""What travels: every pair of wires is packed without a loss, counted as it is packed, and never below nothing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedalloy.core import registry, tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.client import Assignment, run_client
from fedalloy.core.errors import AlgorithmError
from fedalloy.core.keys import Key
from fedalloy.core.packing import bytes_up, pack, unpack
from fedalloy.core.protocols import Wire
from fedalloy.core.types import Context, Payload, Tree
from fedalloy.experiment.fit import fit
from fedalloy.methods.servers.langevin import Langevin
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.energy import Energy
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.energies import Energies
from fedalloy.methods.weightings.samples import Samples
from fedalloy.methods.wires.clip import Clip
from fedalloy.methods.wires.feedback import ErrorFeedback
from fedalloy.methods.wires.noise import Noise
from fedalloy.methods.wires.scaled_sign import ScaledSign
from fedalloy.methods.wires.topk import TopK
from fedalloy.testing import small_task, specimen

PAIRS = list(itertools.product(registry.names("wire"), repeat=2))


def chain(*kinds: str) -> tuple[Wire, ...]:
    """The wires of these kinds in this order, noise with the clipping that it needs."""
    made: list[Wire] = []
    for kind in kinds:
        made += [specimen("wire", "clip")] if kind == "noise" else []
        made.append(TopK(0.2) if kind == "topk" else specimen("wire", kind))
    return tuple(made)


def form_of(kinds: tuple[str, ...]) -> str:
    """The form in which an update travels behind these wires."""
    form = "plain"
    for kind in kinds:
        form = {"clip": form, "noise": "plain"}.get(kind, kind)
    return form


def encoded(wires: tuple[Wire, ...], leaves: Tree, seed: int = 0) -> Payload:
    """What a client sends when its memories are not empty."""
    shared, payload = {"params": leaves, "buffers": {}}, {"delta": leaves}
    for place, wire in enumerate(wires):
        mine = wire.init_client(shared, Key.of(seed))
        draws = tree.rows(wire.draws(shared, Key.of(seed).fold(place).each(torch.tensor([1]))), 0)
        for _ in range(2):
            payload, mine = wire.encode(payload, mine, draws)
    return payload


def by_hand(kinds: tuple[str, ...], leaves: Tree) -> int:
    """What the form takes: counted apart from the code, from the numbers that are sent."""
    numbers = torch.cat([leaf.flatten() for leaf in leaves.values()])
    length, width, form = len(numbers), numbers.element_size(), form_of(kinds)
    if form == "topk":
        return max(1, math.floor(0.2 * length + 1e-9)) * (width + (1 if length <= 256 else 2))
    if form == "scaled_sign":
        there = int((numbers != 0).sum())
        return math.ceil(there / 8) + (0 if there == length else math.ceil(length / 8)) + width
    return length * width


def model(seed: int, rows: int, columns: int, zeros: float, dtype: torch.dtype) -> Tree:
    key = Key.of(seed)
    leaves = {"a": key.fold("a").normal(rows, columns, dtype=dtype), "b": key.fold("b").normal(rows, dtype=dtype)}
    return {name: leaf * (key.fold("zero", name).uniform(*leaf.shape) >= zeros) for name, leaf in leaves.items()}


@pytest.mark.parametrize("kinds", PAIRS, ids="->".join)
@settings(max_examples=15)
@given(
    st.integers(0, 99),
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_every_pair_is_counted_by_hand_and_comes_back_whole(kinds, seed, rows, columns, zeros, dtype):
    wires, leaves = chain(*kinds), model(seed, rows, columns, zeros, dtype)
    packings = Algorithm(Sgd(), Samples(), ServerSgd(), wires).packings
    sent = encoded(wires, leaves, seed)
    counted = bytes_up({"delta": tree.stack([sent["delta"]])}, packings, 1).tolist()
    assert counted == [by_hand(kinds, sent["delta"])]
    assert counted[0] > 0
    packed = pack(sent, packings)
    assert tree.nbytes(packed["delta"]) == counted[0], "what is counted is what travels"
    back = unpack(packed, packings, {"delta": leaves})["delta"]
    assert all(torch.equal(back[name], sent["delta"][name]) for name in leaves)


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("kinds", PAIRS, ids="->".join)
def test_engines_count_every_pair(kinds, engine):
    """Fifteen numbers of 8 bytes, none of them zero, at five clients."""
    # The plain kernel: a sign has no tolerance for another rounding.
    options = {"kernel": "mapped"} if engine == "batched" else {}
    algorithm = Algorithm(Sgd(lr=0.2, batch_size=3), Samples(), ServerSgd(), chain(*kinds))
    found = fit(algorithm, small_task("linear"), rounds=2, engine=engine, engine_options=options)
    one = {"plain": 15 * 8, "topk": 3 * (8 + 1), "scaled_sign": 2 + 8}[form_of(kinds)]
    if kinds == ("topk", "scaled_sign"):
        one = 2 + 1 + 8  # which three are there, and their signs
    assert [row["bytes_up"] for row in found.rounds()] == [5 * one] * 2


def test_a_sign_of_a_sparse_update_names_its_zeros():
    leaves = {"w": torch.tensor([3.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])}
    sent, _ = ScaledSign().encode({"delta": leaves}, {"residual": tree.zeros_like(leaves)}, {})
    packed = ScaledSign().pack(sent["delta"])
    assert {name: leaf.tolist() for name, leaf in packed.items()} == {
        "scales": [pytest.approx(4 / 9)], "signs": [0b01], "there": [0b101, 0],
    }  # fmt: skip
    assert torch.equal(ScaledSign().unpack(packed, leaves)["w"], sent["delta"]["w"])


def test_positions_use_the_smallest_integer():
    for length, size in ((256, 1), (257, 2), (65_536, 2), (65_537, 4)):
        vector = {"w": torch.zeros(length)}
        vector["w"][-1] = 5.0
        packed = TopK(1e-9).pack(vector)
        assert packed["places"].element_size() == size
        assert torch.equal(TopK(1e-9).unpack(packed, vector)["w"], vector["w"])


@pytest.mark.parametrize("wire", [ScaledSign(), TopK(0.5)])
@pytest.mark.parametrize("more", [(), (Clip(0.1),)])
def test_two_precisions_in_one_model_come_back_as_they_were(wire: ErrorFeedback, more):
    leaves = {"a": Key.of(0).normal(7), "b": Key.of(1).normal(5, dtype=torch.float64)}
    sent = encoded((wire, *more), leaves)["delta"]
    packed = wire.pack(sent)
    back = wire.unpack(packed, leaves)
    assert all(torch.equal(back[name], sent[name]) and back[name].dtype == sent[name].dtype for name in leaves)
    assert wire.packed_bytes(tree.stack([sent])).tolist() == [tree.nbytes(packed)]


LIKE = {"w": torch.zeros(20)}
LARGEST, SIGNS = TopK(0.2).pack({"w": torch.arange(20.0)}), ScaledSign().pack({"w": torch.arange(20.0)})


@pytest.mark.parametrize(
    ("wire", "packed", "said"),
    [
        (TopK(0.2), {}, "instead of places, values"),
        (TopK(0.2), {**LARGEST, "more": torch.zeros(1)}, "instead of places, values"),
        (TopK(0.2), {**LARGEST, "values": torch.zeros(5)}, r"shape \(5,\) instead of"),
        (TopK(0.2), {**LARGEST, "values": torch.zeros(4, dtype=torch.float64)}, "float64"),
        (TopK(0.2), {**LARGEST, "places": torch.tensor([1, 2, 3, 20], dtype=torch.uint8)}, "positions below 20"),
        (TopK(0.2), {**LARGEST, "places": torch.tensor([1, 2, 2, 3], dtype=torch.uint8)}, "ascending"),
        (ScaledSign(), {**SIGNS, "there": torch.zeros(9, dtype=torch.uint8)}, r"shape \(9,\) instead of"),
        (ScaledSign(), {"scales": SIGNS["scales"], "signs": SIGNS["signs"][:1]}, "'signs'"),
        (ScaledSign(), {**SIGNS, "scales": torch.zeros(2)}, "'scales'"),
    ],
)
def test_what_pack_never_writes_is_refused(wire, packed, said):
    with pytest.raises(ValueError, match=said):
        wire.unpack(packed, LIKE)


def test_factors_cannot_be_compressed():
    with pytest.raises(AlgorithmError, match=r"'factors' cannot be compressed: its neutral number is 1"):
        Algorithm(Energy(), Energies(), Langevin(), (TopK(part="factors", like="factors"),))
    Algorithm(Energy(), Energies(), Langevin(), (TopK(part="energy_grad", like="samples"),))


def test_an_update_of_a_failed_link_is_counted_in_the_same_form():
    task, algorithm = small_task(), Algorithm(Sgd(batch_size=3), Samples(), ServerSgd(), (TopK(0.1),))
    params, _ = task.objective.init(Key.of(0))
    shared = algorithm.init(params, 5)["shared"]
    work = Assignment(task.data("train", torch.tensor([3])).client(0), active=False)
    ctx, keys = Context(1, 5, Key.of(1)), Key.of(1).each(torch.tensor([3]))
    found = run_client(algorithm, task.objective, shared, algorithm.init_client(shared, Key.of(2)), work, keys, ctx)
    assert found.stats["bytes_up"] == tree.nbytes(pack(found.payload, algorithm.packings)["delta"])


def test_noise_after_compression_sends_everything():
    assert not Algorithm(Sgd(), Samples(), ServerSgd(), (TopK(), Clip(), Noise())).packings

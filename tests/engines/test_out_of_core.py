"""Contributions on disk: the same answers as from memory, whatever the engine; nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedalloy import algorithms
from fedalloy.core import registry, tree
from fedalloy.core.contributions import Contributions, Notes
from fedalloy.core.elements import combine_elements
from fedalloy.core.errors import SpecError
from fedalloy.core.gathering import Gathering
from fedalloy.core.keys import Key
from fedalloy.core.protocols import ElementWeighting, Engine
from fedalloy.core.types import Context, Payload, Work
from fedalloy.engines import mapped_rows, piece_memory, processes
from fedalloy.engines.batched import Batched
from fedalloy.engines.loop import Loop
from fedalloy.engines.mapped_rows import MappedRows, check_on_disk
from fedalloy.engines.out_of_core import FileRows, MappedContributions, StorageLimit
from fedalloy.engines.shared_cohort import Overwritten
from fedalloy.engines.shared_memory import Layout
from fedalloy.engines.workers import Workers
from fedalloy.experiment.fit import fit
from fedalloy.tasks.devices import DeviceProfile
from fedalloy.testing import small_task, specimen
from fedalloy.testing.answers import answered
from fedalloy.testing.comparing import differences
from tests.engines.rounds import play, shared_of

LEAVES: dict[str, tuple[int, ...]] = {"a.weight": (3, 5), "a.bias": (), "b.weight": (700,), "none": (0,)}


def payload_of(clients: int, seed: int = 0, leaves: Mapping[str, tuple[int, ...]] = LEAVES) -> Payload:
    key = Key.of(seed)
    delta = {name: key.fold(name).normal(clients, *shape) for name, shape in leaves.items()}
    return {"delta": delta, "buffers": {"n": torch.arange(clients * 2).reshape(clients, 2)}}


def both(payload: Payload, ids: list[int], folder: Path) -> tuple[Contributions, Contributions]:
    """The same contributions in memory and on disk, where they arrive one by one, in another order."""
    stats = {"num_examples": torch.arange(1.0, 1 + len(ids), dtype=torch.float64)}
    stats |= {name: torch.ones(len(ids), dtype=torch.float64) for name in ("num_steps", "bytes_up", "train_loss")}
    like = {part: {name: leaf[0] for name, leaf in leaves.items()} for part, leaves in payload.items()}
    found = []
    for storage in (None, StorageLimit(0.0, folder)):
        gathering = Gathering(Work.of(torch.tensor(ids)), exact=True, like=like, storage=storage)
        for row in Key.of(1).permutation(len(ids)).tolist():
            only = {part: tree.rows(leaves, torch.tensor([row])) for part, leaves in payload.items()}
            mine = {name: values[[row]] for name, values in stats.items()}
            assert gathering.add(torch.tensor([ids[row]]), only, mine) is None
        found.append(gathering.cohort())
    return found[0], found[1]


def neutral(payload: Payload) -> Payload:
    return {
        part: {name: torch.zeros_like(leaf[0]) for name, leaf in leaves.items()} for part, leaves in payload.items()
    }


@settings(max_examples=12, deadline=None)
@given(clients=st.integers(2, 40), slab=st.sampled_from([1, 3_000, 1 << 20]), chunk=st.sampled_from([1, 64, 1 << 20]))
def test_every_answer_is_that_of_the_matrix_in_memory(tmp_path_factory, clients, slab, chunk):
    payload = payload_of(clients, clients)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped_rows, "SLAB_BYTES", slab)
        patch.setattr(mapped_rows, "_LEAST_READ", 4)
        patch.setattr(tree, "_ELEMENTS", chunk)
        patch.setattr(tree, "COLUMNS", 64)
        patch.setattr(tree, "SMALL", 100)
        inside, outside = both(payload, [3 * i for i in range(clients)], tmp_path_factory.mktemp("rows"))
        assert isinstance(outside, MappedContributions)
        assert not list(differences(answered(inside, neutral(payload)), answered(outside, neutral(payload)), 0.0))


def test_sums_are_those_of_memory_to_the_last_bit(tmp_path):
    leaves = {"w": (3 * tree.COLUMNS + 77,), "v": (9,)}
    inside, outside = both(payload_of(30, 1, leaves), list(range(30)), tmp_path)
    weights = Key.of(5).uniform(30, dtype=torch.float64)
    one, other = (cohort.combine("delta", weights) for cohort in (inside, outside))
    assert all(torch.equal(one[name], other[name]) for name in leaves)
    by_leaf = {name: weights * (1 + row) for row, name in enumerate(leaves)}
    one, other = (cohort.combine("delta", by_leaf) for cohort in (inside, outside))
    assert all(torch.equal(one[name], other[name]) for name in leaves)
    exact = weights @ inside.payload["delta"]["w"].double()
    assert torch.allclose(outside.combine("delta", weights)["w"].double(), exact, atol=1e-6)


def test_single_numbers_of_very_many_clients_are_summed_as_in_memory(tmp_path):
    clients = tree.SMALL + 77
    payload = {"delta": {"scale": Key.of(1).normal(clients), "w": Key.of(2).normal(clients, 3)}}
    like = {"delta": {name: leaf[0] for name, leaf in payload["delta"].items()}}
    found, weights = list[Payload](), Key.of(3).uniform(clients, dtype=torch.float64)
    for storage in (None, StorageLimit(0.0, tmp_path)):
        gathering = Gathering(Work.of(torch.arange(clients)), exact=True, like=like, storage=storage)
        for some in torch.arange(clients).split(5000):
            only = {"delta": tree.rows(payload["delta"], some)}
            assert gathering.add(some, only, {"num_examples": weights[some]}) is None
        cohort = gathering.cohort()
        found.append(
            {
                "sum": cohort.combine("delta", weights),
                "by leaf": cohort.combine("delta", {"scale": weights, "w": weights}),
            }
        )
    assert not list(differences(found[0], found[1], 0.0))


def test_inner_products_in_float64_are_those_of_memory_to_the_last_bit(tmp_path):
    """Rows on disk begin at other places of a page, and products of vectors may be added in an order that depends on
    that."""
    for width in (1, 137, 16_383, 40_001):
        payload = {"delta": {"w": Key.of(width).normal(33, width, dtype=torch.float64)}}
        inside, outside = both(payload, list(range(33)), tmp_path)
        other = {"w": Key.of(2).normal(width, dtype=torch.float64)}
        assert torch.equal(inside.dots("delta", other)["w"], outside.dots("delta", other)["w"]), width


# ``energies`` weighs samples, of which these payloads have none.
@pytest.mark.parametrize("rule", sorted(set(registry.names("weighting")) - {"energies"}))
def test_every_rule_says_the_same_as_from_memory(rule, tmp_path):
    weighting, key = specimen("weighting", rule), Key.of(1)
    stats = {name: key.fold(name).uniform(8, dtype=torch.float64) + 0.1 for name in weighting.requires}
    cohorts = both({part: payload_of(8)["delta"] for part in {"delta", *weighting.reads}}, list(range(8)), tmp_path)
    ctx, cross, found = (
        Context(1, 8, key, local_lr=0.1),
        key.uniform(8, 8, dtype=torch.float64),
        list[tuple[Any, ...]](),
    )
    for cohort in (cohort.with_stats(stats).with_cross(cross) for cohort in cohorts):
        if isinstance(weighting, ElementWeighting):
            round = weighting.open(cohort, weighting.init(8), ctx)
            found.append((*combine_elements(round, cohort, "delta", ("delta",)), *round.close()))
        else:
            weights, state, info = weighting.weigh(cohort, weighting.init(8), ctx)
            found.append((weights, cohort.combine("delta", weights), state, info))
    one, other = ({str(place): value for place, value in enumerate(answer)} for answer in found)
    assert not list(differences(one, other, 0.0))


@pytest.fixture(params=["loop", "batched", "workers"])
def engine(request) -> Iterator[Callable[[], Engine]]:
    made: list[Engine] = []

    def make() -> Engine:
        kinds: dict[str, Callable[[], Engine]] = {
            "loop": Loop, "batched": lambda: Batched(block=2), "workers": lambda: Workers(2),
        }  # fmt: skip
        made.append(kinds[request.param]())
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_engines_write_to_disk_and_answer_as_before(engine, name, tmp_path):
    algorithm, task = algorithms.named(name, lr=0.1, batch_size=2), small_task()
    usual, there = engine(), engine()
    there.keep_contributions(StorageLimit(0.0, tmp_path))
    inside, outside = play(usual, algorithm, task), play(there, algorithm, task)
    assert isinstance(outside.cohort, MappedContributions)
    given = algorithm.neutral(shared_of(algorithm, task))
    assert not list(differences(answered(inside.cohort, given), answered(outside.cohort, given), 0.0))
    assert not list(tmp_path.iterdir())


def test_rows_that_workers_use_again_are_refused_and_kept_ones_are_not(tmp_path):
    engine, algorithm, task = Workers(2), algorithms.fedavg(lr=0.1, batch_size=2), small_task()
    engine.keep_contributions(StorageLimit(0.0, tmp_path))
    try:
        first = play(engine, algorithm, task).cohort
        weights = torch.ones(len(first), dtype=torch.float64)
        kept, before = first.keep(), first.combine("delta", weights)
        play(engine, algorithm, task, round=2)
        with pytest.raises(Overwritten):
            first.combine("delta", weights)
        assert all(torch.equal(leaf, kept.combine("delta", weights)[name]) for name, leaf in before.items())
    finally:
        engine.close()


def test_missing_clients_leave_their_rows_out(tmp_path):
    payload = payload_of(4)
    like = {part: {name: leaf[0] for name, leaf in leaves.items()} for part, leaves in payload.items()}
    gathering = Gathering(Work.of(torch.arange(4)), exact=True, like=like, storage=StorageLimit(0.0, tmp_path))
    for row in (3, 1):
        only = {part: tree.rows(leaves, torch.tensor([row])) for part, leaves in payload.items()}
        gathering.add(torch.tensor([row]), only, {"num_examples": torch.tensor([1.0 + row])})
    came = gathering.cohort()
    assert came.ids.tolist() == [1, 3]
    assert came.stats["num_examples"].tolist() == [2.0, 4.0]
    assert torch.equal(came.stack("delta")["b.weight"], payload["delta"]["b.weight"][[1, 3]])
    assert torch.equal(came.norms("delta"), Notes.of(payload).take(torch.tensor([1, 3])).norms("delta"))


def test_late_twice_with_other_contents_counts_each_as_given(tmp_path):
    payload = payload_of(3)
    _, outside = both(payload, [0, 1, 2], tmp_path)
    zeros = neutral(payload)
    ones = {part: {name: torch.ones_like(leaf) for name, leaf in leaves.items()} for part, leaves in zeros.items()}
    late = outside.resend(torch.tensor([0]), zeros).resend(torch.tensor([2]), ones)
    found = late.stack("delta")["b.weight"]
    assert not found[0].any()
    assert bool((found[2] == 1).all())
    assert torch.equal(found[1], payload["delta"]["b.weight"][1])


def test_a_limit_decides_and_rows_below_it_stay_in_memory(tmp_path):
    like = {"delta": {"w": torch.zeros(1000)}}
    storage = StorageLimit(0.04, tmp_path)
    assert storage.open(10, like) is None
    assert isinstance(storage.open(11, like), FileRows)
    assert storage.open(10**6, {"delta": {}}) is None
    assert storage.open(11, {"delta": {"w": torch.zeros(1000, device="meta")}}) is None


def test_a_run_is_the_same_on_disk_and_in_memory(tmp_path):
    settings: dict[str, Any] = {"rounds": 3, "seed": 1, "engine": "loop", "devices": DeviceProfile(success=(0.6,) * 5)}
    task, algorithm = small_task(), algorithms.fedadp(lr=0.1, batch_size=2)
    usual = fit(algorithm, task, **settings, folder=tmp_path / "a")
    there = fit(algorithm, task, **settings, folder=tmp_path / "b", contributions_mb=0.0)
    assert list(usual.rounds()) == list(there.rounds())
    records = [(tmp_path / name / "rounds.jsonl").read_bytes() for name in ("a", "b")]
    assert records[0] == records[1]


def test_resuming_with_another_limit_is_allowed(tmp_path):
    task, algorithm = small_task(), algorithms.fedavg(lr=0.1, batch_size=2)
    fit(algorithm, task, rounds=2, folder=tmp_path / "run", engine="loop", contributions_mb=0.0)
    longer = fit(algorithm, task, rounds=4, folder=tmp_path / "run", engine="loop", resume=True)
    assert [row["round"] for row in longer.rounds()] == [1, 2, 3, 4]


def test_folders_in_memory_are_refused(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\ntmpfs {tmp_path}/fast tmpfs rw 0 0\n")
    monkeypatch.setattr(mapped_rows, "_MOUNTS", mounts)
    with pytest.raises(SpecError, match="contributions_folder"):
        MappedRows(1, Layout.of({"delta": {"w": torch.zeros(2)}}), tmp_path / "fast" / "below")
    check_on_disk(tmp_path)
    monkeypatch.setattr(mapped_rows, "_MOUNTS", tmp_path / "none")
    check_on_disk(tmp_path / "fast")


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"need 0\.0 GB in .*contributions_folder"):
        MappedRows(1, Layout.of({"delta": {"w": torch.zeros(2)}}), tmp_path)


def test_workers_that_are_not_forks_refuse_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "forks", lambda: False)
    engine = Workers(2)
    engine.keep_contributions(StorageLimit(0.0, tmp_path))
    with pytest.raises(SpecError, match="forked"):
        play(engine, algorithms.fedavg(lr=0.1), small_task())


def test_nothing_is_left_after_a_kill(tmp_path):
    script = textwrap.dedent("""
        import sys, torch, os, signal
        from pathlib import Path
        from fedalloy.engines.out_of_core import StorageLimit
        rows = StorageLimit(0.0, Path(sys.argv[1])).open(10, {"delta": {"w": torch.zeros(100_000)}})
        rows.put(torch.arange(10), {"delta": {"w": torch.ones(10, 100_000)}})
        assert float(rows.rows.bytes.sum()) > 0
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=120)
    assert ended.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_chunks_may_be_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped_rows, "SLAB_BYTES", 1)
    monkeypatch.setattr(mapped_rows, "_LEAST_READ", 4)
    monkeypatch.setattr(tree, "_ELEMENTS", 30)
    payload = payload_of(3)
    _, outside = both(payload, [0, 1, 2], tmp_path)
    kept: list[Tensor] = [columns for chunk, (columns,) in outside.chunks(("delta",)) if chunk.leaf == "b.weight"]
    assert torch.equal(torch.cat(kept, dim=1), payload["delta"]["b.weight"])


def test_a_damaged_answer_is_found_by_the_comparison(tmp_path):
    """The planted fault: one row of the file is another client's."""
    payload = payload_of(4)
    inside, outside = both(payload, [0, 1, 2, 3], tmp_path)
    assert isinstance(outside, MappedContributions)
    wrong = replace(outside, places=torch.tensor([0, 2, 1, 3]))
    assert list(differences(answered(inside, neutral(payload)), answered(wrong, neutral(payload)), 0.0))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_rows_that_were_written_are_no_memory_of_this_process(tmp_path):
    """They are in the file; before, what a server with 100 clients received counted as its own memory."""
    like = {"delta": {"w": torch.zeros(1 << 20)}}
    rows = FileRows(MappedRows(16, Layout.of(like), tmp_path), StorageLimit(0, tmp_path))
    one = {"delta": {"w": torch.ones(1, 1 << 20)}}

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    for place in range(16):
        rows.put(torch.tensor([place]), one)
    assert resident() - before < 16 << 20, "of 64 MB"
    assert float(rows.rows.bytes.view(torch.float32).sum()) == 16 << 20


@pytest.mark.parametrize("reuse", [False, True])
def test_pieces_that_somebody_keeps_are_not_overwritten(reuse, tmp_path, monkeypatch):
    """Memory is used again only when no tensor is in it any more, be it a view of a view."""
    rows = MappedRows(3, Layout.of({"delta": {"w": torch.zeros(40)}}), tmp_path)
    (slot,) = rows.layout.slots
    rows.leaf(slot).copy_(expected := torch.arange(120.0).reshape(3, 40))
    made = Mock(side_effect=piece_memory.mapped)
    monkeypatch.setattr(piece_memory, "mapped", made)
    if not reuse:
        views = [piece[1:, 2:3].T for _, piece in rows.slabs(slot, [0, 1, 2], 4)]
        assert torch.equal(torch.cat([view[0] for view in views]), expected[1:, 2::4].T.flatten())
        assert made.call_count == 10
        made.reset_mock()
    for begin, piece in rows.slabs(slot, [0, 1, 2], 4, reuse=reuse):
        assert torch.equal(piece, expected[:, begin : begin + 4])
        del piece
    assert made.call_count <= 3

"""A state survives the disk bit for bit, and a damaged file never passes for a good one."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.records import checkpoint

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def bits(leaf: Tensor) -> bytes:
    return leaf.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def same(one: Any, other: Any) -> bool:
    """Equal types, shapes, dtypes and bits; NaN equals the same NaN, -0.0 differs from 0.0."""
    if isinstance(one, Tensor):
        alike = isinstance(other, Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return alike and bits(one) == bits(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits of any dtype in any small shape, contiguous or not."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    content = torch.frombuffer(bytearray(draw(st.binary(min_size=size, max_size=size)) or b"\0"), dtype=torch.uint8)
    content = content % 2 if dtype is torch.bool else content
    leaf = content[:size].clone().view(dtype).reshape(shape)
    leaf = leaf.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else leaf
    return leaf[..., ::2] if len(shape) > 0 and draw(st.booleans()) else leaf


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
awkward = ["", "/", "a/b", "\\", "\\0", "\\x2f", "__metadata__", "fc.weight", "\ud800"]
keys = st.text(max_size=3) | st.sampled_from(awkward)
lists = st.lists(scalars, max_size=3)
leaves = tensors() | scalars | lists | lists.map(tuple)
states = st.dictionaries(
    keys, st.recursive(leaves, lambda inner: st.dictionaries(keys, inner, max_size=3), max_leaves=8), max_size=4
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints") / "state.safetensors"


def example() -> dict[str, Any]:
    return {
        "server": {"shared": {"fc.weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(3)}, "empty": {}},
        "clients": {"7": {"mean": torch.randn(4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)}},
        "rate": 0.1, "names": ["a", "b"], "pair": (1, None), "worst": float("inf"),
    }  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(state=states)
def test_a_state_comes_back_bit_for_bit(place: Path, state: dict[str, Any]) -> None:
    checkpoint.save(place, state)
    assert same(checkpoint.load(place), state)


@settings(max_examples=100, deadline=None)
@given(state=states)
def test_unflatten_undoes_flatten(state: dict[str, Any]) -> None:
    assert same(checkpoint.unflatten(*checkpoint.flatten(state)), state)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_never_goes_unnoticed(place: Path, data: st.DataObject) -> None:
    checkpoint.save(place, example())
    content = bytearray(place.read_bytes())
    position = data.draw(st.integers(0, 8 * len(content) - 1))
    content[position // 8] ^= 1 << position % 8
    place.write_bytes(content)
    try:
        state = checkpoint.load(place)
    except CheckpointError:
        return
    # Blanks pad the header: a change there (or one that JSON reads alike) is no change of the state.
    assert same(state, example())


def test_a_flipped_bit_in_a_tensor_is_refused(place: Path) -> None:
    checkpoint.save(place, example())
    content = bytearray(place.read_bytes())
    content[-1] ^= 1
    place.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum"):
        checkpoint.load(place)


def test_a_truncated_file_is_refused_at_every_length(place: Path) -> None:
    checkpoint.save(place, example())
    content = place.read_bytes()
    for length in range(0, len(content), 7):
        place.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"state\.safetensors"):
            checkpoint.load(place)


def test_a_missing_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path / "none.safetensors")


def test_equal_states_give_equal_files(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    checkpoint.save(one, example())
    checkpoint.save(other, example())
    assert one.read_bytes() == other.read_bytes()


def test_views_and_shared_memory_are_stored_apart(place: Path) -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    parts = {"row": matrix[1], "column": matrix[:, 1], "part": matrix[1:, 2:], "one": matrix[:1, 3]}
    state = {"whole": matrix, "again": matrix, **parts}
    checkpoint.save(place, state)
    loaded = checkpoint.load(place)
    assert same(loaded, state)
    loaded["whole"].zero_()
    assert bool((loaded["again"] == matrix).all())


def test_awkward_names_stay_apart(place: Path) -> None:
    one = torch.ones(1)
    state = {"": {"a": one, "": one * 2}, "a": one * 3, "a/b": one * 4, "c": {"b": one * 5}, "c/b": one * 6}
    state |= {"\\0": one * 7, "__metadata__": one * 8, "\\x5f_metadata__": one * 9, "\\x2f": one * 10, "/": one * 11}
    assert len(checkpoint.flatten(state)[0]) == 11
    checkpoint.save(place, state)
    assert same(checkpoint.load(place), state)


def test_graph_and_lazy_conjugate_are_left_behind(place: Path) -> None:
    weight = torch.ones(2, requires_grad=True)
    state = {"grown": weight * 2, "conj": torch.tensor([1 + 2j]).conj(), "neg": torch.tensor([1 + 2j]).conj().imag}
    checkpoint.save(place, state)
    loaded = checkpoint.load(place)
    assert not loaded["grown"].requires_grad
    assert loaded["conj"].item() == 1 - 2j
    assert loaded["neg"].item() == -2


def test_a_loaded_state_does_not_depend_on_its_file(place: Path) -> None:
    checkpoint.save(place, {"w": torch.ones(1000)})
    loaded = checkpoint.load(place)
    with place.open("r+b") as file:
        file.truncate(10)
    assert float(loaded["w"].sum()) == 1000


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": object()}}, "'a/b' is a object"),
        ({"a": {3: 1}}, "'a' has the key 3"),
        ({"a": torch.eye(2).to_sparse()}, "sparse"),
        ({"a": torch.empty(2, device="meta")}, "without data"),
    ],
)
def test_what_cannot_be_stored_is_named(place: Path, state: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        checkpoint.save(place, state)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.safetensors"
    checkpoint.save(path, {"a": 1})

    def full(tensors: Any, temporary: Path, metadata: Any) -> None:
        temporary.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(path, {"a": 2})
    assert checkpoint.load(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_future_format_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", 3)
    checkpoint.save(place, {"a": 1})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format is 3"):
        checkpoint.load(place)


def test_loading_is_silent(place: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(place, example())
        checkpoint.load(place)

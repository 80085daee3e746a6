"""Keyed randomness: every draw is a function of a named key, never of call order.

A key is a path (seed, round, client, stream, ...) hashed to 64 bits. Draws are counter based: number
``i`` of a key is a hash of (key, i), so a block of clients is drawn in one vectorised call and a client
gets the same numbers whether it is drawn alone, in a block, padded or on another device.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from operator import index

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from fedalloy.core import cuda_draws
from fedalloy.core.errors import SpecError
from fedalloy.core.native import draws, tracing
from fedalloy.core.wide import has_float64

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_LAST = torch.iinfo(torch.int64).max

Label = int | str


def _signed(value: int) -> int:
    """The two's-complement reading of 64 bits, which is what an int64 tensor holds."""
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    """The splitmix64 finaliser: a bijection that spreads every input bit over all output bits."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift: int64 tensors shift their sign in, 64 plain bits do not."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_tensor(value: Tensor) -> Tensor:
    """``_mix`` for a batch. Batches are small, so the overhead of a call counts: on a CPU the same bits are mixed as an
    unsigned array, whose calls cost a third and whose shift is logical."""
    if value.dim() == 0 or not _at_hand(value):
        return _mix_anywhere(value)
    bits = value.numpy().view("uint64")
    bits = (bits ^ (bits >> 30)) * _FIRST
    bits ^= bits >> 27
    bits *= _SECOND
    bits ^= bits >> 31
    return torch.from_numpy(bits.view("int64"))


def _at_hand(value: Tensor) -> bool:
    """Whether the numbers of a tensor can be read where they are: on a CPU, and neither under ``vmap`` nor traced."""
    return value.device.type == "cpu" and type(value) is Tensor and not is_functorch_wrapped_tensor(value)


def _compiled(state: int | Tensor) -> bool:
    """Whether a key or a batch of keys can be handled by a compiled function."""
    if not draws.COMPILED or tracing():
        return False
    return isinstance(state, int) or (type(state) is Tensor and state.device.type == "cpu" and state.is_contiguous())


def _mix_anywhere(value: Tensor) -> Tensor:
    """The same on any device and under ``vmap``, in place on its intermediate results."""
    value = _shift(value, 30).bitwise_xor_(value).mul_(_signed(_FIRST))
    value.bitwise_xor_(_shift(value, 27)).mul_(_signed(_SECOND))
    return value.bitwise_xor_(_shift(value, 31))


def _drawn(state: Tensor, counter: Tensor, digits: int) -> Tensor:
    """The first ``digits`` bits of number ``counter`` of every key."""
    return _leading(_mix_tensor(state + counter * _signed(_GOLDEN)), digits)


def _leading(bits: Tensor, digits: int) -> Tensor:
    """The first of 64 bits, as a whole number."""
    return bits if digits == 64 else _shift(bits, 64 - digits)


@lru_cache(maxsize=4096, typed=True)  # typed: 1.0 is no label, also after 1
def _label_bits(label: Label) -> int:
    """64 bits for a label; an integer and the string that spells it differ."""
    if isinstance(label, str):
        return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "big")
    if not isinstance(label, Integral):
        raise SpecError(f"a label of a key must be a text or a whole number, got {label!r}")
    return _mix(int(label) * _GOLDEN + 1)


@dataclass(frozen=True, eq=False)
class Key:
    """An immutable random key, or a whole batch of them.

    ``state`` is an int for one key, or an int64 tensor of any shape for a batch; draws then get the
    batch's axes in front.

    >>> key = Key.of(7).fold("round", 3)
    >>> key.each(torch.tensor([4, 9])).permutation(3).shape
    torch.Size([2, 3])
    >>> bool((key.each(torch.tensor([4, 9])).permutation(3)[1] == key.fold(9).permutation(3)).all())
    True
    """

    state: int | Tensor

    @staticmethod
    def at(state: Tensor) -> Key:
        """The key of a state, as a number where it can be read without waiting for a device: folding is then cheap."""
        if state.device.type != "cpu" or is_functorch_wrapped_tensor(state):
            return Key(state)
        return Key(int(state) & _MASK)

    @staticmethod
    def of(seed: int) -> Key:
        """The root key of an experiment. Seeds of more than 64 bits are refused: they would share keys with smaller
        ones."""
        try:
            number = index(seed)
        except TypeError:
            raise SpecError(f"a seed must be a whole number, got {seed!r}") from None
        if not -(1 << 63) <= number < 1 << 63:
            raise SpecError(f"a seed must lie in -2^63..2^63-1, got one of {number.bit_length()} bits")
        return Key(_mix(_label_bits("fedalloy") ^ _label_bits(number)))

    def fold(self, *labels: Label) -> Key:
        """The key at the end of the path ``labels`` below this one."""
        state = self.state
        for label in labels:
            bits = _label_bits(label)
            if isinstance(state, int):
                state = _mix(state ^ bits)
            elif _compiled(state):
                state = draws.folded(state, bits)
            else:
                state = _mix_tensor(state ^ _signed(bits))
        return Key(state)

    def each(self, labels: Tensor) -> Key:
        """A batch: one key per integer label, equal to ``fold(label)`` for each; new axes come last."""
        labels = labels.to(torch.int64)
        if _compiled(self.state) and _compiled(labels):
            return Key(draws.keyed(self.state, labels))
        bits = _mix_tensor(labels * _signed(_GOLDEN) + 1)
        if isinstance(self.state, int):
            return Key(_mix_tensor(bits ^ _signed(self.state)))
        before = self.state.reshape(*self.state.shape, *([1] * labels.dim()))
        return Key(_mix_tensor(bits ^ before))

    def rows(self, begin: int, end: int) -> Key:
        """Some keys of a batch."""
        assert isinstance(self.state, Tensor), "a single key has no rows"
        return Key(self.state[begin:end])

    def pick(self, index: Tensor) -> Key:
        """The keys of a batch in another order, or some of them."""
        assert isinstance(self.state, Tensor), "a single key has no rows"
        return Key(self.state[index])

    def seed(self) -> int:
        """A 63-bit seed for generators outside fedalloy (torch, numpy)."""
        return int(self.state) & _LAST

    def generator(self) -> torch.Generator:
        """A CPU generator seeded by this key."""
        return torch.Generator().manual_seed(self.seed())

    def bits(self, *shape: int, device: torch.device | str | None = None) -> Tensor:
        """Random int64 values of shape ``batch + shape``."""
        return self.whole(64, *shape, device=device)

    def whole(self, digits: int, *shape: int, device: torch.device | str | None = None) -> Tensor:
        """Random whole numbers of so many bits, from 0 to ``2^digits - 1``; 64 bits include the sign."""
        count = 1
        for extent in shape:
            count *= extent
        if device is None and _compiled(self.state):
            batch = () if isinstance(self.state, int) else self.state.shape
            return _leading(draws.drawn(self.state, count), digits).reshape((*batch, *shape))
        if isinstance(self.state, int):  # as a number it needs no tensor, which would have to be copied to a GPU
            counter = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN)
            return _leading(_mix_tensor(counter + _signed(self.state)), digits).reshape(shape)
        state = self.state if device is None else self.state.to(device)
        counter = torch.arange(1, count + 1, dtype=torch.int64, device=state.device)
        draw = cuda_draws.drawn if cuda_draws.usable(state, _drawn) else _drawn
        return draw(state.unsqueeze(-1), counter, digits).reshape((*state.shape, *shape))

    def uniform(
        self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> Tensor:
        """Values in [0, 1). The grid has 24 bits in float32 so that 1.0 can never appear."""
        digits = 53 if dtype == torch.float64 else 24
        return self.whole(digits, *shape, device=device).to(dtype) * 2.0**-digits

    def normal(
        self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> Tensor:
        """Standard normal values, by the inverse of the normal distribution function."""
        where = device if has_float64(device) else "cpu"
        middle = (self.uniform(*shape, dtype=torch.float64, device=where) + 2.0**-54).clamp(max=1 - 2.0**-53)
        values: Tensor = torch.special.ndtri(middle)
        return values.to(dtype) if where is device else values.to(dtype).to(device)

    def permutation(
        self, length: int, *, valid: Tensor | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """A permutation of ``range(length)``; with ``valid`` (one count per key of the batch) the first
        ``valid`` entries are a permutation of ``range(valid)`` and the rest is padding."""
        if device is None and isinstance(self.state, Tensor) and _compiled(self.state):
            found = draws.ordered(self.state, length, valid) if valid is None or _at_hand(valid) else None
            if found is not None:
                return found
        order = self.bits(length, device=device)
        if valid is not None:
            padded = torch.arange(length, device=order.device) >= valid.to(order.device).unsqueeze(-1)
            order = order.masked_fill(padded, _LAST)
        return order.argsort(dim=-1, stable=True)

    def choice(self, population: int, size: int) -> Tensor:
        """``size`` distinct members of ``range(population)``, in O(size) (Floyd's sampling), sorted."""
        if isinstance(self.state, int) and _compiled(self.state):
            found = draws.chosen(self.state, population, size)
            if found is not None:
                return found
        tops = torch.arange(population - size, population)
        picks = (self.bits(size) & _LAST) % (tops + 1)
        ordered = picks.sort().values
        if bool((ordered[1:] > ordered[:-1]).all()):  # the usual case in a large population: nobody was picked twice
            return ordered
        chosen: set[int] = set()
        for pick, top in zip(picks.tolist(), tops.tolist(), strict=True):
            chosen.add(top if pick in chosen else pick)
        return torch.tensor(sorted(chosen), dtype=torch.int64)

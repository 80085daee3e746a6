"""Answers to ``torch.rand`` and its kin from a key. The first argument of each is the mode that asks
(:class:`fedalloy.tasks.keyed.KeyedDraws`), the second torch's own function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from fedalloy.core.keys import Key

_EXACT = {torch.bfloat16: 8, torch.float16: 11}
"""Bits of a number in [0, 1) that these types hold exactly, so that none is rounded up to 1."""


class Drawing(Protocol):
    """What hands out keys."""

    key: Key | None

    def next(self) -> Key:
        """The key of the next call."""


def _uniform(mode: Drawing, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
    fine = torch.float64 if dtype == torch.float64 else torch.float32
    drawn = mode.next().uniform(*shape, dtype=fine, device=device)
    bits = _EXACT.get(dtype)
    return (drawn if bits is None else (drawn * 2**bits).floor() / 2**bits).to(dtype)


def _normal(mode: Drawing, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
    return mode.next().normal(*shape, dtype=dtype, device=device)


def _integers(mode: Drawing, shape: tuple[int, ...], low: int, high: int, dtype: torch.dtype, device: Any) -> Tensor:
    return (low + mode.next().bits(*shape, device=device).remainder(high - low)).to(dtype)


def _free(func: Any, given: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether the caller brings a generator of its own, or memory to write to: then the call is torch's."""
    return named.get("generator") is not None or named.get("out") is not None or any(
        isinstance(one, torch.Generator) for one in given
    )  # fmt: skip


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)


def _sized(draw: Callable[..., Tensor]) -> Callable[..., Any]:
    """``torch.rand(size)`` or ``torch.randn(size)``."""

    def answer(mode: Drawing, func: Any, *size: Any, **named: Any) -> Any:
        if _free(func, size, named):
            return func(*size, **named)
        shape = _shape(size or (named["size"],))
        made = draw(mode, shape, named.get("dtype") or torch.get_default_dtype(), named.get("device"))
        return made.requires_grad_() if named.get("requires_grad") else made

    return answer


def _like(draw: Callable[..., Tensor]) -> Callable[..., Any]:
    """``torch.rand_like(input)`` or ``torch.randn_like(input)``."""

    def answer(mode: Drawing, func: Any, input: Tensor, **named: Any) -> Any:
        if _free(func, (), named):
            return func(input, **named)
        device = named.get("device") or input.device
        return draw(mode, tuple(input.shape), named.get("dtype") or input.dtype, device)

    return answer


def _randint(mode: Drawing, func: Any, *given: Any, **named: Any) -> Any:
    if _free(func, given, named):
        return func(*given, **named)
    numbers = [one for one in given if isinstance(one, int)]
    size = named["size"] if "size" in named else given[-1]
    high = named["high"] if "high" in named else numbers[-1]
    low = named.get("low", numbers[0] if len(numbers) > 1 or (numbers and "high" in named) else 0)
    return _integers(mode, tuple(size), low, high, named.get("dtype") or torch.int64, named.get("device"))


def _randint_like(mode: Drawing, func: Any, input: Tensor, *bounds: int, **named: Any) -> Any:
    if _free(func, (), named):
        return func(input, *bounds, **named)
    low = named.get("low", bounds[0] if len(bounds) > 1 or ("high" in named and bounds) else 0)
    high = named["high"] if "high" in named else bounds[-1]
    dtype = named.get("dtype") or input.dtype
    return _integers(mode, tuple(input.shape), low, high, dtype, named.get("device") or input.device)


def _randperm(mode: Drawing, func: Any, n: int, **named: Any) -> Any:
    if _free(func, (), named):
        return func(n, **named)
    return mode.next().permutation(n, device=named.get("device")).to(named.get("dtype") or torch.int64)


def _bernoulli(mode: Drawing, func: Any, input: Tensor, p: Any = None, **named: Any) -> Any:
    if _free(func, (), named):
        return func(input, **({} if p is None else {"p": p}), **named)
    drawn = _uniform(mode, tuple(input.shape), torch.float64, input.device)
    return (drawn < (input if p is None else p)).to(input.dtype)


def _multinomial(
    mode: Drawing, func: Any, input: Tensor, num_samples: int, replacement: bool = False, **named: Any
) -> Any:
    """With replacement by the inverse of the distribution function, without by the race of exponential times."""
    if _free(func, (), named):
        return func(input, num_samples, replacement, **named)
    weights = input.double()
    if replacement:
        drawn = _uniform(mode, (*input.shape[:-1], num_samples), torch.float64, input.device)
        total = weights.cumsum(-1)
        places = (drawn.unsqueeze(-1) * total[..., -1:].unsqueeze(-2) >= total.unsqueeze(-2)).sum(-1)
        return places.clamp(max=input.shape[-1] - 1)
    times = _exponentials(mode, tuple(input.shape), input.device) / weights
    return times.argsort(-1)[..., :num_samples]


def _exponentials(mode: Drawing, shape: tuple[int, ...], device: Any) -> Tensor:
    return -torch.log1p(-_uniform(mode, shape, torch.float64, device))


def _normal_of(mode: Drawing, func: Any, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **named: Any) -> Any:
    """``torch.normal``: mean and deviation as tensors, or as numbers with a size."""
    if _free(func, (), named):
        return func(mean, std, **({} if size is None else {"size": size}), **named)
    like = next((one for one in (mean, std) if isinstance(one, Tensor)), None)
    if size is not None:
        shape = tuple(size)
    else:
        shape = torch.broadcast_shapes(*(one.shape for one in (mean, std) if isinstance(one, Tensor)))
    dtype = named.get("dtype") or (like.dtype if like is not None else torch.get_default_dtype())
    device = named.get("device") or (None if like is None else like.device)
    return mean + std * _normal(mode, tuple(shape), dtype, device)


def _filling(values: Callable[..., Tensor]) -> Callable[..., Any]:
    """A method that fills its tensor with draws."""

    def answer(mode: Drawing, func: Any, target: Tensor, *given: Any, **named: Any) -> Any:
        if _free(func, given, named):
            return func(target, *given, **named)
        named.pop("generator", None)
        return target.copy_(values(mode, target, *given, **named))

    return answer


def _fill_uniform(mode: Drawing, target: Tensor, a: float = 0.0, b: float = 1.0, **named: float) -> Tensor:
    a, b = named.get("from", a), named.get("to", b)
    drawn = _uniform(mode, tuple(target.shape), target.dtype, target.device)
    return a + (b - a) * drawn


def _fill_normal(mode: Drawing, target: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return mean + std * _normal(mode, tuple(target.shape), target.dtype, target.device)


def _fill_bernoulli(mode: Drawing, target: Tensor, p: Any = 0.5) -> Tensor:
    below: Tensor = _uniform(mode, tuple(target.shape), torch.float64, target.device) < p
    return below.to(target.dtype)


def _fill_exponential(mode: Drawing, target: Tensor, lambd: float = 1.0) -> Tensor:
    return _exponentials(mode, tuple(target.shape), target.device) / lambd


def _fill_random(mode: Drawing, target: Tensor, a: int | None = None, b: int | None = None, **named: int) -> Tensor:
    a, b = named.get("from", a), named.get("to", b)
    low, high = (0, a) if b is None else (a or 0, b)
    bits = {torch.bool: 1, torch.uint8: 8, torch.int8: 7, torch.int16: 15, torch.int32: 31}.get(target.dtype, 53)
    most = high if high is not None else 1 << min(bits, 24 if target.dtype == torch.float32 else bits)
    return _integers(mode, tuple(target.shape), low, math.floor(most), target.dtype, target.device)


def _empty(mode: Drawing, func: Any, *given: Any, **named: Any) -> Any:
    """``torch.empty``, for tensors that are filled with draws (``torch.distributions``). For a block of clients these
    draws have an axis of clients, and so must what they are written into."""
    made = func(*given, **named)
    if _free(func, (), named) or not isinstance(mode.key, Key) or not isinstance(mode.key.state, Tensor):
        return made
    like = mode.key.state.to(made.device)
    return made + torch.zeros_like(like, dtype=made.dtype) if made.is_floating_point() else made


SAMPLES: dict[Any, Callable[..., Any]] = {
    torch.empty: _empty,
    torch.rand: _sized(_uniform),
    torch.randn: _sized(_normal),
    torch.rand_like: _like(_uniform),
    torch.randn_like: _like(_normal),
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
    torch.normal: _normal_of,
    Tensor.bernoulli_: _filling(_fill_bernoulli),
    Tensor.uniform_: _filling(_fill_uniform),
    Tensor.normal_: _filling(_fill_normal),
    Tensor.exponential_: _filling(_fill_exponential),
    Tensor.random_: _filling(_fill_random),
}
"""By torch's function."""

"""Random numbers of a model from a client's key: a mode of torch that answers every call for random numbers.

While :class:`KeyedDraws` is active, dropout, attention with dropout, recurrent layers with dropout, ``torch.rand`` and
its kin are functions of a key and of the number of the call, so that every engine draws the same numbers. Attention is
computed by one formula, because torch's own kernels differ between engines and have no rule for ``vmap``.
"""

from __future__ import annotations

import math
import random
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key

Answer = Callable[..., Any]
_DRAWING = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_ANSWERED = (
    nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.RNNBase,
)  # fmt: skip
"""Layers whose own kernels do not work under ``vmap``."""
_AHEAD, _DIGITS = 64, 24
_OWN_CODE = ("torch.nn.", "fedalloy.tasks.")


class KeyedDraws(TorchFunctionMode):
    """Answers random calls from ``key``: call number ``i`` uses ``key.fold("draw", i)``.

    ``refusal`` is the reason why nothing may be drawn, if there is one. ``even`` replaces every probability of a
    dropout by a half, so that a probe sees which places share a mask. ``count`` is the number of calls so far.
    """

    def __init__(self, key: Key | None, refusal: str = "", even: bool = False) -> None:
        super().__init__()
        self.key, self.refusal, self.even, self.count = key, refusal, even, 0
        self._ahead: Tensor | None = None

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        answer = ANSWERS.get(func)
        given = kwargs or {}
        return func(*args, **given) if answer is None else answer(self, func, *args, **given)

    def next(self) -> Key:
        """The key of the next call."""
        if self.key is None or self.refusal:
            raise SpecError(self.refusal or "the model draws random numbers in training: call its loss with a draw")
        if isinstance(self.key.state, int):
            self.count += 1
            return self.key.fold("draw", self.count - 1)
        if (
            self._ahead is None or self.count % _AHEAD == 0
        ):  # the keys of many calls at once: on a GPU every fold takes a dozen kernels
            calls = torch.arange(self.count, self.count + _AHEAD, device=self.key.state.device)
            self._ahead = torch.as_tensor(self.key.fold("draw").each(calls).state)
        self.count += 1
        return Key(self._ahead[..., (self.count - 1) % _AHEAD])

    def kept(self, shape: tuple[int, ...], p: float, like: Tensor) -> Tensor:
        """The mask of a dropout with probability ``p``, already scaled by ``1 / (1 - p)``."""
        p = 0.5 if self.even and 0 < p < 1 else p
        drawn = self.next().whole(_DIGITS, *shape, device=like.device) >= _least(p)
        return drawn.to(like.dtype) / (1.0 - p if p < 1 else 1.0)

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Torch's global generators, seeded by the next key and restored afterwards: for calls that have no answer."""
        with seeded_by(self.next()):
            yield


def _least(p: float) -> int:
    """The least whole number of so many digits that is at least ``p`` when it is read as a fraction in float32."""
    rounded = float(np.float32(p))
    return math.ceil(rounded * 2.0**_DIGITS)


@contextmanager
def seeded_by(key: Key) -> Iterator[None]:
    """The global generators of torch, Python and numpy, seeded by a key of one client and restored afterwards."""
    try:
        seed = key.seed()
    except RuntimeError as error:  # vmap refuses to turn a block's keys into one number
        raise SpecError(
            "the model draws random numbers that cannot be computed from the clients' keys for several clients at once"
        ) from error
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    others = other_generators()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        try:
            yield
        finally:
            random.setstate(others[0])
            np.random.set_state(others[1])


def other_generators() -> tuple[Any, Any]:
    """The states of the global generators of Python and numpy, which models use too (layers left out, masks)."""
    return random.getstate(), np.random.get_state(legacy=True)


def other_draws(before: tuple[Any, Any], after: tuple[Any, Any]) -> bool:
    """Whether one of these generators was used between two states."""
    python, numpy = (one != other for one, other in ((before[0], after[0]), (before[1][2:], after[1][2:])))
    return python or numpy or not np.array_equal(before[1][1], after[1][1])


def is_silent(module: nn.Module) -> bool:
    """Whether a model surely needs no answers: all its code is torch's or fedalloy's, and none of it draws.

    >>> is_silent(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), is_silent(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    (True, False)
    """
    return all(_is_known(part) and not may_draw(part) and not isinstance(part, _ANSWERED) for part in module.modules())


def may_draw(part: nn.Module) -> bool:
    """Whether a layer of torch draws random numbers in training."""
    if isinstance(part, nn.RNNBase | nn.MultiheadAttention):
        return part.dropout > 0
    return isinstance(part, _DRAWING) and getattr(part, "p", 1.0) > 0


def _is_known(part: nn.Module) -> bool:
    own = type(part).__module__.startswith(_OWN_CODE) and "forward" not in vars(part)
    return own and not part._forward_hooks and not part._forward_pre_hooks


def dropout(
    mode: KeyedDraws, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """``functional.dropout``, and torch's own functions of the same meaning."""
    if not training or p == 0:
        return input
    return _given(input, input * mode.kept(tuple(input.shape), p, input), inplace or func.__name__.endswith("_"))


def feature_dropout(
    mode: KeyedDraws, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Dropout of whole channels; an input without a batch axis has its channels first."""
    if not training or p == 0:
        return input
    alone = input.dim() == {"dropout1d": 2, "dropout3d": 4}.get(func.__name__, 0)
    axes = 1 if alone else 2
    shape = (*input.shape[:axes], *[1] * (input.dim() - axes))
    return _given(input, input * mode.kept(shape, p, input), inplace or func.__name__.endswith("_"))


def alpha_dropout(
    mode: KeyedDraws, func: Any, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    """Dropout that keeps mean and variance of a self-normalising network (Klambauer et al. 2017)."""
    if not training or p == 0:
        return input
    p = 0.5 if mode.even else p
    feature = func.__name__.startswith("feature")
    shape = (*input.shape[:2], *[1] * (input.dim() - 2)) if feature else tuple(input.shape)
    kept = mode.next().uniform(*shape, device=input.device) >= p
    low = -1.7580993408473766
    scale = ((1 - p) * (1 + p * low * low)) ** -0.5 if p < 1 else 0.0
    changed = scale * torch.where(kept, input, torch.full_like(input, low)) - scale * low * p
    return _given(input, changed, inplace or func.__name__.endswith("_"))


def rrelu(
    mode: KeyedDraws,
    func: Any,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    """A leaky ReLU with a leak that is drawn in training."""
    if not training:
        return functional.leaky_relu(input, (lower + upper) / 2, inplace)
    leak = lower + (upper - lower) * mode.next().uniform(*input.shape, dtype=input.dtype, device=input.device)
    return _given(input, torch.where(input >= 0, input, input * leak), inplace)


def attention(
    mode: KeyedDraws,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``functional.scaled_dot_product_attention`` by its formula, the same in every engine."""
    if enable_gqa:
        heads = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(heads, -3), value.repeat_interleave(heads, -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    weights = scores.softmax(-1) if attn_mask is None else _masked_softmax(scores, attn_mask)
    return (weights * mode.kept(tuple(weights.shape), dropout_p, weights) if dropout_p else weights) @ value


def _masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """A row in which everything is masked gets the weight 0, as in torch."""
    scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
    dead = scores.amax(-1, keepdim=True) == -torch.inf
    return torch.where(dead, 0.0, torch.where(dead, 0.0, scores).softmax(-1))


def recurrent(mode: KeyedDraws, func: Any, *given: Any) -> Any:
    """A recurrent network layer by layer through torch's own function, with our dropout between layers. ``given`` are
    the arguments that ``nn.RNNBase`` passes, for padded or for packed sequences."""
    packed = isinstance(given[3], list | tuple)
    data, hidden = given[: 2 if packed else 1], given[2 if packed else 1]
    weights, biases, layers, p, training, both, *rest = given[3 if packed else 2 :]
    zero, several = _zero(data[0], *weights), isinstance(hidden, tuple)
    states = [part + zero for part in hidden] if several else [hidden + zero]
    directions, each, ends = 2 if both else 1, len(weights) // layers, []
    for layer in range(layers):
        starts = tuple(part[layer * directions : (layer + 1) * directions] for part in states)
        mine = weights[layer * each : (layer + 1) * each]
        result, *end = func(*data, starts if several else starts[0], mine, biases, 1, 0.0, training, both, *rest)
        ends.append(end)
        if p and training and layer < layers - 1:
            result = result * mode.kept(tuple(result.shape), p, result)
        data = (result, *data[1:])
    return (data[0], *(torch.cat(parts) for parts in zip(*ends, strict=True)))


def _zero(*leaves: Tensor) -> Tensor:
    """A zero with every batch axis of the leaves: torch writes into the hidden state, which must have them too."""
    return torch.stack([torch.zeros_like(leaf.reshape(-1)[:1]).sum() for leaf in leaves]).sum()


def opened(mode: KeyedDraws, func: Any, *given: Any, **named: Any) -> Any:
    """A function of ``torch.nn.functional`` that draws inside: its own body, with this mode active in it."""
    with mode:
        return _body(func)(*given, **named)


def _body(func: Any) -> Any:
    """The same Python function without its first lines, which would pass the call to the mode again."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**func.__globals__, **dict.fromkeys(names, lambda *_: False)}
    made = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def unkeyed(mode: KeyedDraws, func: Any, *given: Any, **named: Any) -> Any:
    """A call without an answer of ours: torch's, with its generator seeded from the key."""
    with mode.seeded():
        return func(*given, **named)


def _given(old: Tensor, new: Tensor, inplace: bool) -> Tensor:
    return old.copy_(new) if inplace else new


def _answers() -> dict[Any, Answer]:
    from fedalloy.tasks.keyed_samples import SAMPLES

    plain = (functional.dropout, torch.dropout, torch.dropout_)
    channels = (functional.dropout1d, functional.dropout2d, functional.dropout3d, torch.feature_dropout)
    alpha = (functional.alpha_dropout, functional.feature_alpha_dropout, torch.alpha_dropout)
    inside = (functional.multi_head_attention_forward, functional.gumbel_softmax)
    cells = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
    others = (torch.poisson, torch.binomial, Tensor.cauchy_, Tensor.log_normal_, Tensor.geometric_)
    pools = ("fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices")
    return {
        **dict.fromkeys(plain, dropout),
        **dict.fromkeys((*channels, torch.feature_dropout_), feature_dropout),
        **dict.fromkeys((*alpha, torch.alpha_dropout_, torch.feature_alpha_dropout), alpha_dropout),
        **dict.fromkeys((functional.rrelu, torch.rrelu), rrelu),
        **dict.fromkeys((*inside, *(getattr(functional, name) for name in pools)), opened),
        **dict.fromkeys(cells, recurrent),
        **dict.fromkeys(others, unkeyed),
        functional.scaled_dot_product_attention: attention,
        **SAMPLES,
    }


ANSWERS = _answers()

"""Recurrent networks that run under ``vmap``: next-character prediction and the sentiment of tweets."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedalloy.core.errors import SpecError
from fedalloy.core.registry import register


class Lstm(nn.Module):
    """Layers of LSTM cells without biases; returns the last state only.

    ``i, f, g, o = split(W_ih x + W_hh h)``, ``c <- sigmoid(f) c + sigmoid(i) tanh(g)``, ``h <- sigmoid(o) tanh(c)``,
    with the names, shapes and initial values of ``nn.LSTM``. It is written out because ``nn.LSTM`` changes tensors in
    place, which ``vmap`` refuses if clients share weights. All weights belong to one module, so that layer-wise rules
    treat them as one layer.
    """

    def __init__(self, inputs: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.hidden, self.layers = hidden, layers
        for layer in range(layers):
            for name, width in (("ih", inputs if layer == 0 else hidden), ("hh", hidden)):
                weight = nn.init.uniform_(torch.empty(4 * hidden, width), -1 / math.sqrt(hidden), 1 / math.sqrt(hidden))
                self.register_parameter(f"weight_{name}_l{layer}", nn.Parameter(weight))

    def forward(self, x: Tensor, known: Tensor | None = None) -> Tensor:
        """``[N, length, inputs]`` to ``[N, hidden]``; where ``known`` ``[N, length]`` is false the state is kept."""
        for layer in range(self.layers):
            states = self._states(x, layer, known)
            if layer < self.layers - 1:
                x = torch.stack(states, 1)
        return states[-1]

    def _states(self, x: Tensor, layer: int, known: Tensor | None) -> list[Tensor]:
        into, back = (getattr(self, f"weight_{name}_l{layer}") for name in ("ih", "hh"))
        driven = functional.linear(x, into).unbind(1)
        h = c = x.new_zeros(x.shape[0], self.hidden)
        states = []
        for moment, drive in enumerate(driven):
            new_h, new_c = _cell(drive + functional.linear(h, back), c)
            if known is not None:
                here = known[:, moment].unsqueeze(1)
                new_h, new_c = torch.where(here, new_h, h), torch.where(here, new_c, c)
            h, c = new_h, new_c
            states.append(h)
        return states

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"hidden={self.hidden}, layers={self.layers}"


class Reader(nn.Module):
    """An embedding of symbols, followed by an LSTM.

    ``padded``: token 0 is padding and is skipped, and numbers beyond the vocabulary are mapped into it by a modulo
    (tokens are hashes). Otherwise all numbers are symbols.
    """

    def __init__(self, vocabulary: int, width: int, hidden: int, layers: int, padded: bool) -> None:
        super().__init__()
        self.vocabulary, self.padded = vocabulary, padded
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = Lstm(width, hidden, layers)

    def forward(self, symbols: Tensor) -> Tensor:
        """``[N, length]`` whole numbers to ``[N, hidden]``."""
        symbols, known = symbols.to(torch.int64), None
        if self.padded:
            known = symbols > 0
            symbols = torch.where(known, 1 + (symbols - 1) % (self.vocabulary - 1), symbols)
        state: Tensor = self.lstm(self.embedding(symbols), known)
        return state


@register("model", "char_lstm")
def char_lstm(
    input_shape: tuple[int, ...] = (80,),
    classes: int = 100,
    vocabulary: int = 100,
    width: int = 8,
    hidden: int = 256,
    layers: int = 2,
) -> nn.Module:
    """Predicts the next character: an embedding of 100 x 8, two layers of 256 LSTM cells, a linear layer.

    821 024 parameters without biases: 800 + 794 624 + 25 600. ``classifier`` is the last layer.
    """
    return _reading("char_lstm", input_shape, classes, vocabulary, width, hidden, layers, padded=False)


@register("model", "sent140_lstm")
def sent140_lstm(
    input_shape: tuple[int, ...] = (25,),
    classes: int = 1,
    vocabulary: int = 4096,
    width: int = 64,
    hidden: int = 256,
    layers: int = 2,
) -> nn.Module:
    """The sentiment of a tweet: word vectors, two layers of 256 LSTM cells, a linear layer; without biases.

    1 114 368 parameters with one logit: 262 144 + 851 968 + 256. The published experiments use frozen, pretrained
    GloVe vectors of 300 values per word; here 64 values are learned for each of 4096 hashed words.
    """
    return _reading("sent140_lstm", input_shape, classes, vocabulary, width, hidden, layers, padded=True)


def _reading(
    name: str,
    input_shape: tuple[int, ...],
    classes: int,
    vocabulary: int,
    width: int,
    hidden: int,
    layers: int,
    padded: bool,
) -> nn.Module:
    if len(input_shape) != 1:
        raise SpecError(f"model '{name}' reads texts, [length] tokens; the data has {tuple(input_shape)}")
    if vocabulary < 2 or min(width, hidden, layers) < 1:
        raise SpecError(
            f"model '{name}': vocabulary {vocabulary}, width {width}, hidden {hidden}, layers {layers}: "
            "allowed are 2 or more, and 1 or more for the others"
        )
    reader = Reader(vocabulary, width, hidden, layers, padded)
    return nn.Sequential(OrderedDict(features=reader, classifier=nn.Linear(hidden, classes, bias=False)))


def _cell(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c

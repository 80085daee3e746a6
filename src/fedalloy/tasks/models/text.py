"""A small classifier of text pairs."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from fedalloy.core.errors import SpecError
from fedalloy.core.registry import register


class PairEmbedding(nn.Module):
    """``[u, v, |u - v|, u v]``, where u and v are the means of the word vectors of two texts.

    Token 0 is padding and is ignored. Numbers beyond the vocabulary are mapped into it by a modulo: tokens are hashes,
    so with a smaller vocabulary only more words share a vector.
    """

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.words = nn.Embedding(vocabulary, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """``[N, 2, length]`` whole numbers to ``[N, 4 * width]``."""
        known = tokens > 0
        folded = torch.where(known, 1 + (tokens - 1) % (self.vocabulary - 1), tokens)
        vectors = self.words(folded) * known.unsqueeze(-1)
        means = vectors.sum(2) / known.sum(2).clamp(min=1).unsqueeze(-1)
        u, v = means[:, 0], means[:, 1]
        return torch.cat([u, v, (u - v).abs(), u * v], 1)


@register("model", "text_pair")
def text_pair(
    input_shape: tuple[int, ...] = (2, 48),
    classes: int = 1,
    vocabulary: int = 4096,
    width: int = 32,
    hidden: int = 64,
) -> nn.Module:
    """Word vectors, their means u and v for two texts, and a perceptron on ``[u, v, |u - v|, u v]``.

    139 393 parameters with one logit: 131 072 in ``embedding``, 8 321 in the ``head`` (hidden and output layer).
    """
    if len(input_shape) != 2 or input_shape[0] != 2:
        raise SpecError(
            f"model 'text_pair' takes pairs of texts, [2, length] tokens; the data has {tuple(input_shape)}"
        )
    if vocabulary < 2:
        raise SpecError(f"model 'text_pair': a vocabulary of {vocabulary}; allowed: 2 or more")
    head = OrderedDict(hidden=nn.Linear(4 * width, hidden), relu=nn.ReLU(), output=nn.Linear(hidden, classes))
    return nn.Sequential(OrderedDict(embedding=PairEmbedding(vocabulary, width), head=nn.Sequential(head)))

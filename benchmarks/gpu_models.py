"""Models for the table of models x methods: a small attention model, and adapters (LoRA) on the same model, frozen."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, PATCH, RANK = 128, 4, 4, 8


class Adapted(nn.Module):
    """A linear layer that is not trained, and a trained product of two thin matrices beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.down = nn.Parameter(torch.randn(RANK, inputs) * inputs**-0.5)
        self.up = nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """``x W' + b + (x A') B'``."""
        whole: Tensor = self.base(x) + (x @ self.down.T) @ self.up.T
        return whole


class AttentionBlock(nn.Module):
    """Attention and two dense layers, each after a LayerNorm and beside a shortcut."""

    def __init__(self, dense: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.joint, self.out = dense(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.back = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, patches, WIDTH]`` to the same."""
        parts = self.joint(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(0)).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        grown: Tensor = x + self.back(functional.gelu(self.wide(self.norm2(x))))
        return grown


class Patches(nn.Module):
    """Images as the sequence of their patches, with a learned place each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(3 * PATCH**2, WIDTH), nn.Parameter(torch.zeros(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """``[N, 3, 32, 32]`` to ``[N, 64, WIDTH]``."""
        cut = x.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        placed: Tensor = self.embed(cut) + self.place
        return placed


class MeanHead(nn.Module):
    """The classes from the mean over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, patches, WIDTH]`` to ``[N, 10]``."""
        logits: Tensor = self.head(x.mean(1))
        return logits


def attention() -> nn.Module:
    """Two blocks of attention over 64 patches of a 32 x 32 image: 410 000 parameters, all trained."""
    return nn.Sequential(Patches(), AttentionBlock(nn.Linear), AttentionBlock(nn.Linear), MeanHead())


def lora() -> nn.Module:
    """The same, frozen, with trained adapters of rank 8 at the joint projections; the head is trained too."""
    return nn.Sequential(Patches(), AttentionBlock(Adapted), AttentionBlock(Adapted), MeanHead())


LORA_TRAINS = ("*.down", "*.up", "*.head.*")
"""The leaves of ``lora`` that are trained."""

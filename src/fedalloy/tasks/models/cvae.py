"""Conditional VAEs in which only the decoder gets the class (Kingma & Welling 2014, arXiv:1312.6114)."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.models.capabilities import Between, Bounds, CapabilityModule, check_classes, declared, one_hot
from fedalloy.tasks.models.convolutional import image_shape
from fedalloy.tasks.models.norms import Norm, norm_layer
from fedalloy.tasks.models.sides import Frame

_SMALLEST_SPREAD = 1e-8
# Channels in units of the width, from the image inwards, by its side; 64 x 64 ends in 4 x 4, the others in 2 x 2.
_ENCODER = {8: (2, 4), 16: (1, 2, 4), 32: (1, 1, 2, 4), 64: (1, 1, 2, 4)}


class ConditionalVae(CapabilityModule):
    """An encoder and a decoder: ``reconstruct(x, y, draw)``, ``generate(draw, y)`` and ``classify(x)``.

    The networks work on values in [0, 1]. ``reconstruct`` returns target and reconstruction ``[N, d]`` in this range,
    and mean and spread of the latent code. ``classify`` prefers the class with the best reconstruction: logits are
    minus the squared errors of decoding the mean code, one decoding per class.
    """

    capabilities = frozenset({"classify", "generate", "reconstruct"})

    def __init__(
        self,
        encoder: nn.Module,
        decoder: nn.Module,
        input_shape: tuple[int, ...],
        classes: int,
        latent: int,
        bounds: Bounds | None,
    ) -> None:
        super().__init__()
        check_classes("cvae", classes)
        self.encoder, self.decoder = encoder, decoder
        self.input_shape, self.classes, self.latent = tuple(input_shape), classes, latent
        self.between = Between(bounds, (0.0, 1.0))

    def _get_name(self) -> str:
        """The name in the printed model; fixed, because run folders keep a hash of that text."""
        return "Cvae"

    def generate(self, draw: Tensor, y: Tensor) -> Tensor:
        """Examples of the classes ``y`` from codes drawn from N(0, I), in the range of the data."""
        made = self._decode(self._noise(draw, len(y), y.device), y)
        return self.between.outward(made).reshape(len(y), *self.input_shape)

    def reconstruct(self, x: Tensor, y: Tensor, draw: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Target, reconstruction from a drawn code, and the code's mean and spread."""
        inner = self.between.inward(x)
        mean, spread = self._encode(inner)
        code = mean + spread * self._noise(draw, len(x), x.device)
        return inner.flatten(1), self._decode(code, y).flatten(1), mean, spread

    def classify(self, x: Tensor) -> Tensor:
        """Minus the squared error of the reconstruction under every class."""
        inner = self.between.inward(x)
        mean, _ = self._encode(inner)
        every = [torch.full((len(x),), label, device=x.device) for label in range(self.classes)]
        errors = [(self._decode(mean, y).flatten(1) - inner.flatten(1)).square().sum(1) for y in every]
        return -torch.stack(errors, dim=1)

    def _encode(self, inner: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(inner)
        return code[:, : self.latent], functional.softplus(code[:, self.latent :]) + _SMALLEST_SPREAD

    def _decode(self, code: Tensor, y: Tensor) -> Tensor:
        made: Tensor = self.decoder(torch.cat([code, one_hot(y, self.classes, code.dtype)], dim=1))
        return made

    def _noise(self, draw: Tensor, count: int, device: torch.device) -> Tensor:
        dtype = next(self.decoder.parameters()).dtype
        return Key(draw).normal(count, self.latent, dtype=dtype, device=device)


@register("model", "cvae")
def cvae(
    input_shape: tuple[int, ...] = (1, 32, 32),
    classes: int = 10,
    width: int = 64,
    latent: int = 128,
    norm: Norm = "batch",
    bounds: Bounds | None = (0.0, 1.0),
) -> nn.Module:
    """Conditional VAE for images: 1 850 881 parameters for MNIST, 1 854 979 for CIFAR-10.

    Images are padded to a square of 8, 16, 32 or 64 pixels (28 becomes 32) and the output is cropped. ``bounds`` are
    the data's lowest and highest value, by default those that the dataset declares. ``width = 16`` and ``latent = 16``
    are enough for 8 x 8 digits.
    """
    channels, height, breadth = image_shape(input_shape)
    frame = Frame(height, breadth, ground=0.0)
    widths = [width * k for k in _ENCODER[frame.side]]
    encoder, decoder = (
        _Encoder(channels, widths, latent, norm, frame),
        _Decoder(latent + classes, widths[::-1], channels, norm, frame),
    )
    return ConditionalVae(encoder, decoder, input_shape, classes, latent, declared("cvae", bounds))


@register("model", "cvae_rows")
def cvae_rows(
    input_shape: tuple[int, ...] = (16,),
    classes: int = 2,
    width: int = 64,
    latent: int = 8,
    bounds: Bounds | None = None,
) -> nn.Module:
    """Conditional VAE of dense layers, one hidden one in each network, for rows of a table or small flat images.

    Without ``bounds`` the decoder's output is linear (standardised features); with them it ends in a sigmoid.
    """
    inputs = math.prod(input_shape)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 2 * latent))
    decoder = nn.Sequential(nn.Linear(latent + classes, width), nn.ReLU(), nn.Linear(width, inputs))
    if bounds is not None:
        decoder.append(nn.Sigmoid())
    return ConditionalVae(encoder, decoder, input_shape, classes, latent, bounds)


class _Encoder(nn.Module):
    """Convolutions that each halve the image, then a dense layer."""

    def __init__(self, channels: int, widths: list[int], latent: int, norm: Norm, frame: Frame) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in pairwise([channels, *widths]):
            layers += [nn.Conv2d(before, width, 4, stride=2, padding=1), norm_layer(width, norm), nn.ReLU()]
        self.layers, self.frame, self.channels = nn.Sequential(*layers, nn.Flatten()), frame, channels
        self.output = nn.Linear(widths[-1] * _last_side(frame, widths) ** 2, 2 * latent)

    def forward(self, x: Tensor) -> Tensor:
        image = x.reshape(x.shape[0], self.channels, self.frame.height, self.frame.width)
        code: Tensor = self.output(self.layers(self.frame(image)))
        return code


class _Decoder(nn.Module):
    """The encoder's layers in reverse, with outputs in [0, 1]."""

    def __init__(self, inputs: int, widths: list[int], channels: int, norm: Norm, frame: Frame) -> None:
        super().__init__()
        self.first = (widths[0], _last_side(frame, widths), _last_side(frame, widths))
        self.input, self.frame = nn.Linear(inputs, math.prod(self.first)), frame
        layers: list[nn.Module] = [nn.ReLU()]
        for before, width in pairwise(widths):
            layers += [_up(before, width), norm_layer(width, norm), nn.ReLU()]
        self.layers = nn.Sequential(*layers, _up(widths[-1], channels), nn.Sigmoid())

    def forward(self, code: Tensor) -> Tensor:
        return self.frame.cut(self.layers(self.input(code).reshape(len(code), *self.first)))


def _up(inputs: int, outputs: int) -> nn.Module:
    return nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1)


def _last_side(frame: Frame, widths: list[int]) -> int:
    return frame.side >> len(widths)

"""AC-GAN: a class-conditional generator, a discriminator that also classifies (Odena et al. 2017, arXiv 1610.09585)."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.dropout import Dropout
from fedalloy.tasks.models.capabilities import Between, Bounds, CapabilityModule, check_classes, declared, one_hot
from fedalloy.tasks.models.convolutional import image_shape
from fedalloy.tasks.models.norms import Norm, norm_layer
from fedalloy.tasks.models.sides import Frame

_SLOPE = 0.2
_START_SPREAD = 0.02
# Channels of each layer in units of the width, by the side of the image; the generator's begin with its 4 x 4 maps,
# the discriminator's with the image.
_GENERATOR = {8: (2,), 16: (2, 1), 32: (4, 2, 1), 64: (4, 2, 2, 1)}
_DISCRIMINATOR = {8: (2,), 16: (1, 2), 32: (1, 2, 4), 64: (1, 2, 4, 4)}


class Acgan(CapabilityModule):
    """A generator and a discriminator: ``generate(draw, y)``, ``judge(x)`` and ``classify(x)``.

    ``draw`` is the state of the key that the noise U(-1, 1) is drawn from: example slot i uses the numbers from
    ``i * latent`` on, independently of the batch size. ``judge`` returns the logit of being real ``[N]`` and those of
    the classes ``[N, classes]``. The networks work on values in [-1, 1].
    """

    capabilities = frozenset({"classify", "generate", "judge"})

    def __init__(
        self,
        generator: nn.Module,
        discriminator: nn.Module,
        input_shape: tuple[int, ...],
        classes: int,
        latent: int,
        bounds: Bounds | None,
    ) -> None:
        super().__init__()
        check_classes("acgan", classes)
        self.generator, self.discriminator = generator, discriminator
        self.input_shape, self.classes, self.latent = tuple(input_shape), classes, latent
        self.between = Between(bounds, (-1.0, 1.0))

    def generate(self, draw: Tensor, y: Tensor) -> Tensor:
        """Examples of the classes ``y``, in the range of the data."""
        dtype = next(self.generator.parameters()).dtype
        noise = 2.0 * Key(draw).uniform(len(y), self.latent, dtype=dtype, device=y.device) - 1.0
        made = self.generator(torch.cat([noise, one_hot(y, self.classes, dtype)], dim=1))
        return self.between.outward(made).reshape(len(y), *self.input_shape)

    def judge(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of being real and of the classes, for every example."""
        logits = self.discriminator(self.between.inward(x))
        return logits[:, 0], logits[:, 1:]

    def classify(self, x: Tensor) -> Tensor:
        """The discriminator's class logits, which ordinary evaluation uses."""
        return self.judge(x)[1]


@register("model", "acgan")
def acgan(
    input_shape: tuple[int, ...] = (1, 32, 32),
    classes: int = 10,
    width: int = 64,
    latent: int | None = None,
    norm: Norm = "batch",
    bounds: Bounds | None = (0.0, 1.0),
) -> nn.Module:
    """AC-GAN for images: 2 931 083 parameters for MNIST, 2 935 179 for CIFAR-10 (32 px; 64 px has one layer more).

    Images are padded to a square of 8, 16, 32 or 64 pixels (28 becomes 32) and the output is cropped. The default of
    ``latent`` is twice the width. ``bounds`` are the data's lowest and highest value, by default those that the dataset
    declares. ``norm = "group"`` has the same number of parameters and no running statistics. ``width = 16`` is enough
    for 8 x 8 digits.
    """
    channels, height, breadth = image_shape(input_shape)
    size, frame = latent or 2 * width, Frame(height, breadth, ground=-1.0)
    generator = _Generator(size + classes, channels, [width * k for k in _GENERATOR[frame.side]], norm, frame)
    discriminator = _Discriminator(channels, classes, [width * k for k in _DISCRIMINATOR[frame.side]], norm, frame)
    return Acgan(generator, discriminator, input_shape, classes, size, declared("acgan", bounds)).apply(_small_start)


@register("model", "acgan_rows")
def acgan_rows(
    input_shape: tuple[int, ...] = (16,),
    classes: int = 2,
    width: int = 64,
    latent: int = 16,
    bounds: Bounds | None = None,
) -> nn.Module:
    """AC-GAN of dense layers, two hidden ones in each network, for rows of a table or small flat images.

    Without ``bounds`` the generator's output is linear (standardised features); with them it ends in tanh.
    """
    inputs = math.prod(input_shape)
    last = [nn.Tanh()] if bounds is not None else []
    generator = nn.Sequential(*_dense(latent + classes, width, inputs), *last)
    discriminator = nn.Sequential(nn.Flatten(), *_dense(inputs, width, 1 + classes))
    return Acgan(generator, discriminator, input_shape, classes, latent, bounds)


class _Generator(nn.Module):
    """Transposed convolutions: from a point to 4 x 4, then twice the side per layer up to the image."""

    def __init__(self, inputs: int, channels: int, widths: list[int], norm: Norm, frame: Frame) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.ConvTranspose2d(inputs, widths[0], 4, bias=False)]
        for before, width in pairwise(widths):
            layers += [norm_layer(before, norm), nn.LeakyReLU(_SLOPE), _up(before, width)]
        layers += [norm_layer(widths[-1], norm), nn.LeakyReLU(_SLOPE), _up(widths[-1], channels), nn.Tanh()]
        self.layers, self.frame = nn.Sequential(*layers), frame

    def forward(self, z: Tensor) -> Tensor:
        return self.frame.cut(self.layers(z.reshape(*z.shape, 1, 1)))


class _Discriminator(nn.Module):
    """Convolutions that halve the image down to 4 x 4, one down to a point, then the logits of real and the classes."""

    def __init__(self, channels: int, classes: int, widths: list[int], norm: Norm, frame: Frame) -> None:
        super().__init__()
        layers: list[nn.Module] = [_down(channels, widths[0]), nn.LeakyReLU(_SLOPE), Dropout()]
        for before, width in pairwise(widths):
            layers += [_down(before, width), norm_layer(width, norm), nn.LeakyReLU(_SLOPE), Dropout()]
        layers += [nn.Conv2d(widths[-1], widths[-1], 4, bias=False), Dropout(), nn.Flatten()]
        self.layers, self.frame, self.channels = nn.Sequential(*layers), frame, channels
        self.output = nn.Linear(widths[-1], 1 + classes)

    def forward(self, x: Tensor) -> Tensor:
        image = x.reshape(x.shape[0], self.channels, self.frame.height, self.frame.width)
        logits: Tensor = self.output(self.layers(self.frame(image)))
        return logits


def _small_start(layer: nn.Module) -> None:
    """Weights from N(0, 0.02^2), scales from N(1, 0.02^2): with larger ones the discriminator wins immediately."""
    if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
        nn.init.normal_(layer.weight, 0.0, _START_SPREAD)
    elif isinstance(layer, nn.BatchNorm2d | nn.GroupNorm):
        nn.init.normal_(layer.weight, 1.0, _START_SPREAD)
    if isinstance(getattr(layer, "bias", None), nn.Parameter):
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]


def _up(inputs: int, outputs: int) -> nn.Module:
    return nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1, bias=False)


def _down(inputs: int, outputs: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 4, stride=2, padding=1, bias=False)


def _dense(inputs: int, width: int, outputs: int) -> list[nn.Module]:
    sizes = (inputs, width, width)
    hidden = [layer for one, two in pairwise(sizes) for layer in (nn.Linear(one, two), nn.LeakyReLU(_SLOPE))]
    return [*hidden, nn.Linear(width, outputs)]

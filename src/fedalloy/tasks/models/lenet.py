"""The small LeNet with sigmoids that the element-wise weighting experiments use."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional

from fedalloy.core.errors import SpecError
from fedalloy.core.registry import register
from fedalloy.tasks.models.convolutional import image_shape

_SIDE, _CHANNELS, _MAPS = 32, 3, 12


class AsColour32(nn.Module):
    """Pads a small image with zeros to 3 x 32 x 32 and repeats grey values in all three channels."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, height, width = shape
        if channels not in (1, _CHANNELS) or max(height, width) > _SIDE:
            raise SpecError(
                f"model 'lenet' takes grey or colour images of at most {_SIDE} x {_SIDE}, the data has {shape}: "
                "use 'cnn' or 'resnet20'"
            )
        self.shape = shape
        down, right = _SIDE - height, _SIDE - width
        self.margins = (right // 2, right - right // 2, down // 2, down - down // 2)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, ...]`` to ``[N, 3, 32, 32]``."""
        image = functional.pad(x.reshape(x.shape[0], *self.shape), self.margins)
        return image.expand(-1, _CHANNELS, -1, -1)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"shape={self.shape}"


@register("model", "lenet")
def lenet(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, spread: float | None = 0.5) -> nn.Module:
    """LeNet with sigmoids: three 5x5 convolutions with 12 maps (strides 2, 2, 1; padding 2) and one linear layer.

    15 826 parameters with 10 classes: 912 + 3 612 + 3 612 + 7 690, for 3 x 32 x 32 inputs. Smaller
    images (MNIST: 28 x 28) are padded with zeros and grey values are repeated in all three channels, so the count is
    the same for them. All initial values are drawn uniformly from [-spread, spread]: with torch's smaller ones
    (``spread=None``, only from Python) a network with three sigmoids learns nothing for several epochs of MNIST. With
    either, learning rates much above 0.01 with momentum 0.9 saturate the sigmoids. The published initial values are
    not known.
    """
    image = AsColour32(image_shape(input_shape))
    model = nn.Sequential(
        OrderedDict(
            image=image,
            conv1=nn.Conv2d(_CHANNELS, _MAPS, 5, stride=2, padding=2),
            sigmoid1=nn.Sigmoid(),
            conv2=nn.Conv2d(_MAPS, _MAPS, 5, stride=2, padding=2),
            sigmoid2=nn.Sigmoid(),
            conv3=nn.Conv2d(_MAPS, _MAPS, 5, stride=1, padding=2),
            sigmoid3=nn.Sigmoid(),
            flatten=nn.Flatten(),
            output=nn.Linear(_MAPS * (_SIDE // 4) ** 2, classes),
        )
    )
    return model if spread is None else _spread(model, spread)


def _spread(model: nn.Module, width: float) -> nn.Module:
    if not width > 0:
        raise SpecError(f"model 'lenet': spread is {width}; allowed: a positive number (0.5), or nothing")
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -width, width)
    return model

"""Features to compare real and synthetic examples: of a classifier trained for this, or of a network in a file."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedalloy.core.errors import DataError
from fedalloy.core.keys import Key
from fedalloy.core.types import Examples
from fedalloy.engines.loop import Loop
from fedalloy.methods.classifier import ClassifierTraining, train_classifier
from fedalloy.studies.synthetic.pictures import Bounds, is_picture
from fedalloy.tasks.models.capabilities import CapabilityModule
from fedalloy.tasks.models.convolutional import image_shape
from fedalloy.tasks.objective import ModuleObjective

WIDTH = 64
INCEPTION_SIDE = 299
_CHUNK = 512
_BATCH, _STEPS, _MOST_EPOCHS = 64, 1500, 25


@dataclass(frozen=True)
class Features:
    """A feature map and its name: ``of(x)`` is ``[N, d]``. For features of a classifier, ``accuracy`` is its accuracy
    on real test examples."""

    name: str
    of: Callable[[Tensor], Tensor]
    accuracy: float | None = None


class FeatureClassifier(CapabilityModule):
    """Two strided convolutions (pictures) or one dense layer (rows), then 64 features and a linear head."""

    capabilities = frozenset({"classify", "features"})

    def __init__(self, input_shape: tuple[int, ...], classes: int, picture: bool) -> None:
        super().__init__()
        self.classes = classes
        self.shape = image_shape(input_shape) if picture else (math.prod(input_shape),)
        self.body = _convolutions(self.shape) if picture else _dense(self.shape[0])
        self.head = nn.Linear(WIDTH, classes)

    def features(self, x: Tensor) -> Tensor:
        """The input of the head."""
        made: Tensor = self.body(x.reshape(len(x), *self.shape))
        return made

    def classify(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.features(x))
        return logits


def features_of_real(train: Examples, test: Examples, classes: int, bounds: Bounds | None, key: Key) -> Features:
    """The features of a small classifier, trained on the real training examples of all clients together."""
    shape = tuple(train.x.shape[1:])
    objective = ModuleObjective(lambda: FeatureClassifier(shape, classes, is_picture(shape, bounds)))
    epochs = min(_MOST_EPOCHS, max(1, round(_STEPS * _BATCH / len(train))))
    settings = ClassifierTraining(epochs=epochs, batch_size=_BATCH)
    params, buffers = train_classifier(objective, train.x, train.y, key, Loop(), settings)

    def apply_capability(capability: str, x: Tensor) -> Tensor:
        parts = x.to(train.x.device).split(_CHUNK)
        return torch.cat([objective.apply_capability(capability, params, buffers, (part,))[0] for part in parts])

    with torch.no_grad():
        hits = float((apply_capability("classify", test.x).argmax(1) == test.y).double().mean()) if len(test) else None
    name = f"a classifier trained here on real data ({WIDTH} features, {epochs} epochs)"
    return Features(name, torch.no_grad()(lambda x: apply_capability("features", x)), hits)


def features_of_file(path: str | Path, bounds: Bounds | None) -> Features:
    """The features of a network in a TorchScript file, such as Inception: it maps pictures ``[N, 3, 299, 299]`` with
    values in [0, 1] to ``[N, d]`` and normalises its input itself.

    TorchScript files are read by torch's own reader, never by Python's pickle; still use only files you trust.
    """
    if bounds is None:
        raise DataError("features of a network for pictures need data with a declared range of values (bounds)")
    network = _script(Path(path))

    def of(x: Tensor) -> Tensor:
        with torch.no_grad():
            parts = [network(_as_inception_likes(part, bounds)) for part in x.cpu().split(_BATCH)]
        found = torch.cat(parts)
        if found.dim() != 2:
            raise DataError(f"{path} returns features of shape {tuple(found.shape)}; [N, d] is needed")
        return found

    return Features(f"the network in {Path(path).name}", of)


def _script(path: Path) -> Callable[[Tensor], Tensor]:
    if not path.is_file():
        raise DataError(f"there is no file {path}: name a TorchScript file made with torch.jit.save")
    try:
        with warnings.catch_warnings():
            # The format is deprecated, but existing Inception files use it.
            warnings.simplefilter("ignore", DeprecationWarning)
            network: Callable[[Tensor], Tensor] = torch.jit.load(str(path), map_location="cpu").eval()
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"{path} is not a TorchScript file ({reason}); make one with torch.jit.save") from error
    return network


def _as_inception_likes(x: Tensor, bounds: Bounds) -> Tensor:
    """Three channels in [0, 1], 299 x 299: grey becomes three equal channels. For real and synthetic examples."""
    images = x.reshape(len(x), *image_shape(tuple(x.shape[1:]))).float()
    unit = ((images - bounds[0]) / (bounds[1] - bounds[0])).clamp(0, 1)
    large = functional.interpolate(unit, (INCEPTION_SIDE, INCEPTION_SIDE), mode="bilinear", antialias=True)
    return large.expand(-1, 3, -1, -1)


def _convolutions(shape: tuple[int, ...]) -> nn.Sequential:
    """Both convolutions halve the picture, rounding up."""
    channels, height, width = shape
    left = math.ceil(math.ceil(height / 2) / 2) * math.ceil(math.ceil(width / 2) / 2)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * left, WIDTH), nn.ReLU(),
    )  # fmt: skip


def _dense(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())

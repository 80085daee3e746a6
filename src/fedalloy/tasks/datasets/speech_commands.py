"""Speech Commands v0.02: twelve keywords by many speakers, as log-mel energies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from fedalloy.core.errors import DataError, SpecError, nearest
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.datasets.base import Dataset, DatasetDefaults, DatasetLoader
from fedalloy.tasks.datasets.reading import read_npz

Silence = Literal["nobody", "dealt"]
Scale = Literal["log", "symmetric"]
_FILE = "speech_commands_v2_test_logmel.npz"


@register("dataset", "speech_commands")
@dataclass(frozen=True)
class SpeechCommands(DatasetLoader):
    """Which of 12 words is said in one second: the speakers as clients, top-1 and top-5 accuracy.

    It is the canonical test set (4890 clips of 239 speakers), of which every client gets its own split. An
    example is ``[1, 49, 40]``: 49 frames of 40 mel bands, log energies (``log``) or the same mapped from their
    stored range, -14 to 10, to [-1, 1] (``symmetric``). They were stored in 8 bits. Speakers with fewer than
    ``min_clips`` clips are left out with their clips. The 408 clips of silence have no speaker: with ``nobody`` they
    stay without one (natural clients have none of them; other partitions distribute them like all others), with
    ``dealt`` they are given to the speakers in turn.
    """

    min_clips: int = 10
    silence: Silence = "nobody"
    scale: Scale = "symmetric"

    summary: ClassVar[str] = "4890 spoken words as log-mel energies, 12 classes, 155 speakers with 10 clips or more"
    files: ClassVar[dict[str, str]] = {_FILE: "befc7c4c21eb3260be076f56d021248e604a43a5ecb00b9803d983e76e5fed8e"}
    hint: ClassVar[str] = (
        "get it with 'fedalloy data fetch speech', or make it from the canonical test set of Speech Commands v0.02: "
        "log(e + 1e-6) of 40 mel bands (20-7600 Hz, 30 ms Hann window, 20 ms hop, 512-point FFT), quantised to x: "
        "uint8 [N, 49, 40] over scale = [-14, 10]; y, client (-1: silence), speaker"
    )
    defaults: ClassVar[DatasetDefaults] = DatasetDefaults(model="keyword_cnn", metrics=("accuracy", "top5", "loss"))

    def __post_init__(self) -> None:
        if self.min_clips < 1:
            raise SpecError(f"speech_commands: min_clips is {self.min_clips}; allowed: 1 or more")
        for name, allowed in (("silence", get_args(Silence)), ("scale", get_args(Scale))):
            if getattr(self, name) not in allowed:
                given = str(getattr(self, name))
                raise SpecError(f"speech_commands: unknown {name} '{given}': {nearest(given, allowed)}")

    def load(self, key: Key) -> Dataset:
        """The clips in the order of the file, less those of rare speakers; nothing is drawn."""
        arrays = read_npz(_FILE, ("x", "y", "client", "scale", "speaker"), self.hint)
        owner = torch.from_numpy(arrays["client"]).to(torch.int64)
        names = arrays["speaker"].tolist()
        clips = torch.bincount(owner[owner >= 0], minlength=len(names))
        kept = (clips >= self.min_clips).nonzero().flatten()
        if not len(kept):
            raise DataError(f"speech_commands: no speaker has {self.min_clips} clips; at most {int(clips.max())}")
        rows = ((owner < 0) | torch.isin(owner, kept)).nonzero().flatten()
        number = torch.full((len(names) + 1,), -1, dtype=torch.int64)  # one more entry, so that index -1 gives -1
        number[kept] = torch.arange(len(kept))
        x = self._energies(torch.from_numpy(arrays["x"])[rows], arrays["scale"].tolist())
        y = torch.from_numpy(arrays["y"])[rows].to(torch.int64)
        return Dataset(x, y, 12, self._owner(number[owner[rows]]), names=tuple(names[k] for k in kept.tolist()))

    def _energies(self, quantised: Tensor, scale: list[float]) -> Tensor:
        low, high = (-1.0, 1.0) if self.scale == "symmetric" else scale
        return (low + quantised.to(torch.float32) / 255 * (high - low)).unsqueeze(1)

    def _owner(self, owner: Tensor) -> Tensor:
        """Silence stays without an owner, or is given to the speakers in turn."""
        silent = (owner < 0).nonzero().flatten()
        if self.silence == "dealt":
            owner[silent] = torch.arange(len(silent)) % (int(owner.max()) + 1)
        return owner

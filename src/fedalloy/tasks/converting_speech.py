"""Speech Commands: from the archive of recordings to log-mel energies.

One second at 16 kHz has 49 frames of 30 ms (Hann window), one every 20 ms. The power spectrum of each (512 points) is
summed over 40 triangles between 20 and 7600 Hz, evenly spaced on the mel scale ``2595 log10(1 + f / 700)``, and
``log(e + 1e-6)`` is stored in 8 bits.
"""

from __future__ import annotations

import io
import re
import wave
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedalloy.core.errors import DataError
from fedalloy.tasks.unpacking import Originals, base_name

LABELS = ("_silence_", "_unknown_", "yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
_RATE, _WINDOW, _HOP, _POINTS, _BANDS = 16_000, 480, 320, 512, 40
_LOWEST, _HIGHEST = 20.0, 7600.0
_SCALE = (-14.0, 10.0)
_SPEAKER = re.compile(r"([0-9a-f]{8})_nohash_")


def convert_speech(originals: Originals) -> dict[str, dict[str, NDArray[Any]]]:
    """The clips of the canonical test set in the order of their labels and names."""
    path = next(iter(originals.files.values()))
    clips: list[tuple[int, str, NDArray[Any]]] = []
    for name, content in originals.archived(path, lambda name: name.endswith(".wav") and base_name(name)[0] != "."):
        word = PurePosixPath(name).parent.name
        if word not in LABELS:
            raise DataError(f"{path} has a folder '{word}', so it is not the canonical test set of Speech Commands")
        clips.append((LABELS.index(word), base_name(name), energies(_samples(content, name))))
    if not clips:
        raise DataError(f"{path} holds no recording (.wav)")
    clips.sort(key=lambda clip: clip[:2])
    found = [_SPEAKER.search(name) for _, name, _ in clips]
    speakers = sorted({one[1] for one in found if one})
    return {
        "speech_commands_v2_test_logmel.npz": {
            "x": quantised(np.stack([clip[2] for clip in clips])),
            "y": np.array([clip[0] for clip in clips], dtype=np.int64),
            "client": np.array([speakers.index(one[1]) if one else -1 for one in found], dtype=np.int64),
            "scale": np.array(_SCALE),
            "label": np.array(LABELS),
            "speaker": np.array(speakers),
        }
    }


def _samples(content: bytes, name: str) -> NDArray[Any]:
    """One second of a recording in [-1, 1]: a shorter one ends with silence, a longer one is cut."""
    with wave.open(io.BytesIO(content)) as clip:
        form = (clip.getnchannels(), clip.getsampwidth(), clip.getframerate())
        if form != (1, 2, _RATE):
            raise DataError(
                f"{name} has {form[0]} channels of {8 * form[1]} bits at {form[2]} Hz, not 1 of 16 at 16000"
            )
        values = np.frombuffer(clip.readframes(_RATE), "<i2").astype(np.float64) / 32768
    return np.pad(values, (0, _RATE - len(values)))


def energies(samples: NDArray[Any]) -> NDArray[Any]:
    """The log-mel energies of one second, ``[49, 40]``."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, _WINDOW)[::_HOP]
    window = np.hanning(_WINDOW + 1)[:-1]
    power = np.abs(np.fft.rfft(frames * window, _POINTS)) ** 2
    made: NDArray[Any] = np.log(power @ mel_bands().T + 1e-6)
    return made


def mel_bands() -> NDArray[Any]:
    """The weight of every frequency in every band, ``[40, 257]``: triangles with the height 1."""
    lowest, highest = (2595 * np.log10(1 + end / 700) for end in (_LOWEST, _HIGHEST))
    edges = 700 * (10 ** (np.linspace(lowest, highest, _BANDS + 2) / 2595) - 1)
    low, middle, high = (edges[k : k + _BANDS, None] for k in range(3))
    frequency = np.arange(_POINTS // 2 + 1) * _RATE / _POINTS
    rising, falling = (frequency - low) / (middle - low), (high - frequency) / (high - middle)
    bands: NDArray[Any] = np.maximum(0, np.minimum(rising, falling))
    return bands


def quantised(values: NDArray[Any]) -> NDArray[Any]:
    """Energies in 8 bits over the stored range."""
    low, high = _SCALE
    levels: NDArray[Any] = np.rint((values - low) / (high - low) * 255).clip(0, 255).astype(np.uint8)
    return levels

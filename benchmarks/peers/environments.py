"""A virtual environment of its own for every peer, made once and kept in ``.peers/``; none becomes a dependency."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".peers"


@dataclass(frozen=True)
class Peer:
    """A program that takes turns: its name in tables, its module in ``runners``, and what it needs; ours needs
    nothing."""

    name: str
    module: str
    needs: tuple[str, ...] = ()
    threads: bool = False
    """Whether its number of torch threads can be chosen; the better of one and all cores is used."""

    @property
    def folder(self) -> Path:
        return FOLDER / self.module

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python") if self.needs else sys.executable

    @property
    def is_ready(self) -> bool:
        """Whether the environment exists, was made for these versions, and still has its Python."""
        made = self._stamp.is_file() and self._stamp.read_text() == self._wanted
        return not self.needs or (made and Path(self.python).exists())

    @property
    def _stamp(self) -> Path:
        return self.folder / "installed"

    @property
    def _wanted(self) -> str:
        return hashlib.sha256(" ".join(self.needs).encode()).hexdigest()

    def prepare(self) -> None:
        """Make the environment unless it is there; pip's own settings apply."""
        if self.is_ready:
            return
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(self.folder)], check=True)
        install = [self.python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *self.needs]
        subprocess.run(install, check=True)
        self._stamp.write_text(self._wanted)


_TORCH = "torch==2.13.0"
PEERS = (
    Peer("fedalloy", "fedalloy"),
    Peer("hand-written loop", "loop", threads=True),
    Peer("FedJAX", "fedjax", ("fedjax==0.0.17", "jax==0.4.38", "jaxlib==0.4.38")),
    Peer("pfl-research", "pfl", ("pfl==0.6.0", _TORCH), threads=True),
    Peer("Flower", "flower", ("flwr[simulation]==1.41.0", _TORCH)),
    Peer("fluke", "fluke", ("fluke-fl==0.8.1", _TORCH), threads=True),
)

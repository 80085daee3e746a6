"""What every test gets: one thread, a known torch seed, property tests that do not mind a slow machine."""

from __future__ import annotations

import os
import signal

# Before torch loads: two test workers on few cores are slower with threads than without.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.cli.lines import Nursery

torch.set_num_threads(1)
# A shell that starts the tests in the background has them ignore Ctrl-C, and every process they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# CI draws the same examples every time, so that a change is judged by its own faults; elsewhere they vary.
settings.register_profile("house", deadline=None, max_examples=50, derandomize="CI" in os.environ)
settings.load_profile("house")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's folder."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def cli(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Command lines of this source, for all tests of this process: each is a process of its own, what they load is
    loaded once."""
    nursery = Nursery(root / "src", tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()


@pytest.fixture(autouse=True)
def _known_torch_state() -> Iterator[None]:
    """Tests in random order must not see each other through torch's global generator or default dtype."""
    dtype = torch.get_default_dtype()
    # torch.manual_seed formats the whole stack once for every kind of card that is not there.
    (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(0)
    yield
    torch.set_default_dtype(dtype)

"""One federation of real processes for all tests that need one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.flower.sites import Site

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def programs_find_us() -> Iterator[None]:
    """Programs find fedalloy and the tests' own modules, wherever they are started, and leave cores to each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def site(programs_find_us: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server and three nodes, started once, as long as the tests of this process last."""
    from tests.flower.sites import Site

    with Site.large(tmp_path_factory.mktemp("federation") / "site").up() as site:
        yield site

"""The versions of Flower that fedalloy was tested with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

TESTED = ("1.41",)
"""As in the extra ``flower`` of ``pyproject.toml``."""


def is_tested(found: str | None = None) -> bool:
    """Whether a version of Flower, or else the installed one, is among those.

    >>> [is_tested(one) for one in ("1.41.0", "1.41.3", "1.42.0", "1.4.1", "2.0")]
    [True, True, False, False, False]
    """
    return ".".join((found or installed()).split(".")[:2]) in TESTED


def installed() -> str:
    """The installed version; empty where there is none."""
    try:
        return version("flwr")
    except PackageNotFoundError:
        return ""


def advice(found: str) -> str:
    """What another version means for a federation."""
    return (
        f"{found}, tested is {', '.join(f'{one}.*' for one in TESTED)}: programs start in Flower's own, slower way, "
        "and nodes may refuse to start; pip install 'fedalloy[flower]'"
    )

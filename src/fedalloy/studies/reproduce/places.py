"""Where the recipes that come with fedalloy are, in a checkout and in an installed package."""

from __future__ import annotations

from pathlib import Path

from fedalloy.core.errors import SpecError, nearest

_PACKAGE = Path(__file__).resolve().parents[2]


def recipes_folder() -> Path:
    """``recipes`` of the checkout, or the copy that a wheel carries inside the package."""
    for place in (_PACKAGE / "recipes", _PACKAGE.parents[1] / "recipes"):
        if (place / "claims").is_dir():
            return place
    raise SpecError(
        "this installation of fedalloy carries no recipes: install it from its wheel, or work in a checkout of its "
        "repository"
    )


def experiment_names() -> list[str]:
    """The names of the experiments that come with fedalloy."""
    return sorted(file.stem for file in (recipes_folder() / "claims").glob("*.toml"))


def claims_file(name: str) -> Path:
    """The declaration of an experiment: one that comes with fedalloy, by its name, or any file."""
    if name.endswith(".toml"):
        return Path(name)
    known = experiment_names()
    if name not in known:
        raise SpecError(f"unknown experiment '{name}': {nearest(name, known)}")
    return recipes_folder() / "claims" / f"{name}.toml"

"""``fedalloy data fetch``: from a name to files that the loader of that data set reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedalloy.core import registry
from fedalloy.core.errors import DataError
from fedalloy.tasks import locate
from fedalloy.tasks.converting import ABOUT, Converted, convert
from fedalloy.tasks.originals import ALIASES, Original, Progress, fetch, originals_of
from fedalloy.tasks.unpacking import MOST_MB

ORIGINALS_FOLDER = "originals"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Fetched:
    """What is there now: the files that the loader reads, and what else there is to say."""

    dataset: str
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FetchRequest:
    """What to fetch: from which ``source`` (default: the first that answers), from another ``url`` (of the file, or
    of the folder that holds all files), with a ``sha256`` of one's own, or from files at hand (``given``); it may
    unpack to ``most_mb`` megabytes."""

    dataset: str
    source: str | None = None
    url: str | None = None
    sha256: str | None = None
    given: tuple[Path, ...] = ()
    most_mb: float = MOST_MB


def prepare(
    wish: FetchRequest, folder: Path, say: Say = lambda text: None, told: Progress = lambda done, size: None
) -> Fetched:
    """Fetch and convert a data set; what is there already is not fetched again."""
    name = ALIASES.get(wish.dataset, wish.dataset)
    files = originals_of(name)
    wanted = _loader_files(name)
    ready = [folder / one for one in wanted]
    if not wish.given and all(path.is_file() for path in ready):
        return Fetched(name, tuple(ready), ("all files are there already; `fedalloy data check` compares them",))
    if wish.given:
        _check_given(wish)
        paths, notes = list(wish.given), _compared(wish.given, files)
    else:
        paths, notes = _from_somewhere(_chosen(files, wish), folder / ORIGINALS_FOLDER, say, told), ()
    say(f"converting {', '.join(path.name for path in paths)}")
    made = convert(name, {path.name: path for path in paths}, wish.most_mb)
    written = tuple(_written(made, folder))
    return Fetched(name, written, (*notes, *_differing(made, folder, name), *_missing(name, wanted, folder)))


def _chosen(files: Sequence[Original], wish: FetchRequest) -> dict[str, list[Original]]:
    """The files to fetch by source, in the order in which sources are tried."""
    sources = list(dict.fromkeys(one.source for one in files))
    if wish.source is not None and wish.source not in sources:
        raise DataError(f"{wish.dataset} has no source '{wish.source}'; it has {', '.join(sources)}")
    kept = [wish.source] if wish.source else sources[:1] if wish.url or wish.sha256 else sources
    found = {source: [one for one in files if one.source == source] for source in kept}
    if wish.sha256 and len(found[kept[0]]) > 1:
        raise DataError(f"'{wish.dataset}' has {len(found[kept[0]])} files: --sha256 needs a data set with one file")
    if not wish.url and not wish.sha256:
        return found
    return {kept[0]: [_moved(one, wish, len(found[kept[0]]) > 1) for one in found[kept[0]]]}


def _moved(one: Original, wish: FetchRequest, several: bool) -> Original:
    """The same file at another address, or with another checksum."""
    url = one.url
    if wish.url:
        url = f"{wish.url.rstrip('/')}/{one.url.rpartition('/')[2]}" if several else wish.url
    return replace(one, url=url, sha256=wish.sha256 or one.sha256)


def _from_somewhere(sources: dict[str, list[Original]], folder: Path, say: Say, told: Progress) -> list[Path]:
    """The files of the first source that has them all; the error says what was wrong with each."""
    troubles = []
    for source, files in sources.items():
        try:
            paths = []
            for one in files:
                say(f"{one.filename} from {one.url}")
                paths.append(fetch(one, folder, told))
            return paths
        except DataError as error:
            troubles.append(f"{source}: {error}")
    name = next(iter(sources.values()))[0].dataset
    raise DataError(
        f"{name} could not be fetched. {'; '.join(troubles)}. Without a connection, download the files elsewhere "
        f"and run: fedalloy data fetch {name} --from FILE"
    )


def _check_given(wish: FetchRequest) -> None:
    """Refuse options that mean nothing for files at hand, and a file with another checksum than the user's."""
    if wish.source is not None or wish.url is not None:
        raise DataError("--from takes files that are here, so nothing is fetched: leave --source and --url out")
    names = [path.name for path in wish.given]
    if len({*names}) < len(names):
        raise DataError(
            f"--from names two files called {max(names, key=names.count)}; rename one, so that its part shows"
        )
    if wish.sha256 is None:
        return
    if len(wish.given) > 1:
        raise DataError(f"--sha256 is the checksum of one file, and --from names {len(wish.given)}")
    found = locate.checksum(wish.given[0]) if wish.given[0].is_file() else wish.sha256
    if found != wish.sha256:
        raise DataError(f"{wish.given[0]} differs from --sha256 (expected {wish.sha256}, found {found})")


def _compared(given: Sequence[Path], files: Sequence[Original]) -> tuple[str, ...]:
    """What is known about files that the user has downloaded."""
    notes = []
    for path in given:
        if not path.is_file():
            raise DataError(f"{path} is not a file; --from takes the files that you downloaded")
        found = locate.checksum(path)
        known = next((one for one in files if path.name in (one.filename, one.url.rpartition("/")[2])), None)
        if known is not None and known.sha256 is not None:
            same = (
                "has the known checksum" if found == known.sha256 else f"differs from the known file ({known.sha256})"
            )
            notes.append(f"{path.name} {same}")
        else:
            notes.append(f"{path.name}: sha256 {found} (none is published to compare it with)")
    return tuple(notes)


def _written(made: Converted, folder: Path) -> list[Path]:
    """Write the files; one gets its name when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for filename, content in made.items():
        part = folder / f"{filename}.part"
        with part.open("wb") as stream:
            if isinstance(content, bytes):
                stream.write(content)
            else:
                np.savez_compressed(stream, **content)  # type: ignore[arg-type]
        part.replace(folder / filename)
        paths.append(folder / filename)
    return paths


def _differing(made: Converted, folder: Path, name: str) -> tuple[str, ...]:
    """A note about files that are not those with which the recipes were checked, and a record of all."""
    known, notes = locate.known(), []
    for filename in made:
        found = locate.checksum(folder / filename)
        locate.record(folder, filename, {"sha256": found, "made from": name})
        if filename in known and known[filename].sha256 not in ("", found):
            notes.append(f"{filename} is not the file with which fedalloy's recipes were checked; results can differ")
    return (*notes, ABOUT[name]) if notes and name in ABOUT else tuple(notes)


def _missing(name: str, wanted: Sequence[str], folder: Path) -> tuple[str, ...]:
    """A note about files that the loader reads and that these originals do not have."""
    lacking = [file for file in wanted if not (folder / file).is_file()]
    return (f"{name} also needs {', '.join(lacking)}, which these files do not hold",) if lacking else ()


def _loader_files(name: str) -> list[str]:
    return list(getattr(registry.everything("dataset").get(name), "files", {}))

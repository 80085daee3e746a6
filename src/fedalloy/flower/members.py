"""The members of a federation, changed while it runs: admit a node, revoke it, give it a new key.

A member is a public key in the server's ``nodes/``, under the node's name. Its seat, and so its client, belongs to the
name: a node with a new key continues with the state on its own disk.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from fedalloy.core.errors import SpecError, nearest
from fedalloy.experiment.records import atomic
from fedalloy.flower.admission import check_registrable, key_file, keys, public_key
from fedalloy.flower.database import entries
from fedalloy.flower.layout import ServerPlace
from fedalloy.flower.names import check_name
from fedalloy.flower.node_registry import identity_of

_FORMER = "former"
"""The folder, below ``nodes/``, of keys that are not admitted any more."""


def add(place: ServerPlace, name: str, key: Path) -> None:
    """Put the key of a new node into the folder; refused if the name or the key is taken."""
    check_name(name)
    if name in keys(place):
        raise SpecError(f"'{name}' has a key already; give it a new one with 'fedalloy flower rotate'")
    _check_new(place, name, key)
    atomic.write_text(key_file(place, name), key.read_text(encoding="utf-8"))


def former_names(place: ServerPlace) -> dict[str, str]:
    """The names of nodes by the keys that they had before."""
    found = {}
    for file in sorted((place.folder / "nodes" / _FORMER).glob("*.pub")):
        with contextlib.suppress(SpecError):
            found[identity_of(public_key(file))] = file.stem.rpartition("-")[0]
    return found


def remove(place: ServerPlace, name: str) -> None:
    """Take the key of a node out of the folder; it is kept among the former ones."""
    _check_known(place, name)
    former = key_file(place, name).parent / _FORMER
    former.mkdir(exist_ok=True)
    key_file(place, name).rename(former / f"{name}-{time.time_ns()}.pub")


def replace_key(place: ServerPlace, name: str, key: Path) -> None:
    """Give a node another key; the old one is kept among the former ones."""
    _check_known(place, name)
    _check_new(place, name, key)
    text = key.read_text(encoding="utf-8")
    remove(place, name)
    atomic.write_text(key_file(place, name), text)


def _check_known(place: ServerPlace, name: str) -> None:
    known = [file.stem for file in place.node_keys]
    if name not in known:
        raise SpecError(f"no node '{name}' is admitted; {nearest(name, known)}")


def _check_new(place: ServerPlace, name: str, key: Path) -> None:
    """Refuse what is no public key, the key of another node, or one that was removed before."""
    found = public_key(key)
    owner = next((name for name, other in keys(place).items() if other == found), None)
    if owner:
        raise SpecError(f"{key} is the key of '{owner}'; every node needs its own key")
    check_registrable(key, name, found, entries(place))

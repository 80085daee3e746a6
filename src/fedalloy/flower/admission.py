"""Admission of nodes: exactly those whose public keys are in the server's folder.

Every start and every ``admit`` update Flower's table of nodes from the folder, by Flower's own commands: a key that is
gone is removed, a replaced one is removed and the new one added. Flower keeps removed keys in its table and registers
no key twice, so a removed key cannot come back, and a key stays with its name. ``seats.json`` then names the key of
every client, and a run identifies a client by the node with that key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedalloy.core.errors import SpecError
from fedalloy.experiment.records import atomic
from fedalloy.flower.database import GONE, Entry, entries
from fedalloy.flower.flwr_cli import CONNECTION, FlwrCli, FlwrFailed
from fedalloy.flower.layout import ServerPlace
from fedalloy.flower.node_registry import Seat, identity_of
from fedalloy.flower.programs import SEATS


def admit(place: ServerPlace, cli: FlwrCli) -> dict[str, str]:
    """Admit exactly the nodes whose public keys are in the server's folder; returns their numbers by name."""
    wanted, found = keys(place), entries(place)
    for name, key in wanted.items():
        check_registrable(key_file(place, name), name, key, found)
    kept = {one.name: one.number for one in found if one.status != GONE and wanted.get(one.name) == one.key}
    for one in found:
        if one.status != GONE and kept.get(one.name) != one.number:
            cli.ask("supernode", "unregister", one.number, CONNECTION)
    _write_seats(place, wanted)
    for left in (place.folder / "nodes").glob("*.id"):  # of earlier versions, which relied on them
        left.unlink()
    return {name: kept.get(name) or _register(place, cli, name) for name in wanted}


def keys(place: ServerPlace) -> dict[str, bytes]:
    """The public keys in the server's folder by node name, in Flower's format."""
    found: dict[str, bytes] = {}
    for file in place.node_keys:
        found[file.stem] = public_key(file)
        twin = next((name for name, key in found.items() if key == found[file.stem] and name != file.stem), None)
        if twin:
            raise SpecError(f"{file} is also the key of '{twin}'; every node needs its own key")
    return found


def key_file(place: ServerPlace, name: str) -> Path:
    """Where the public key of a node is."""
    return place.folder / "nodes" / f"{name}.pub"


def public_key(file: Path) -> bytes:
    """The key in an OpenSSH file, in Flower's format."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    try:
        key = load_ssh_public_key(file.read_bytes())
        return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise SpecError(
            f"{file} is not a public key ({error}); it should be the node.key.pub of a node, made by 'fedalloy flower "
            'init\' or by ssh-keygen -t ecdsa -b 384 -N "" -f node.key'
        ) from None


def check_registrable(file: Path, name: str, key: bytes, found: Sequence[Entry]) -> None:
    """Refuse, before anything is changed, a key that Flower would not register under this name."""
    known = next((one for one in found if one.key == key), None)
    new = "the node's operator makes a new key pair and sends its node.key.pub"
    if known and known.status == GONE:
        raise SpecError(
            f"{file} is a key that was removed from this federation, and Flower admits no key a second time: {new}"
        )
    if known and known.name != name:
        raise SpecError(f"{file} is registered as '{known.name}'; keep that name, or {new}")


def read_seats(file: Path | None = None) -> Sequence[Seat] | None:
    """The seats in a file, by default the one that the server's programs were started with; None where there is no such
    file, on a server that is not fedalloy's."""
    named = file or (Path(os.environ[SEATS]) if os.environ.get(SEATS) else None)
    if named is None or not named.exists():
        return None if named is None else ()
    try:
        found = json.loads(named.read_text(encoding="utf-8"))
        return tuple(Seat(str(one["name"]), str(one["key"])) for one in found)
    except (ValueError, KeyError, TypeError) as error:
        raise SpecError(f"{named} cannot be read ({error}); 'fedalloy flower admit' writes it again") from None


def _write_seats(place: ServerPlace, wanted: Mapping[str, bytes]) -> None:
    """In the order of ``clients`` in ``server.toml``; a node whose key is gone keeps its number, which stays unused."""
    before = [seat.name for seat in read_seats(place.seats) or ()]
    names = dict.fromkeys((*place.clients, *before, *sorted(wanted)))
    told = [{"name": name, "key": identity_of(wanted[name]) if name in wanted else ""} for name in names]
    atomic.write_text(place.seats, json.dumps(told, indent=2) + "\n")


def _register(place: ServerPlace, cli: FlwrCli, name: str) -> str:
    file = key_file(place, name)
    try:
        return str(cli.ask("supernode", "register", str(file), CONNECTION, "--name", name)["node-id"])
    except FlwrFailed as error:
        raise SpecError(f"{file} was not accepted: {error}") from error

"""The command lines of Flower's programs, and the surroundings they run in."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path

from fedalloy.core.errors import SpecError
from fedalloy.flower import warm
from fedalloy.flower.config import QUIET, as_arguments
from fedalloy.flower.guard import ALLOW
from fedalloy.flower.layout import NodePlace, ServerPlace

CONNECTION = "fedalloy"
"""The name under which ``flwr`` knows the server."""
SEATS = "FEDALLOY_SEATS"
"""Names, for everything that a server starts, the file that says which key is which client."""
_DOORS = "FLWR_INTERNAL_"
"""Variables that would open further ports of a SuperLink, on every network of its machine."""


def superlink(place: ServerPlace) -> list[str]:
    """The SuperLink, which listens on this machine alone: encrypted and with known nodes only, unless its folder says
    otherwise; it installs nothing."""
    command = [*program("flower-superlink"), "--host", "127.0.0.1", "--port", str(place.link_port)]
    command += ["--database", str(place.database), "--disable-runtime-dependency-installation"]
    if not place.secure:
        return [*command, "--insecure"]
    files = place.files
    command += ["--ssl-ca-certfile", str(files.ca_certificate), "--ssl-certfile", str(files.certificate)]
    return [*command, "--ssl-keyfile", str(files.key), "--enable-supernode-auth"]


def front(place: ServerPlace) -> list[str]:
    """What partners reach: only ever with encryption, and with what nodes need behind it."""
    command = [sys.executable, "-P", "-m", "fedalloy.flower.front", str(place.folder)]
    return [*command, place.host, str(place.port), str(place.link_port)]


def supernode(place: NodePlace, extra: Mapping[str, str | int] | None = None, bundles: Iterable[str] = ()) -> list[str]:
    """One node; what it says about itself stays on its machine. For trials with apps that are not fedalloy's: ``extra``
    keys for them, and the hashes of their ``bundles``, without which the node refuses them."""
    command = [*program("flower-supernode"), *(word for one in bundles for word in (ALLOW, one))]
    command += ["--superlink", place.server, "--host", "127.0.0.1", "--port", str(place.port)]
    command += ["--node-config", as_arguments({**place.config.to_keys(), **(extra or {})})]
    if not place.secure:
        return [*command, "--insecure"]
    return [*command, "--root-certificates", str(place.authority), "--auth-supernode-private-key", str(place.key)]


def environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a Flower program: quiet, its files in ``home``, and our programs found first."""
    home.mkdir(parents=True, exist_ok=True)
    folders = (str(warm.write_stand_in(home / "bin")), str(Path(sys.executable).parent))
    path = os.pathsep.join((*folders, os.environ.get("PATH", os.defpath)))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith((_DOORS, SEATS))}
    return {**inherited, **QUIET, "FLWR_HOME": str(home), "PATH": path, **(extra or {})}


def server_environment(place: ServerPlace, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of the SuperLink and of what it starts."""
    seats = {SEATS: str(place.seats)} if place.secure else {}
    return environment(place.home, {**seats, **(extra or {})})


def write_connection(place: ServerPlace) -> None:
    """Tell ``flwr`` where the server is; written anew each time, since a port may have changed."""
    lines = ["[superlink]", f'default = "{CONNECTION}"', f"[superlink.{CONNECTION}]"]
    lines += [f'address = "{place.local_address}"']
    lines += [f'root-certificates = "{place.files.ca_certificate}"'] if place.secure else ["insecure = true"]
    place.home.mkdir(parents=True, exist_ok=True)
    (place.home / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def program(name: str) -> list[str]:
    """One of Flower's programs, ready for its arguments."""
    if not entry_points(group="console_scripts", name=name):
        raise SpecError(f"'{name}' is not installed here; run: pip install 'fedalloy[flower]'")
    return warm.command(name)

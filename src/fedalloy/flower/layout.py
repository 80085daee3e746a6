"""The folders of a federation, and the two small files that describe them.

The server's folder holds ``server.toml``, a node's folder ``node.toml``; every path in them is relative to the folder,
so that a folder can be moved to the machine it is for.
"""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedalloy.core.errors import SpecError, nearest
from fedalloy.flower.config import FROM_RECIPE, NodeConfig
from fedalloy.flower.pki import ServerFiles

SERVER_FILE, NODE_FILE = "server.toml", "node.toml"
RUNNING = "running.json"
"""In the server's folder while a local federation runs: its port, the process that started it, and its nodes."""
PAUSED = "paused"
"""In a run folder from ``pause`` on, until the run is continued."""
_SERVER_KEYS = ("host", "port", "secure", "local_port", "clients")
_NODE_KEYS = ("server", "secure", "port", "client", "data", "store", "policy", "device", "threads")


@dataclass(frozen=True)
class ServerPlace:
    """The server's folder. Partners reach it at ``host:port``, where its front listens; the SuperLink itself listens on
    ``local_port`` of loopback only. Without encryption there is no front, and only this machine can connect."""

    folder: Path
    host: str
    port: int
    secure: bool = True
    local_port: int = 0
    clients: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.secure and not is_loopback(self.host):
            raise SpecError(
                f"the server would listen on '{self.host}' without encryption, for everyone; only 127.0.0.1 is "
                "allowed. Set 'secure = true', with certificates of 'fedalloy flower init', or use this machine only"
            )
        if self.secure and self.local_port == self.port:
            raise SpecError(f"'port' and 'local_port' are both {self.port}; the front and the SuperLink need one each")

    @staticmethod
    def read(folder: Path) -> ServerPlace:
        """The settings in ``server.toml``."""
        values = _read(folder / SERVER_FILE, _SERVER_KEYS)
        return ServerPlace(
            folder.absolute(),
            str(values["host"]),
            int(values["port"]),
            bool(values.get("secure", True)),
            int(values.get("local_port", 0)),
            _names(values.get("clients", []), folder / SERVER_FILE),
        )

    @property
    def files(self) -> ServerFiles:
        """Its certificates."""
        return server_files(self.folder)

    @property
    def node_keys(self) -> list[Path]:
        """The public keys of the nodes that may take part; a file's name is the node's name."""
        return sorted((self.folder / "nodes").glob("*.pub"))

    @property
    def seats(self) -> Path:
        """The file with the key of every client, written at every start and every ``admit``."""
        return self.folder / "seats.json"

    @property
    def database(self) -> Path:
        """The SuperLink's database of nodes and runs."""
        return self.folder / "state.db"

    @property
    def home(self) -> Path:
        """Flower's own files."""
        return self.folder / "flwr"

    @property
    def link_port(self) -> int:
        """The SuperLink's port; default: next to the port that partners reach."""
        if not self.secure:
            return self.port
        return self.local_port or (self.port + 1 if self.port < 65535 else self.port - 1)

    @property
    def local_address(self) -> str:
        """The SuperLink's address on the server's own machine, with full access."""
        return f"127.0.0.1:{self.link_port}"

    @property
    def door(self) -> str:
        """The address for nodes, from this machine: the front, or without encryption the SuperLink."""
        everywhere = self.host in ("0.0.0.0", "::", "") or not self.secure
        host = "127.0.0.1" if everywhere else f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class NodePlace:
    """A node's folder: it connects to ``server``, and to its own ClientApp on ``port``."""

    folder: Path
    server: str
    port: int
    config: NodeConfig
    secure: bool = True

    def __post_init__(self) -> None:
        if not self.secure and not is_loopback(self.server.rpartition(":")[0].strip("[]")):
            raise SpecError(
                f"the node would connect to '{self.server}' without encryption, and take orders from anyone in "
                "between; only 127.0.0.1 is allowed. Set 'secure = true', with the ca.crt of the server"
            )

    @staticmethod
    def read(folder: Path, trial: bool = False) -> NodePlace:
        """The settings in ``node.toml``. In a ``trial`` on one machine, a node without a setting for its data uses its
        share of the recipe's own."""
        values = dict(_read(folder / NODE_FILE, _NODE_KEYS))
        if trial:
            values["data"] = values.get("data") or FROM_RECIPE
        place = folder.absolute()
        for key in ("server", "client", "data"):
            if values.get(key, "") == "":
                raise SpecError(f"{folder / NODE_FILE}: '{key}' is missing or empty; see its comment in the file")
        config = NodeConfig(
            str(values["client"]),
            _data(place, str(values["data"])),
            place / str(values.get("store", "store")),
            place / str(values["policy"]) if values.get("policy") else None,
            str(values.get("device", "cpu")),
            int(values["threads"]) if values.get("threads") else None,
        )
        return NodePlace(
            place, str(values["server"]), int(values.get("port", 9094)), config, bool(values.get("secure", True))
        )

    @property
    def name(self) -> str:
        """The node's name: that of its folder."""
        return self.folder.name

    @property
    def key(self) -> Path:
        """Its private key."""
        return self.folder / "node.key"

    @property
    def number_file(self) -> Path:
        """Its number at the server, by which a killed node is signed off when it comes back."""
        return self.config.store / "number.json"

    @property
    def authority(self) -> Path:
        """The certificate by which it authenticates the server."""
        return self.folder / "ca.crt"

    @property
    def home(self) -> Path:
        """Flower's own files."""
        return self.folder / "flwr"


def is_loopback(host: str) -> bool:
    """Whether a host can only be reached from this machine.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "fed.example.org", "")]
    [True, True, True, False, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def server_files(folder: Path) -> ServerFiles:
    """The certificates of a server's folder."""
    return ServerFiles(folder / "ca.crt", folder / "ca.key", folder / "server.crt", folder / "server.key")


def _names(told: Any, where: Path) -> tuple[str, ...]:
    if not isinstance(told, list) or not all(isinstance(one, str) for one in told) or len(set(told)) < len(told):
        raise SpecError(f"{where}: 'clients' is not a list of different names of nodes: {told!r:.200}")
    return tuple(told)


def _data(place: Path, data: str) -> str:
    """``recipe`` and functions are names; everything else is a path."""
    return data if data == FROM_RECIPE or ":" in data else str(place / Path(data).expanduser())


def _read(path: Path, allowed: tuple[str, ...]) -> Mapping[str, Any]:
    if not path.is_file():
        raise SpecError(f"{path} does not exist; name a folder that 'fedalloy flower init' wrote")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path} cannot be read: {error}") from error
    for key in values:
        if key not in allowed:
            raise SpecError(f"{path}: unknown key '{key}'; {nearest(key, allowed)}")
    return values

"""Where things lie in the folders of a federation, and the two small files that describe them.

The server's folder holds ``server.toml``, a node's folder ``node.toml``; every path in them is relative to the folder,
so that a folder can be moved to the machine it is for.
"""

from __future__ import annotations

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
"""In the server's folder while a local federation runs: the port it has, who started it, and its nodes."""
_SERVER_KEYS = ("host", "port", "secure")
_NODE_KEYS = ("server", "secure", "port", "client", "data", "store", "policy", "device", "threads")


@dataclass(frozen=True)
class ServerPlace:
    """The server's folder: it listens on ``host:port``."""

    folder: Path
    host: str
    port: int
    secure: bool = True

    @staticmethod
    def read(folder: Path) -> ServerPlace:
        """What ``server.toml`` says."""
        values = _read(folder / SERVER_FILE, _SERVER_KEYS)
        return ServerPlace(
            folder.absolute(), str(values["host"]), int(values["port"]), bool(values.get("secure", True))
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
    def database(self) -> Path:
        """Where the SuperLink remembers nodes and runs."""
        return self.folder / "state.db"

    @property
    def home(self) -> Path:
        """Flower's own files."""
        return self.folder / "flwr"

    @property
    def local_address(self) -> str:
        """Where the server's own machine reaches it."""
        return f"{'127.0.0.1' if self.host in ('0.0.0.0', '::', '') else self.host}:{self.port}"


@dataclass(frozen=True)
class NodePlace:
    """A node's folder: it speaks to ``server``, and to its own ClientApp on ``port``."""

    folder: Path
    server: str
    port: int
    config: NodeConfig
    secure: bool = True

    @staticmethod
    def read(folder: Path) -> NodePlace:
        """What ``node.toml`` says."""
        values = _read(folder / NODE_FILE, _NODE_KEYS)
        place = folder.absolute()
        for key in ("server", "client", "data"):
            if values.get(key, "") == "":
                raise SpecError(
                    f"{folder / NODE_FILE}: '{key}' is missing or empty; its comment says what belongs there"
                )
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
        """A node is called like its folder."""
        return self.folder.name

    @property
    def key(self) -> Path:
        """Its private key."""
        return self.folder / "node.key"

    @property
    def authority(self) -> Path:
        """The certificate by which it knows the server."""
        return self.folder / "ca.crt"

    @property
    def home(self) -> Path:
        """Flower's own files."""
        return self.folder / "flwr"


def server_files(folder: Path) -> ServerFiles:
    """The certificates of a server's folder."""
    return ServerFiles(folder / "ca.crt", folder / "ca.key", folder / "server.crt", folder / "server.key")


def _data(place: Path, data: str) -> str:
    """``recipe`` and functions are names; everything else is a path."""
    return data if data == FROM_RECIPE or ":" in data else str(place / Path(data).expanduser())


def _read(path: Path, allowed: tuple[str, ...]) -> Mapping[str, Any]:
    if not path.is_file():
        raise SpecError(f"{path} is not there; name a folder that 'fedalloy flower init' wrote")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path} cannot be read: {error}") from error
    for key in values:
        if key not in allowed:
            raise SpecError(f"{path}: unknown key '{key}'; {nearest(key, allowed)}")
    return values

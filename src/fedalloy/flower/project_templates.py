"""``fedalloy flower init``: the complete folders of a federation, ready to hand out.

Commented settings, instructions and systemd units come from ``templates/``.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from fedalloy.core.errors import SpecError
from fedalloy.flower.layout import NODE_FILE, SERVER_FILE, is_loopback, server_files
from fedalloy.flower.names import check_host, check_name
from fedalloy.flower.pki import DAYS, make_node_key, make_server_certificate, public_half, write_public

_UNSAFE = "**This federation is NOT encrypted and admits any node. Use it on one machine only, and without real data.**"
_SAFE = (
    "The connection is encrypted. The server proves who it is by `ca.crt`, this machine by `node.key`.\n"
    "**Keep `node.key` to yourself**; if another person may have seen it, tell the coordinator at once."
)


@dataclass(frozen=True)
class FederationPlan:
    """What to write: the address of the server, and the nodes.

    ``data`` is the setting for data in the nodes' files; empty by default, so that each operator must set it: a node
    without it does not start.
    """

    nodes: tuple[str, ...]
    host: str = "localhost"
    port: int = 9092
    secure: bool = True
    data: str = ""
    days: int = DAYS

    def __post_init__(self) -> None:
        if not self.nodes:
            raise SpecError("a federation needs at least one node; name them with --names, or count them with --nodes")
        for name in self.nodes:
            check_name(name)
        check_host(self.host)
        if len(set(self.nodes)) < len(self.nodes):
            raise SpecError(f"two nodes have the same name: {', '.join(self.nodes)}")
        if not 1 <= self.port <= 65535:
            raise SpecError(f"port {self.port} does not exist; use 1 to 65535")
        if not self.secure and not is_loopback(self.host):
            raise SpecError(
                f"a federation without encryption must stay on one machine, and '{self.host}' can be reached from "
                "others; omit --host or --insecure"
            )


def __getattr__(name: str) -> Any:
    if name == "Plan":  # its name in an earlier guide
        warnings.warn("fedalloy.flower.project_templates.Plan is now FederationPlan", DeprecationWarning, stacklevel=2)
        return FederationPlan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def numbered(count: int) -> tuple[str, ...]:
    """Default names of nodes.

    >>> numbered(2)
    ('node-0', 'node-1')
    """
    if count < 1:
        raise SpecError(f"a federation of {count} nodes has no data; use 1 or more")
    width = len(str(count - 1))
    return tuple(f"node-{number:0{width}d}" for number in range(count))


def write_federation(folder: Path, plan: FederationPlan) -> None:
    """Write everything or nothing: no unfinished federation is left behind, and an existing one is not changed."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError(f"{folder} exists and is not empty: nothing was written. Choose another folder, or remove it")
    draft = folder.with_name(f".{folder.name}.draft-{os.getpid()}")
    draft.mkdir(parents=True, mode=0o700)
    try:
        _write_server(draft / "server", plan)
        for number, name in enumerate(plan.nodes):
            _write_node(draft / "nodes" / name, draft / "server", plan, number)
        _text(draft / "README.md", _coordinator(plan.nodes, plan.host, plan.port, plan.secure))
        _replace(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _replace(draft: Path, folder: Path) -> None:
    if folder.exists():
        folder.rmdir()
    draft.chmod(0o755)
    draft.rename(folder)


def _write_server(folder: Path, plan: FederationPlan) -> None:
    (folder / "nodes").mkdir(parents=True)
    folder.chmod(0o700)
    listens = "127.0.0.1" if is_loopback(plan.host) else "0.0.0.0"
    local_port = plan.port + 1 if plan.port < 65535 else plan.port - 1
    _text(folder / SERVER_FILE, _server_file(listens, plan.port, local_port, plan.secure, plan.nodes))
    _text(folder / "fedalloy-server.service", _server_unit())
    if plan.secure:
        make_server_certificate(server_files(folder), [plan.host], plan.days)


def _write_node(folder: Path, server: Path, plan: FederationPlan, number: int) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    name, address = folder.name, f"{plan.host}:{plan.port}"
    _text(folder / NODE_FILE, _node_file(address, plan.secure, 9094 + number, number, plan.data))
    _text(folder / "policy.toml", _policy_file())
    _text(folder / "README.md", _hospital(name, address, plan.secure))
    _text(folder / "fedalloy-node.service", _node_unit(name))
    if plan.secure:
        make_node_key(folder / "node.key", name)
        key = public_half(folder / "node.key").read_bytes()
        write_public(server / "nodes" / f"{name}.pub", key)
        write_public(folder / "ca.crt", server_files(server).ca_certificate.read_bytes())


def _text(path: Path, text: str) -> None:
    write_public(path, text.encode())


def _server_file(host: str, port: int, local_port: int, secure: bool, nodes: Sequence[str]) -> str:
    """``server.toml``."""
    safe, clients = str(secure).lower(), json.dumps(list(nodes))
    return _filled("server.toml", host=host, port=port, local_port=local_port, secure=safe, clients=clients)


def _node_file(server: str, secure: bool, port: int, client: int, data: str) -> str:
    """``node.toml``."""
    return _filled("node.toml", server=server, secure=str(secure).lower(), port=port, client=client, data=data)


def _policy_file() -> str:
    """``policy.toml``, an example with all settings."""
    return _filled("policy.toml")


def _coordinator(nodes: Sequence[str], host: str, port: int, secure: bool) -> str:
    """``README.md`` for the operator of the server."""
    listed = "\n".join(f"| `nodes/{name}/` | the operator of {name} |" for name in nodes)
    count = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"
    warning = "" if secure else f"\n{_UNSAFE}\n"
    return _filled("coordinator.md", count=count, warning=warning, listed=listed, host=host, port=port)


def _hospital(name: str, server: str, secure: bool) -> str:
    """``README.md`` for the operator of a node."""
    return _filled("hospital.md", name=name, server=server, guarded=_SAFE if secure else _UNSAFE)


def _server_unit() -> str:
    """A systemd unit for the server."""
    return _unit("Server of a fedalloy federation", "server", "/srv/fedalloy/server")


def _node_unit(name: str) -> str:
    """A systemd unit for a node."""
    return _unit(f"Node {name} of a fedalloy federation", "node", f"/etc/fedalloy/{name}")


def _unit(description: str, command: str, folder: str) -> str:
    return _filled("unit.service", description=description, command=command, folder=folder)


def _filled(template: str, **values: object) -> str:
    """A template with its values filled in; a missing value is an error."""
    text = resources.files("fedalloy.flower").joinpath("templates", template).read_text(encoding="utf-8")
    return Template(text).substitute(values)

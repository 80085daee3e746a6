"""The files that ``fedalloy flower init`` writes for people: settings with their meaning, letters, systemd units."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from string import Template

_UNSAFE = "**This federation is NOT encrypted and lets anybody in. Use it on one machine only, and with no real data.**"
_SAFE = (
    "The connection is encrypted. The server proves who it is by `ca.crt`, this machine by `node.key`.\n"
    "**Keep `node.key` to yourself**; if somebody else may have seen it, tell the coordinator at once."
)


def server_file(host: str, port: int, local_port: int, secure: bool, nodes: Sequence[str]) -> str:
    """``server.toml``."""
    safe, clients = str(secure).lower(), json.dumps(list(nodes))
    return _filled("server.toml", host=host, port=port, local_port=local_port, secure=safe, clients=clients)


def node_file(server: str, secure: bool, port: int, client: int, data: str) -> str:
    """``node.toml``."""
    return _filled("node.toml", server=server, secure=str(secure).lower(), port=port, client=client, data=data)


def policy_file() -> str:
    """``policy.toml``, an example with everything that can be said."""
    return _filled("policy.toml")


def coordinator(nodes: Sequence[str], host: str, port: int, secure: bool) -> str:
    """``README.md`` for whoever runs the server."""
    listed = "\n".join(f"| `nodes/{name}/` | the operator of {name} |" for name in nodes)
    count = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"
    warning = "" if secure else f"\n{_UNSAFE}\n"
    return _filled("coordinator.md", count=count, warning=warning, listed=listed, host=host, port=port)


def hospital(name: str, server: str, secure: bool) -> str:
    """``README.md`` for the operator of a node, in plain words."""
    return _filled("hospital.md", name=name, server=server, guarded=_SAFE if secure else _UNSAFE)


def server_unit() -> str:
    """A systemd unit for the server."""
    return _unit("Server of a fedalloy federation", "server", "/srv/fedalloy/server")


def node_unit(name: str) -> str:
    """A systemd unit for a node."""
    return _unit(f"Node {name} of a fedalloy federation", "node", f"/etc/fedalloy/{name}")


def _unit(description: str, command: str, folder: str) -> str:
    return _filled("unit.service", description=description, command=command, folder=folder)


def _filled(template: str, **values: object) -> str:
    """A template with its values; one that is missing is an error."""
    text = resources.files("fedalloy.flower").joinpath("templates", template).read_text(encoding="utf-8")
    return Template(text).substitute(values)

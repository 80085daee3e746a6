"""Names of nodes, which are names of files and appear in every record, and of the server's host."""

from __future__ import annotations

import ipaddress
import re

from fedalloy.core.errors import SpecError

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}", re.IGNORECASE)
_PART = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"({_PART}\.)*{_PART}", re.IGNORECASE)


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a node."""
    if not _NAME.fullmatch(name) or name == "server":
        raise SpecError(
            f"'{name}' is not a valid node name: letters, digits, dots, dashes, underscores, and not 'server'"
        )


def check_host(host: str) -> None:
    """Refuse what nodes cannot reach a server by, and no certificate can hold."""
    last = host.rpartition(".")[2]
    if (_is_ipv4(host) if last.isdigit() else _HOST.fullmatch(host)) and len(host) < 254:
        return
    raise SpecError(
        f"'{host}' is neither an IPv4 address nor a host name; write 10.0.0.7 or server.example.org, without a port. "
        "A server with an IPv6 address needs a name, and one with other letters its form with xn--"
    )


def _is_ipv4(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True

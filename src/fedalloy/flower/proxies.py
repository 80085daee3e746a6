"""HTTP proxies that the environment names: for other machines, never for this one.

A hospital's machines have ``HTTPS_PROXY`` for the way out. Flower's programs would send the requests to their own ports
through it too, and those to a server on this machine.
"""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_EXCEPT = ("no_proxy", "NO_PROXY")


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy, and the environment variable that names it."""

    host: str
    port: int
    variable: str


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables by which programs reach this machine without a proxy, and other machines as before.

    >>> without_proxy({"NO_PROXY": "example.org"})["no_proxy"]
    'example.org,localhost,127.0.0.1,::1'
    """
    given = next((environment[name] for name in _EXCEPT if environment.get(name)), "")
    hosts = [host.strip() for host in given.split(",") if host.strip()]
    text = ",".join(dict.fromkeys([*hosts, *LOOPBACK]))
    return dict.fromkeys(_EXCEPT, text)


@contextmanager
def reaching_this_machine() -> Iterator[None]:
    """The same for connections of this process."""
    before = {name: os.environ.get(name) for name in _EXCEPT}
    os.environ.update(without_proxy(os.environ))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def proxy_for(host: str) -> Proxy | None:
    """The proxy that the environment names for encrypted connections to a host, as the node's own client finds it."""
    found = urllib.request.getproxies()
    if host in LOOPBACK or urllib.request.proxy_bypass(host):
        return None
    scheme = next((one for one in ("https", "all") if found.get(one)), None)
    if scheme is None:
        return None
    address = urlsplit(found[scheme] if "//" in found[scheme] else f"http://{found[scheme]}")
    return Proxy(address.hostname or "", address.port or 80, f"{scheme.upper()}_PROXY")

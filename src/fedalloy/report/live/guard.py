"""Refuses requests other than those that the user's browser makes for this page.

Any web page can make a browser send requests to loopback. Three independent checks protect against that:

- the name in ``Host`` must be a loopback name, which stops DNS rebinding;
- ``Origin`` and ``Sec-Fetch-Site``, where the browser sends them, must name this page;
- requests that change something need the token in a custom header, which another site may only send after a CORS
  preflight, and the server never grants one (it sends no CORS headers).
"""

from __future__ import annotations

import hmac
from email.message import Message

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
TOKEN_HEADER = "X-Fedalloy-Token"
SHORTEST_TOKEN = 12
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Sent with every answer: nothing is loaded from other sites, and none may frame the page or read its answers."""

Refusal = tuple[int, str]
"""An HTTP status and a message."""


def refuse_reading(headers: Message, is_page: bool) -> Refusal | None:
    """Why a request is refused, or None. Links from other sites may open the page itself, nothing else."""
    hosts = headers.get_all("Host") or []
    if len(hosts) != 1 or host_name(hosts[0]) not in LOOPBACK:
        return 421, "this server answers to localhost and 127.0.0.1 only"
    origin = headers.get("Origin")
    if origin is not None and origin != f"http://{hosts[0]}":
        return 403, "this request comes from another site"
    site = headers.get("Sec-Fetch-Site", "none")
    visit = is_page and headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
    if site not in ("same-origin", "none") and not visit:
        return 403, "this request comes from another site"
    return None


def refuse_changing(headers: Message, token: str | None) -> Refusal | None:
    """Why a request that changes something is refused, or None."""
    refusal = refuse_reading(headers, is_page=False)
    if refusal:
        return refusal
    if token is None:
        return 403, "the page is read-only: start it with 'fedalloy serve --token WORD' to stop runs from here"
    given = headers.get(TOKEN_HEADER, "")
    if not hmac.compare_digest(given.encode("utf-8", "replace"), token.encode()):
        return 403, "the token is missing or wrong"
    if headers.get_content_type() != "application/json":
        return 415, "send JSON"
    return None


def host_name(host: str) -> str:
    """The name in a Host header, without its port.

    >>> host_name("localhost:8421"), host_name("[::1]:8421"), host_name("127.0.0.1.evil.example")
    ('localhost', '::1', '127.0.0.1.evil.example')
    """
    if host.startswith("["):
        name, bracket, rest = host[1:].partition("]")
        return name.lower() if bracket and (not rest or rest.startswith(":")) else ""
    name, _, port = host.partition(":")
    return name.lower() if not port or (port.isascii() and port.isdigit()) else ""

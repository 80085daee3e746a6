"""Can a node reach its server? Name, proxy, port, authority, TLS and clock, each checked by itself.

A node only ever says that it cannot connect, or that a certificate is not accepted. Here every step of a connection is
made one after the other, so that the first one that fails is the one to repair.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from fedalloy.flower.contacts import AHEAD, BEHIND
from fedalloy.flower.pki import expires
from fedalloy.flower.proxies import proxy_for

OK, WARNING, PROBLEM, SKIPPED = "ok", "warning", "problem", "not checked"
NAME, PROXY, CA, PORT, TLS, CLOCK = "name", "proxy", "private CA", "port", "TLS", "clock"
SOON = 60
"""Days before the end of a certificate from which it is a warning."""
_PATIENCE = 10.0
_UNKNOWN_ISSUER = (18, 19, 20, 21)
_NOT_YET, _EXPIRED, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 62, 64
"""OpenSSL's numbers of what is wrong with a certificate."""


@dataclass(frozen=True)
class Diagnosis:
    """What was checked, how it is, what was found, and what to do about it."""

    name: str
    state: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.found}{f'; {self.advice}' if self.advice else ''}"


@dataclass
class Reach:
    """The way of a node to ``host:port``, whose certificate must be signed by ``authority``."""

    host: str
    port: int
    authority: Path
    clock: Callable[[], float] = time.time
    _date: str = ""

    def checks(self) -> Iterator[Diagnosis]:
        """Every step of a connection; after one that failed the later ones are not tried."""
        steps = {NAME: self._name, PROXY: self._proxy, CA: self._authority, PORT: self._port, TLS: self._tls,
                 CLOCK: self._clock}  # fmt: skip
        failed: list[str] = []
        for name, step in steps.items():
            needed = failed if name in (TLS, CLOCK) else [one for one in failed if one != CA]
            if needed:
                yield Diagnosis(name, SKIPPED, f"comes after '{needed[0]}'")
                continue
            found = step()
            yield found
            failed += [name] if found.state == PROBLEM else []

    def _name(self) -> Diagnosis:
        proxy = proxy_for(self.host)
        wanted = proxy.host if proxy else self.host
        try:
            found = sorted({str(one[4][0]) for one in socket.getaddrinfo(wanted, None, type=socket.SOCK_STREAM)})
        except OSError as error:
            advice = "check 'server' in node.toml, and this machine's DNS (or /etc/hosts)"
            return Diagnosis(NAME, PROBLEM, f"'{wanted}' has no address ({error})", advice)
        return Diagnosis(NAME, OK, f"'{wanted}' is {', '.join(found)}")

    def _proxy(self) -> Diagnosis:
        proxy = proxy_for(self.host)
        if proxy is None:
            return Diagnosis(PROXY, OK, "none is set for the server")
        found = f"{proxy.variable} sends the connection through {proxy.host}:{proxy.port}"
        avoid = f"if the server is reached directly, add {self.host} to NO_PROXY in the service's environment"
        try:
            with _connected(proxy.host, proxy.port) as link:
                status = _asked_to_connect(link, f"{self.host}:{self.port}")
        except OSError as error:
            return Diagnosis(PROXY, PROBLEM, f"{found}, which does not answer ({error})", avoid)
        if status != 200:
            advice = f"ask for a rule that lets CONNECT {self.host}:{self.port} pass, or {avoid}"
            return Diagnosis(PROXY, PROBLEM, f"{found}, which refuses it (status {status})", advice)
        return Diagnosis(PROXY, OK, f"{found}, which lets it pass")

    def _port(self) -> Diagnosis:
        where = f"{self.host}:{self.port}"
        if proxy_for(self.host):
            return Diagnosis(PORT, OK, f"{where} is reached through the proxy")
        try:
            _connected(self.host, self.port).close()
        except TimeoutError:
            advice = "a firewall drops the packets: ask for one rule, this machine to that address, outgoing TCP"
            return Diagnosis(PORT, PROBLEM, f"{where} does not answer within {_PATIENCE:g} s", advice)
        except OSError as error:
            advice = "the server is down, the port in node.toml is wrong, or a firewall rejects it: ask the coordinator"
            return Diagnosis(PORT, PROBLEM, f"{where} cannot be reached ({error})", advice)
        return Diagnosis(PORT, OK, f"{where} accepts connections")

    def _authority(self) -> Diagnosis:
        try:
            end = expires(self.authority)
        except (OSError, ValueError) as error:
            advice = "get ca.crt from the coordinator again, over a way you trust"
            return Diagnosis(CA, PROBLEM, f"{self.authority} cannot be used ({error})", advice)
        days = (end - datetime.fromtimestamp(self.clock(), UTC)).total_seconds() / 86_400
        advice = "the coordinator makes new certificates, and sends a new ca.crt"
        if days <= 0:
            return Diagnosis(CA, PROBLEM, f"{self.authority.name} expired on {end:%Y-%m-%d}", advice)
        if days < SOON:
            return Diagnosis(CA, WARNING, f"{self.authority.name} expires in {days:.0f} days", advice)
        return Diagnosis(CA, OK, f"{self.authority.name} is valid until {end:%Y-%m-%d}")

    def _tls(self) -> Diagnosis:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(self.authority)
            connection = self._opened(context)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                answer = connection.getresponse()
                self._date = answer.headers.get("date", "")
        except ssl.SSLCertVerificationError as error:
            return Diagnosis(TLS, PROBLEM, *self._about_certificate(error))
        except (OSError, http.client.HTTPException) as error:
            advice = (
                "something between here and the server ends encrypted connections, or the port is another program's"
            )
            return Diagnosis(TLS, PROBLEM, f"no encrypted connection ({error})", advice)
        return Diagnosis(TLS, OK, f"the server's certificate is for {self.host} and from this federation")

    def _about_certificate(self, error: ssl.SSLCertVerificationError) -> tuple[str, str]:
        code = error.verify_code
        if code == _NOT_YET:
            return "the server's certificate is not valid yet", "this machine's clock is behind: synchronise it (NTP)"
        if code == _EXPIRED:
            return "the server's certificate has expired", "the coordinator makes a new one (or this clock is ahead)"
        if code in (_OTHER_NAME, _OTHER_ADDRESS):
            advice = "write in 'server' the name that the coordinator gave, or ask for a certificate with this name"
            return f"the server's certificate is not for '{self.host}' ({error.verify_message})", advice
        if code in _UNKNOWN_ISSUER:
            advice = (
                "either ca.crt is that of another federation, or a firewall opens encrypted connections: then ask for "
                "an exception for this address"
            )
            return f"the certificate that answers is signed by {self._issuer()}, not by ca.crt", advice
        return f"the server's certificate is not accepted ({error.verify_message})", "send this line to the coordinator"

    def _clock(self) -> Diagnosis:
        try:
            server = parsedate_to_datetime(self._date).timestamp()
        except (TypeError, ValueError):
            return Diagnosis(CLOCK, SKIPPED, "the server does not tell its time; 'key' below shows whether it fits")
        ahead = self.clock() - server
        side = "ahead of" if ahead > 0 else "behind"
        found = f"{abs(ahead):.0f} s {side} the server's"
        # The server's time is in whole seconds, and may be one second old.
        if ahead - 1 >= AHEAD or ahead <= -BEHIND:
            advice = "synchronise this machine's clock (NTP: timedatectl set-ntp true), and the server's"
            return Diagnosis(CLOCK, PROBLEM, f"{found}; Flower accepts {AHEAD:g} s ahead, {BEHIND:g} s behind", advice)
        return Diagnosis(CLOCK, OK, found)

    def _opened(self, context: ssl.SSLContext) -> http.client.HTTPSConnection:
        proxy = proxy_for(self.host)
        where = (proxy.host, proxy.port) if proxy else (self.host, self.port)
        connection = http.client.HTTPSConnection(*where, timeout=_PATIENCE, context=context)
        if proxy:
            connection.set_tunnel(self.host, self.port)
        connection.connect()
        return connection

    def _issuer(self) -> str:
        """Who signed the certificate that answers, without believing it."""
        from cryptography import x509
        from cryptography.x509.oid import NameOID

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            with contextlib.closing(self._opened(context)) as connection:
                sock: Any = connection.sock
                found = x509.load_der_x509_certificate(sock.getpeercert(binary_form=True))
            name = found.issuer.get_attributes_for_oid(NameOID.COMMON_NAME)
            return f"'{name[0].value!s:.80}'" if name else "somebody without a name"
        except (OSError, ValueError, http.client.HTTPException):
            return "somebody else"


def _connected(host: str, port: int) -> socket.socket:
    return socket.create_connection((host, port), timeout=_PATIENCE)


def _asked_to_connect(link: socket.socket, where: str) -> int:
    """The status with which a proxy answers a request to be connected."""
    link.sendall(f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
    words = link.recv(1024).split(maxsplit=2)
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0

"""A proxy in the environment is for other machines: Flower's programs reach each other on this one without it."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

import httpx
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedalloy.flower import programs
from fedalloy.flower.prefork.fallback import Fallback
from fedalloy.flower.programs import free_port
from fedalloy.flower.proxies import reaching_this_machine
from fedalloy.flower.reachability import OK
from tests.flower.test_doctor import PROXIES, Place, place, serving

pytestmark = pytest.mark.flower
__all__ = ["place"]


@pytest.fixture
def proxy(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection would go to a port where nobody answers."""
    for variable in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(variable, f"http://127.0.0.1:{free_port()}")


def test_a_proxy_is_not_for_this_machine(place, proxy):
    """Wherever the environment sends connections, those to a server on this machine reach it."""
    with serving(place.server, place.port):
        found = place.examined()
    assert found["proxy"].found == "none is set for the server"
    assert (found["admitted"].state, found["TLS"].state) == (OK, OK)
    assert "NO_PROXY" not in os.environ, "what was there before is there again"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_flowers_own_client_reaches_this_machine(place, proxy, monkeypatch, host):
    """By the environment that every program of a server or a node gets."""
    authority = (place.node / "ca.crt").read_bytes()

    def asked() -> object:
        with FleetHttpClient.from_server_address(f"{host}:{place.port}", False, authority, []) as client:
            return client._client.post(f"https://{host}:{place.port}/v1/fleet/activate-node", content=b"").status_code

    with serving(place.server, place.port):
        with pytest.raises(httpx.ConnectError):
            asked()
        for name, value in programs.environment(Fallback(), place.node / "flwr").items():
            monkeypatch.setenv(name, value)
        assert asked() == 200


@pytest.mark.parametrize("before", [None, "example.org"])
def test_what_the_environment_said_is_kept(before, monkeypatch):
    for variable in PROXIES:
        monkeypatch.delenv(variable, raising=False)
    if before:
        monkeypatch.setenv("no_proxy", before)
    with reaching_this_machine():
        assert os.environ["NO_PROXY"].split(",")[-3:] == ["localhost", "127.0.0.1", "::1"]
        assert (before in os.environ["NO_PROXY"]) if before else True
    assert (os.environ.get("no_proxy"), os.environ.get("NO_PROXY")) == (before, None)

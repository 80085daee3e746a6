"""Finding a server, and whether it answers."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

from fedalloy.flower.layout import RUNNING, ServerPlace
from fedalloy.flower.programs import alive


def found(folder: Path) -> ServerPlace:
    """The server of a folder at its current address: a local federation has other ports while it runs."""
    place = ServerPlace.read(folder)
    try:
        known = json.loads((place.folder / RUNNING).read_text(encoding="utf-8"))
        here = alive(known["pid"], known.get("born", ""))
    except (OSError, ValueError, KeyError):
        return place
    if not here:
        return place
    return replace(place, host="127.0.0.1", port=known["port"], local_port=known.get("local_port", 0))


def answers(place: ServerPlace) -> bool:
    """Whether the SuperLink answers with the expected certificate."""
    return _status_of(place, place.local_address) == 200


def front_answers(place: ServerPlace) -> bool:
    """Whether the front answers, and refuses a path that is not for nodes."""
    return _status_of(place, place.door) == 404


def _status_of(place: ServerPlace, address: str) -> int | None:
    """The HTTP status of a health check; None when there is no answer."""
    scheme, context = "http", None
    if place.secure:
        scheme, context = "https", ssl.create_default_context(cafile=place.files.ca_certificate)
        # Do not check the host name: the front may listen on any address of the machine.
        context.check_hostname = False
    # Ignore proxy settings of the environment: they are for other machines.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(f"{scheme}://{address}/health", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return None

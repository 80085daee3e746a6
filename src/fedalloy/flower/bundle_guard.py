"""A node runs only fedalloy's own app bundle: every bundle is identified by its hash before it is unpacked.

Flower's node accepts any app that a server sends. Here its function that fetches an app is wrapped: a bundle with
another hash, or announced under another name than its own (Flower would search the node's disk for that name), is never
stored, and the server gets an error with the reason. With a version of Flower where this is impossible, the node does
not start.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from logging import ERROR
from types import ModuleType
from typing import Any

from fedalloy.core.errors import SpecError
from fedalloy.flower.bundle import HASH
from fedalloy.flower.compatibility import FETCH, TESTED, installed

ALLOW = "--allow-bundle"
"""Our own option before those of Flower: the hash of one more bundle, for trials with other apps."""


class Foreign(Exception):
    """A bundle that this node does not run, with the reason."""


def take_allowed(arguments: list[str]) -> tuple[list[str], frozenset[str]]:
    """The arguments for Flower, and the hashes of the bundles that may run.

    >>> take_allowed(["flower-supernode", "--allow-bundle", "ab12", "--port", "1"])[0]
    ['flower-supernode', '--port', '1']
    """
    rest, allowed = list(arguments), {HASH}
    while ALLOW in rest:
        place = rest.index(ALLOW)
        allowed.update(rest[place + 1 : place + 2])
        del rest[place : place + 2]
    return rest, frozenset(allowed)


def install(allowed: frozenset[str]) -> None:
    """Let the node in this process run only these bundles; an error if that cannot be ensured."""
    try:
        from flwr.supernode import start_client_internal as module

        fetch = _fetching(module)
    except (ImportError, AttributeError, TypeError, ValueError):
        fetch = None
    if fetch is None:
        raise SpecError(
            f"flwr {installed()} fetches apps in a way that fedalloy does not support, so this node could not ensure "
            f"that it only runs fedalloy: it does not start. Install flwr {TESTED[-1]}: pip install "
            "'fedalloy[flower]'"
        )
    setattr(module, FETCH.name, guarded(fetch, module, allowed))


def _fetching(module: ModuleType) -> Callable[..., Any] | None:
    """Flower's function that fetches an app, if it has the expected arguments."""
    fetch: Callable[..., Any] = getattr(module, FETCH.name)
    fits = inspect.signature(fetch).parameters.keys() >= FETCH.uses and callable(module._insert_message)
    used = FETCH.name in module.start_client_internal.__code__.co_names and "get_fab" in fetch.__code__.co_varnames
    return fetch if fits and used else None


def guarded(fetch: Callable[..., Any], module: Any, allowed: frozenset[str]) -> Callable[..., Any]:
    """``fetch`` with a check of every bundle; a foreign one becomes an error for the server."""

    def guarding(**given: Any) -> Any:
        seen: dict[str, Any] = {}

        def receive() -> Any:
            seen["received"] = given["receive"]()
            return seen["received"]

        def get_run(run_id: int) -> Any:
            seen["run"] = given["get_run"](run_id)
            return seen["run"]

        def get_fab(*wanted: Any) -> Any:
            fab = given["get_fab"](*wanted)
            check(fab, seen["run"], allowed)
            return fab

        try:
            return fetch(**{**given, "receive": receive, "get_run": get_run, "get_fab": get_fab})
        except Foreign as why:
            return _refuse(module, seen["received"][0], given["state"], given["object_store"], str(why))

    return guarding


def check(fab: Any, run: Any, allowed: Sequence[str] | frozenset[str]) -> None:
    """Raise :class:`Foreign` unless a bundle is allowed and announced under its own name and hash."""
    found = hashlib.sha256(fab.content).hexdigest()
    if found not in allowed:
        raise Foreign(f"this node runs only fedalloy's own app; the app sent has the hash {found}")
    from flwr.cli.config_utils import get_fab_metadata

    told = (run.fab_id, run.fab_version, run.fab_hash, fab.hash_str)
    if told != (*get_fab_metadata(fab.content), found, found):
        raise Foreign("this node was sent an app under another name or hash than its own")
    if "agent" in str(getattr(run, "primary_task_type", "")):
        raise Foreign("this node runs only client apps")


def _refuse(module: Any, message: Any, state: Any, store: Any, why: str) -> int:
    from flwr.app import Message
    from flwr.app.error import Error
    from flwr.common.constant import ErrorCode
    from flwr.supercore import log

    log(ERROR, "fedalloy: %s", why)
    module._insert_message(Message(Error(ErrorCode.INVALID_FAB, why), reply_to=message), state, store)
    return int(message.metadata.run_id)

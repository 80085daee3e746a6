"""A node runs only fedalloy's own app, however it was started, or it does not start."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedalloy.core.errors import SpecError
from fedalloy.flower import bundle_guard as guard
from fedalloy.flower import compatibility
from fedalloy.flower.bundle import HASH, bundle_files, bundle_hash, write_bundle
from fedalloy.flower.prefork import OFF, SWITCH, __main__

pytestmark = [
    pytest.mark.flower,
    pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning"),  # in Flower's own code
]
MODULE = "flwr.supernode.start_client_internal"


def built(place: Path, **changed: str) -> bytes:
    from flwr.cli.build import build_fab_from_disk

    folder = write_bundle(place)
    for name, text in changed.items():
        (folder / f"fedalloy_bundle/{name}.py").write_text(text)
    return build_fab_from_disk(folder)


def announced(content: bytes, **said: str) -> tuple[Any, Any]:
    """A bundle, and the run that it belongs to as a server describes it."""
    known = hashlib.sha256(content).hexdigest()
    run = {"fab_id": "fedalloy/fedalloy-bundle", "fab_version": "1.0.0", "fab_hash": known} | said
    run.setdefault("primary_task_type", "flwr-serverapp")
    return SimpleNamespace(content=content, hash_str=run.pop("hash_str", known)), SimpleNamespace(**run)


def test_the_hash_is_that_of_the_bundle(tmp_path):
    assert bundle_hash(write_bundle(tmp_path)) == HASH
    assert hashlib.sha256("".join(bundle_files().values()).encode()).hexdigest() != HASH, "it is that of the archive"


def test_our_bundle_passes_and_one_with_a_changed_letter_does_not(tmp_path):
    guard.check(*announced(built(tmp_path / "ours")), frozenset({HASH}))
    other = built(tmp_path / "other", client_app="from fedalloy.flower import client\n\napp = client.app \n")
    with pytest.raises(guard.Foreign, match="own app; the app sent has the hash"):
        guard.check(*announced(other), frozenset({HASH}))
    with pytest.raises(guard.Foreign, match="only fedalloy"):
        guard.check(*announced(other, fab_hash=HASH, hash_str=HASH), frozenset({HASH}))
    with_its_own_id = announced(other)
    guard.check(*with_its_own_id, frozenset({hashlib.sha256(other).hexdigest()}))


@pytest.mark.parametrize(
    "lie",
    [
        {"fab_id": "fedalloy/x"}, {"fab_version": "1/../../../../tmp/app"}, {"fab_hash": "0" * 64},
        {"hash_str": "0" * 64}, {"primary_task_type": "flwr-agentapp"},
    ],
)  # fmt: skip
def test_our_bundle_under_another_name_is_refused(tmp_path, lie):
    """Flower looks for an app on the node's disk under the name that the server says it has."""
    with pytest.raises(guard.Foreign):
        guard.check(*announced(built(tmp_path), **lie), frozenset({HASH}))


def test_a_foreign_bundle_is_never_stored_and_the_server_is_told(tmp_path, monkeypatch):
    """Flower's own function, with a server that sends another app."""
    module = importlib.import_module(MODULE)
    kept: list[str] = []
    state = SimpleNamespace(
        get_run=lambda _: None, store_fab=lambda _: kept.append("fab"), store_run=lambda _: kept.append("run"),
        create_task=lambda **_: kept.append("task"),
    )  # fmt: skip
    replies: list[Any] = []
    monkeypatch.setattr(module, "_insert_message", lambda reply, *_: replies.append(reply))
    monkeypatch.setattr("flwr.app.Message", lambda error, reply_to: (error, reply_to))
    message = SimpleNamespace(metadata=SimpleNamespace(run_id=7, group_id="", message_type="train", message_id="m"))
    fab, run = announced(built(tmp_path, client_app="app = open('/tmp/ran', 'w')\n"))
    fetch = guard.guarded(module._pull_and_store_message, module, frozenset({HASH}))
    done = fetch(
        state=state, object_store=None, node_config={}, receive=lambda: (message, None), get_run=lambda _: run,
        get_fab=lambda *_: fab, pull_object=None, confirm_message_received=None, trusted_entities=None,
    )  # fmt: skip
    assert done == 7
    assert kept == []
    ((error, answered),) = replies
    assert answered is message
    assert error.code == 7
    assert "only fedalloy's own app" in error.reason


@pytest.fixture
def fresh(monkeypatch):
    """Flower's module as it is, put back afterwards, and programs that only say how they were started."""
    module = importlib.import_module(MODULE)
    monkeypatch.setattr(module, "_pull_and_store_message", module._pull_and_store_message)
    monkeypatch.setattr(__main__, "preforked", lambda program, run: pytest.fail("not when it is off"))
    monkeypatch.setenv(SWITCH, OFF)
    started: list[tuple[str, bool]] = []

    def entry(program: str) -> Any:
        name = "guarded"
        return lambda: started.append((program, name in module._pull_and_store_message.__qualname__))

    monkeypatch.setattr(__main__, "entry", entry)
    return module, started


def test_without_prefork_nothing_is_forked_and_the_guard_stands(fresh, monkeypatch):
    _, started = fresh
    monkeypatch.setattr("sys.argv", [])
    for program in ("flower-supernode", "flower-superlink", "flower-superexec"):
        with pytest.raises(SystemExit) as end:
            __main__.main([program, "--port", "1"])
        assert end.value.code is None
    assert started == [("flower-supernode", True), ("flower-superlink", True), ("flower-superexec", True)]


def test_a_flower_that_cannot_be_guarded_is_not_started(fresh, monkeypatch):
    module, started = fresh
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr(module, "_pull_and_store_message", lambda everything: None)
    with pytest.raises(SystemExit, match="it does not start"):
        __main__.main(["flower-supernode"])
    assert started == []
    monkeypatch.delattr(module, "_pull_and_store_message")
    with pytest.raises(SpecError, match=r"Install flwr 1\.41"):
        guard.install(frozenset())


def test_other_bundles_are_allowed_by_name_only():
    rest, allowed = guard.take_allowed(["flower-supernode", guard.ALLOW, "a", "--port", "1", guard.ALLOW, "b"])
    assert rest == ["flower-supernode", "--port", "1"]
    assert allowed == {HASH, "a", "b"}


def test_the_pin_is_what_was_tested():
    import tomllib

    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    pin, *_ = tomllib.loads(project.read_text())["project"]["optional-dependencies"]["flower"]
    first, last = compatibility.TESTED[0], compatibility.TESTED[-1]
    major, minor = last.split(".")
    assert pin == f"flwr>={first},<{major}.{int(minor) + 1}"
    assert compatibility.is_tested(compatibility.installed())


def test_doctor_names_a_flower_that_was_not_tested(monkeypatch):
    from fedalloy.cli import doctor

    assert doctor._optional("flwr", "1.41.0") == ("1.41.0", True)
    said, fine = doctor._optional("flwr", "1.42.0")
    assert not fine
    assert "tested with 1.41.*" in said

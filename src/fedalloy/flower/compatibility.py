"""Compatibility with Flower: the tested versions, and every name in Flower that fedalloy replaces, with the reason.

Each hook replaces one name in one module of a running Flower program, never a file. There are two kinds:

* :data:`PREFORK` makes rounds faster (:mod:`fedalloy.flower.prefork`). These hooks are compared with Flower's source
  before a program is started; if one of them differs, programs are started in Flower's own way.
* :data:`FETCH` prevents a node from running foreign code (:mod:`fedalloy.flower.bundle_guard`). If it differs, a node
  does not start.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

TESTED = ("1.41",)
"""As in the extra ``flower`` of ``pyproject.toml``."""


@dataclass(frozen=True)
class Hook:
    """A name in a Flower module that is replaced.

    ``uses`` is everything that the module uses of it; for a function, the arguments that matter here; for what it
    imports from another module, its name.
    """

    module: str
    name: str
    uses: frozenset[str]
    reason: str


FETCH = Hook(
    "flwr.supernode.start_client_internal",
    "_pull_and_store_message",
    frozenset({"state", "object_store", "receive", "get_run", "get_fab"}),
    "it fetches the app that a server sends; the app's hash is checked before it is stored",
)
PREFORK = (
    Hook(
        "flwr.supernode.start_client_internal",
        "time",
        frozenset({"sleep"}),
        "a node without an order sleeps for three seconds; now for a tenth of the time since the last one, up to three",
    ),
    Hook(
        "flwr.supernode.start_client_internal",
        "subprocess",
        frozenset({"Popen"}),
        "a node starts flower-superexec, which loads Flower for seconds; now it is a fork of a loaded process",
    ),
    Hook(
        "flwr.supercore.superexec.run_superexec",
        "time",
        frozenset({"sleep"}),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL is one number; now tasks are polled every 0.1 s after one, and every "
        "second when there has been none for a while",
    ),
    Hook(
        "flwr.supercore.superexec.executor.subprocess_executor",
        "subprocess",
        frozenset({"Popen", "DEVNULL"}),
        "a message or a run is a new process, which loads Flower for seconds; now it is a fork of a loaded one",
    ),
    Hook(
        "flwr.supercore.inflatable.inflatable_utils",
        "pull_objects",
        frozenset({"initial_backoff"}),
        "a request for a part of a message that is not there yet is repeated after a second; now after a tenth of one",
    ),
    Hook(
        "flwr.supercore.inflatable.inflatable_utils",
        "pull_and_inflate_object_from_tree",
        frozenset({"initial_backoff"}),
        "the same, for a whole message",
    ),
    Hook(
        "flwr.supercore.inflatable.inflatable_utils",
        "push_object_contents_from_iterable",
        frozenset({"max_concurrent_pushes"}),
        "all chunks of a message are copied before the first is sent; now each when its turn comes",
    ),
    Hook(
        "flwr.supercore.inflatable.inflatable_utils",
        "inflate_object_from_contents",
        frozenset({"keep_object_contents", "objects"}),
        "a received array is there three times while it is put together; now once",
    ),
    Hook(
        "flwr.superlink.grid.http_grid",
        "inflate_object_from_contents",
        frozenset({"inflate_object_from_contents"}),
        "the same, where a run receives replies",
    ),
    Hook(
        "flwr.supernode.runtime.run_clientapp",
        "push_objects",
        frozenset({"push_objects"}),
        "an answer is kept until all of it is sent; now each chunk is forgotten when its turn comes",
    ),
    Hook(
        "flwr.supercore.sql_mixin",
        "SQLITE_PRAGMAS",
        frozenset({"SQLITE_PRAGMAS"}),
        "the SuperLink's database has settings for small rows, and up to a gigabyte of caches; now for large ones, "
        "with small caches",
    ),
)


def is_tested(found: str | None = None) -> bool:
    """Whether a version of Flower (default: the installed one) is among the tested ones.

    >>> [is_tested(one) for one in ("1.41.0", "1.41.3", "1.42.0", "1.4.1", "2.0")]
    [True, True, False, False, False]
    """
    return ".".join((found or installed()).split(".")[:2]) in TESTED


def installed() -> str:
    """The installed version; empty if Flower is not installed."""
    try:
        return version("flwr")
    except PackageNotFoundError:
        return ""


def advice(found: str) -> str:
    """The consequences of another version, as text."""
    return (
        f"{found}, tested with {', '.join(f'{one}.*' for one in TESTED)}: programs start in Flower's own, slower way, "
        "and nodes may refuse to start; pip install 'fedalloy[flower]'"
    )


def differences(folder: Path | None = None) -> list[str]:
    """How the installed Flower, or the source in ``folder``, differs from what :data:`PREFORK` expects.

    Reads the source without importing it, since starting a program should not load Flower.
    """
    place = folder or _source()
    if place is None:
        return ["flwr is not installed"]
    untested = [] if folder or is_tested() else [f"flwr {installed()} was not tested, {TESTED[-1]} was"]
    return untested + [f"{hook.module}: {why}" for hook in PREFORK if (why := _difference(hook, place))]


def _source() -> Path | None:
    spec = find_spec("flwr")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def _difference(hook: Hook, place: Path) -> str:
    """Why a name cannot be replaced; empty if it can."""
    file = place.joinpath(*hook.module.split(".")[1:]).with_suffix(".py")
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return "there is no such module"
    uses = _uses(tree, hook.name) or _defaults(tree, hook.name) & hook.uses or _taken(tree, hook.name)
    if uses != hook.uses:
        return f"uses {', '.join(sorted(uses)) or 'nothing'} of '{hook.name}' instead of {', '.join(sorted(hook.uses))}"
    return "keeps the processes it starts" if hook.name == "subprocess" and _keeps(tree) else ""


def _uses(tree: ast.Module, name: str) -> set[str]:
    """The attributes that a module uses of another one it imports by name; empty if it is not imported that way."""
    imports = [node for node in tree.body if isinstance(node, ast.Import)]
    plain = {alias.name for node in imports for alias in node.names if not alias.asname}
    return {part.attr for part in _parts(tree, name)} if name in plain else set()


def _taken(tree: ast.Module, name: str) -> set[str]:
    """The name itself if a module imports it from another one."""
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {name} & {alias.name for node in imports for alias in node.names if not alias.asname}


def _parts(tree: ast.Module, name: str) -> list[ast.Attribute]:
    """Every ``name.something`` in a module."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return [node for node in attributes if isinstance(node.value, ast.Name) and node.value.id == name]


def _keeps(tree: ast.Module) -> bool:
    """Whether a module uses the processes that it starts, which a fork is not."""
    lines = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    forgotten = [line.func for line in lines if isinstance(line, ast.Call)]
    return any(part not in forgotten for part in _parts(tree, "subprocess") if part.attr == "Popen")


def _defaults(tree: ast.Module, function: str) -> set[str]:
    """The keyword arguments of a function that have a default."""
    named = [node.args for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    pairs = [pair for one in named for pair in zip(one.kwonlyargs, one.kw_defaults, strict=True)]
    return {argument.arg for argument, default in pairs if default is not None}

"""The detectors: what a reader does with an input, and what it must not do."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import site
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.fuzz import canary
from fedalloy.core.errors import FedalloyError

SECONDS = 2.0
MEMORY = 256 << 20
_ROOM = 48 << 20
"""Address space that is not memory: stacks of threads, arenas of malloc."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
            "os.chown", "os.utime", "sqlite3.connect", "shutil.rmtree", "shutil.copyfile", "shutil.move"}  # fmt: skip
_PROCESSES = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty",
              "pty.spawn", "os.kill", "socket.connect", "socket.bind", "socket.getaddrinfo",
              "urllib.Request"}  # fmt: skip
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc's ``malloc_trim``; other systems have none."""
_LOADS = {"pickle.find_class", "ctypes.dlopen"}
BAIT = frozenset({"turtle", "antigravity", "this", "idlelib"})
"""Modules of the standard library that nothing here needs, and that mutated inputs name."""


class Fault(Exception):
    """What an input made the code do. ``kind`` is crash, hang, memory, outside, import, process, nan or norm."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class Hang(BaseException):
    """Raised in code that takes too long; not an ``Exception``, so that it is not caught by accident."""


class Event(NamedTuple):
    """An event of the audit hook."""

    kind: str
    text: str


class _Hook:
    """One per process: audit hooks cannot be removed."""

    def __init__(self) -> None:
        self.active = self.reads_anywhere = self._installed = False
        self.events: list[Event] = []
        self.inside: tuple[str, ...] = ()
        self.also: tuple[str, ...] = ()
        self.readable: tuple[str, ...] = ()
        self.loaded: frozenset[str] = frozenset()

    def install(self) -> None:
        if not self._installed:
            self.readable = tuple(_libraries())
            self.loaded = frozenset(name.split(".")[0] for name in sys.modules) - BAIT
            sys.addaudithook(self._hear)
            self._installed = True

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        self.active = False  # ignore the events of this method
        try:
            found = self._judge(event, arguments)
            if found is not None and len(self.events) < 20:
                self.events.append(found)
        finally:
            self.active = True

    def _judge(self, event: str, arguments: tuple[Any, ...]) -> Event | None:
        if event == "open":
            path, _, flags = arguments
            writes = bool((flags or 0) & _WRITING)
            return self._file(event, path, writes) if writes or not self.reads_anywhere else None
        if event in _CHANGES:
            named = [one for one in arguments[:2] if isinstance(one, str | bytes | os.PathLike)]
            return next(filter(None, (self._file(event, one, True) for one in named)), None)
        if event == "import" and not self._known(str(arguments[0]).split(".")[0]):
            return Event("import", str(arguments[0]))
        if event in _LOADS:
            return Event("import", f"{event} {arguments!r:.200}")
        return Event("process", f"{event} {arguments!r:.200}") if event in _PROCESSES else None

    def _known(self, package: str) -> bool:
        """Lazy imports of known packages and of the standard library are allowed."""
        return (package in sys.stdlib_module_names and package not in BAIT) or package in self.loaded

    def _file(self, event: str, path: Any, writes: bool) -> Event | None:
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        real = os.path.realpath(os.fsdecode(path))
        allowed = self.inside + self.also + (() if writes else self.readable)
        fine = any(real == one or real.startswith(one + os.sep) for one in allowed)
        return None if fine else Event("outside", f"{event} {real}")


HOOK = _Hook()


def _libraries() -> Iterator[str]:
    """Folders that Python and its packages read themselves."""
    here = Path(__file__).resolve().parents[2]
    places = [*sysconfig.get_paths().values(), *site.getsitepackages(), sys.prefix, sys.base_prefix, here]
    yield from {os.path.realpath(str(place)) for place in places}
    yield from ("/proc", "/dev", "/sys", "/usr/share", "/usr/lib", "/etc/localtime", "/etc/mime.types")


@contextmanager
def sandbox() -> Iterator[Path]:
    """An empty folder for one case, inside another one whose other contents must not change."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_fast()) as outer:
        inside = Path(os.path.realpath(outer)) / "inside"
        inside.mkdir()
        yield inside
        beside = sorted(set(os.listdir(outer)) - {"inside"})
        if beside:
            raise Fault("outside", f"made {', '.join(beside)} beside its folder")


def _fast() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def watched(call: Callable[[], str], folder: Path, size: int = 0, reads_anywhere: bool = False) -> str:
    """Let ``call`` read an input of ``size`` bytes. Returns its result, or ``refused`` for a ``FedalloyError``; raises
    a :class:`Fault` for everything that is not allowed. Being slow once may be due to the machine; twice is a hang."""
    try:
        return _once(call, folder, size, reads_anywhere)
    except Hang:
        pass
    try:
        return _once(call, folder, size, reads_anywhere)
    except Hang as hang:
        raise Fault("hang", f"more than {SECONDS:g} s at {_innermost(hang)}") from None


def _once(call: Callable[[], str], folder: Path, size: int, reads_anywhere: bool) -> str:
    HOOK.install()
    HOOK.events, HOOK.inside, HOOK.reads_anywhere = [], (str(folder),), reads_anywhere
    canary.calls.clear()
    with _time_limit(), _memory_limit(size):
        HOOK.active = True
        try:
            said = call()
        except FedalloyError as error:
            _check_memory(error)
            said = "refused"
        except Fault:
            raise
        except Exception as error:
            _check_memory(error)
            _check_events()
            raise Fault("crash", f"{type(error).__name__} at {_innermost(error)}: {error!s:.300}") from error
        finally:
            HOOK.active = False
    _check_events()
    return said


def _check_events() -> None:
    """Raise a fault for recorded events, whatever the result was."""
    if canary.calls:
        raise Fault("import", f"the canary was called with {canary.calls[0]}")
    if HOOK.events:
        raise Fault(HOOK.events[0].kind, HOOK.events[0].text)


@contextmanager
def _time_limit() -> Iterator[None]:
    """An alarm after this many seconds, without the time in which other processes had the core."""
    begun = _own_seconds()

    def ring(number: int, frame: Any) -> None:
        left = SECONDS - (_own_seconds() - begun)
        if left <= 0:
            raise Hang
        signal.setitimer(signal.ITIMER_REAL, max(0.05, left))

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _own_seconds() -> float:
    """A clock that stops while this process is runnable but not running."""
    try:
        with open("/proc/self/schedstat", "rb") as file:
            waited = int(file.read().split()[1]) / 1e9
    except OSError:
        waited = 0.0
    return time.monotonic() - waited


@contextmanager
def _memory_limit(size: int) -> Iterator[None]:
    """Limit the address space to what the input may cost. Includes torch's memory, which ``tracemalloc`` does not
    see."""
    _give_back_free_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", "rb") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY + _ROOM + size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _give_back_free_memory() -> None:
    """Return free memory to the system: a case could use what malloc keeps without reaching the limit."""
    if _TRIM is not None:
        _TRIM(0)


def _check_memory(error: BaseException | None) -> None:
    """A refusal caused by a failed allocation is a fault: too much memory was requested."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # the chain of causes may be circular
        if isinstance(error, MemoryError) or "allocate memory" in str(error) or "Cannot allocate" in str(error):
            raise Fault("memory", f"asked for too much at {_innermost(error)}: {error!s:.200}")
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _innermost(error: BaseException) -> str:
    """Where an error was raised, and by which line of fedalloy, to tell findings apart."""
    trace, last, ours = error.__traceback__, "?", ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        place = f"{'/'.join(Path(name).parts[-2:])}:{trace.tb_lineno}"
        ours = place if f"{os.sep}fedalloy{os.sep}" in name else ours
        last = last if name == __file__ and last != "?" else place
        trace = trace.tb_next
    return f"{ours} ({last})" if ours and ours != last else last

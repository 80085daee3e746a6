"""Runs many cases of one input in a separate process until the time is over, and collects findings."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.fuzz.mutating import Case, changed
from benchmarks.fuzz.watching import Fault, sandbox, watched

FOUND = Path(__file__).parent / "found"
_TOGETHER, _AT_ONCE, _MOST_CHANGES = 20, 10, 4
"""Cases in one example of Hypothesis, because examples are expensive; examples per seed; changes to a case."""
_MORE = 3
_PATIENCE = 40
"""How often a finding is reproduced while it is shrunk."""
_STUCK = 60.0
"""Seconds after which a process that cannot be interrupted is killed."""


@dataclass(frozen=True)
class Way:
    """An input: valid examples, the reader of a case (which returns its result), and the cases that a long run
    needs."""

    name: str
    examples: Callable[[], list[Case]]
    read: Callable[[Case, Path], str]
    least: int
    reads_anywhere: bool = False
    change: Callable[[Case, Random], Case] = changed


@dataclass(frozen=True)
class Finding:
    """A case that was not handled cleanly."""

    kind: str
    text: str
    case: dict[str, str]


@dataclass
class RunningSums:
    """The results of the cases of one input."""

    way: str
    cases: int = 0
    said: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)

    def add(self, findings: list[Finding]) -> None:
        """Keep new findings: two findings at the same place are one."""
        known = {_signature(one) for one in self.findings}
        self.findings += [one for one in findings if _signature(one) not in known]


def drive(way: Way, seconds: float, start: int = 0, most: int | None = None, least: int = 0) -> RunningSums:
    """Run cases of an input in this process; first earlier findings, then mutations until the time is over. On a busy
    machine it continues until there are ``least`` cases, but at most three times as long."""
    examples = way.examples()
    _warm_up(way, examples)
    begun, tally, said = time.monotonic(), RunningSums(way.name), Counter[str]()
    for case in kept(way.name):
        _one(way, case, tally, said, lambda fault, case: tally.add([_finding(fault, case)]))
    for case in examples:
        _one(way, case, tally, said, lambda fault, case: tally.add([_finding(fault, case)]))
    chunk = 0
    while (spent := time.monotonic() - begun) < _MORE * seconds and (most is None or tally.cases < most):
        if spent >= seconds and tally.cases >= least:
            break
        end = begun + (seconds if spent < seconds else _MORE * seconds)
        _chunk(way, examples, start * 1_000_003 + chunk, tally, said, end, most)
        chunk += 1
    tally.said, tally.seconds = dict(sorted(said.items())), round(time.monotonic() - begun, 1)
    return tally


def _warm_up(way: Way, examples: list[Case]) -> None:
    """Read valid examples without detectors, so that lazy imports are done; they must be read cleanly."""
    for case in examples[:3]:
        with sandbox() as folder:
            way.read(case, folder)


def _chunk(
    way: Way, examples: list[Case], number: int, tally: RunningSums, said: Counter[str], until: float, most: int | None
) -> None:
    """Some cases under one seed of Hypothesis, which shrinks the first new finding."""
    smallest: dict[str, Finding] = {}
    shrinking, patience = False, _PATIENCE

    def note(fault: Fault, case: Case) -> None:
        nonlocal shrinking, patience
        finding = _finding(fault, case)
        if _signature(finding) in {_signature(one) for one in tally.findings}:
            return
        smallest[_signature(finding)] = finding
        patience -= 1
        if fault.kind not in ("hang", "memory") and patience > 0:  # shrinking those would take minutes
            shrinking = True
            raise fault

    @seed(number)
    @settings(max_examples=_AT_ONCE, database=None, deadline=None, report_multiple_bugs=False,
              suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink))  # fmt: skip
    @given(st.lists(_drawn(len(examples)), min_size=_TOGETHER, max_size=_TOGETHER))
    def run_round(drawn: list[tuple[int, tuple[int, ...]]]) -> None:
        for example, changes in drawn if shrinking else dict.fromkeys(drawn):  # the simplest draws are all equal
            if shrinking or not (time.monotonic() > until or (most is not None and tally.cases >= most)):
                _one(way, _made(way, examples[example], changes, number), tally, said, note)

    try:
        run_round()
    except Fault:
        pass
    except Exception as error:  # Hypothesis complains about what it cannot repeat
        if not smallest:
            raise RuntimeError(f"{way.name}: the fuzzer itself failed") from error
    tally.add(list(smallest.values()))


def _drawn(examples: int) -> st.SearchStrategy[tuple[int, tuple[int, ...]]]:
    """Which valid example, and the seeds of the changes that are made to it."""
    changes = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=_MOST_CHANGES).map(tuple)
    return st.tuples(st.integers(0, examples - 1), changes)


def _made(way: Way, example: Case, changes: tuple[int, ...], number: int) -> Case:
    """The case; draws are combined with the seed of Hypothesis, because every seed begins with the same simple
    draws."""
    case = dict(example)
    for place, change in enumerate(changes):
        case = way.change(case, Random(f"{number} {place} {change}"))
    return case


def _one(way: Way, case: Case, tally: RunningSums, said: Counter[str], note: Callable[[Fault, Case], None]) -> None:
    _remember(case)
    size = sum(map(len, case.values()))
    tally.cases += 1
    try:
        with sandbox() as folder:
            said[watched(lambda: way.read(case, folder), folder, size, way.reads_anywhere)] += 1
    except Fault as fault:
        said["HARMFUL"] += 1
        note(fault, case)


def isolated(way: Way, seconds: float, start: int = 0, most: int | None = None, least: int = 0) -> RunningSums:
    """The same in a child process, whose death is a finding too."""
    with tempfile.TemporaryDirectory(prefix="fuzzing-") as folder:
        result, last = Path(folder) / "tally.json", Path(folder) / "last.json"
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ[_LAST] = str(last)
                result.write_text(json.dumps(asdict(drive(way, seconds, start, most, least))))
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        code = _wait(child, last)
        if code == 0:
            told = json.loads(result.read_text())
            return RunningSums(**{**told, "findings": [Finding(**one) for one in told["findings"]]})
        case = json.loads(last.read_text()) if last.exists() else {}
        return RunningSums(way.name, findings=[Finding("crash", f"the process ended with {code}", case)])


def _wait(child: int, last: Path) -> int:
    """The exit code of a child; one that does not react to its alarm is killed."""
    begun = time.time()
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        time.sleep(0.05)
        since = time.time() - (last.stat().st_mtime if last.exists() else begun)
        if since > _STUCK:
            os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(ended[1])


_LAST = "FEDALLOY_FUZZ_LAST"


def _remember(case: Case) -> None:
    """Store the current case, in case the process does not survive it."""
    if _LAST in os.environ:
        Path(os.environ[_LAST]).write_text(json.dumps(packed(case)))


def packed(case: Case) -> dict[str, str]:
    """A case as JSON: text where it is text."""
    return {name: _text(data) for name, data in case.items()}


def unpacked(value: dict[str, str]) -> Case:
    """The inverse of :func:`packed`."""
    return {
        name: base64.b64decode(text[7:]) if text.startswith("base64:") else text.encode()
        for name, text in value.items()
    }


def _text(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = "base64:"
    return "base64:" + base64.b64encode(data).decode() if text.startswith("base64:") else text


def kept(way: str) -> Iterator[Case]:
    """The cases that earlier runs have found."""
    for file in sorted((FOUND / way).glob("*.json")):
        yield unpacked(json.loads(file.read_text(encoding="utf-8"))["case"])


def keep(way: str, finding: Finding, folder: Path = FOUND) -> Path:
    """Write a finding to the folder that later runs read."""
    value: dict[str, Any] = {"kind": finding.kind, "text": finding.text, "case": finding.case}
    name = hashlib.sha256(json.dumps(finding.case, sort_keys=True).encode()).hexdigest()[:12]
    path = folder / way / f"{finding.kind}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return path


def _finding(fault: Fault, case: Case) -> Finding:
    return Finding(fault.kind, fault.text, packed(case))


def _signature(finding: Finding) -> str:
    """Equal for findings of the same kind at the same place."""
    place = re.search(r"at (\S+?:\d+)", finding.text)
    return f"{finding.kind} {place[1] if place else finding.text[:60]}"

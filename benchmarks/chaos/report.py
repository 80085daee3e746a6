"""The report of a session."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from benchmarks.chaos.checking import Verdict


@dataclass
class Findings:
    """What happened in a session, and what was found."""

    minutes: float
    seed: int
    clocks: bool
    faults: Counter[str] = field(default_factory=Counter)
    verdicts: list[Verdict] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    restarts: dict[str, int] = field(default_factory=dict)
    tracebacks: dict[str, int] = field(default_factory=dict)

    def add(self, verdict: Verdict, calm: float, lost: float) -> None:
        """One study."""
        self.verdicts.append(verdict)
        self.times.append((calm, lost))

    @property
    def holds(self) -> bool:
        """Whether every study ended as it must, and nothing was left."""
        return not self.orphans and not any(verdict.problems for verdict in self.verdicts)


def written(findings: Findings) -> str:
    """The report as Markdown."""
    lines = [
        "# A federation under faults",
        "",
        f"`python -m benchmarks.chaos --minutes {findings.minutes:g} --seed {findings.seed}`: a server and six nodes",
        "in network namespaces, on links of TUN devices with a process in between; node 5 lies every second time.",
        "" if findings.clocks else "Clocks did not jump: there is no C compiler.",
        "",
        f"**{'Everything' if findings.holds else 'Not everything'} holds.** Faults: {findings.faults.total()}.",
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {kind} | {count} |" for kind, count in sorted(findings.faults.items())),
        "",
        "| study | rounds | rounds begun again | contributions missing | calm round | time lost | model | states |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(one, *times) for one, times in zip(findings.verdicts, findings.times, strict=True)),
        "",
        "Model: the largest difference of any parameter from the simulation of the recorded rounds. States: the same",
        "of the clients' states, and how many were compared. Time lost: what the study took longer than calm rounds.",
        "",
        f"Started again: {', '.join(f'{name} {count} x' for name, count in findings.restarts.items())}.",
        f"Processes left after the services were ended: {', '.join(findings.orphans) or 'none'}.",
        f"Tracebacks in logs: {', '.join(f'{name} {count}' for name, count in findings.tracebacks.items()) or 'none'}.",
        *(f"- {one.name}: {problem}" for one in findings.verdicts for problem in one.problems),
    ]
    return "\n".join(lines) + "\n"


def _row(one: Verdict, calm: float, lost: float) -> str:
    model = f"{one.distance:.1e}"
    states = f"{one.state_distance:.1e} ({one.states})" if one.states else "none kept"
    again = max(0, one.sessions - 1)
    return f"| {one.name} | {one.rounds} | {again} | {one.missing} | {calm:.1f} s | {lost:.0f} s | {model} | {states} |"

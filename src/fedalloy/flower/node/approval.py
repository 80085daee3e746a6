"""The approval of studies by a site: what a server asks for must be what the site's operator has approved.

A study is known by its fingerprint, the SHA-256 of what nodes are asked to do: the algorithm's part that they carry out
and the task, without the seed. A node computes it from the orders themselves, so a server cannot claim another one. The
operator computes the same from the recipe (``fedalloy flower review``). With ``require_approval = true`` in its policy,
a node refuses every study whose fingerprint is not in ``approvals.json`` in its store, and there what an approval does
not cover: more rounds than the recipe had, and other metrics.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.experiment.records import atomic
from fedalloy.flower.node.audit import Audit, approved_once
from fedalloy.flower.node.store import NodeStore
from fedalloy.flower.protocol.header import Refused
from fedalloy.flower.protocol.orders import AlgorithmSpec, RuleSpec, TaskSpec
from fedalloy.flower.protocol.plain_values import thawed

_FILE, _MARK = "approvals.json", "study"


def fingerprint(algorithm: AlgorithmSpec, task: TaskSpec) -> str:
    """The fingerprint of a study."""
    told = {"algorithm": _plain(algorithm), "task": _plain(task)}
    told["task"].pop("seed")
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Approvals:
    """The approved studies of a node's store, by fingerprint: the name that the operator gave, and when."""

    store: Path

    @property
    def file(self) -> Path:
        """Where they are kept."""
        return self.store / _FILE

    def read(self) -> dict[str, dict[str, Any]]:
        """All approved studies."""
        file = self.file
        if not file.exists():
            return {}
        try:
            found: dict[str, dict[str, Any]] = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}; approve the studies again") from None
        return found

    def approve(self, study: str, name: str, rounds: int | None = None, metrics: Collection[str] | None = None) -> None:
        """Approve a study, in so many ``rounds`` and scored by these ``metrics``; by default any."""
        told = {"rounds": rounds, "metrics": None if metrics is None else sorted(metrics)}
        terms = {term: value for term, value in told.items() if value is not None}
        known = self.read()
        # First the log: nothing is approved without an entry.
        Audit(self.store).note({"approved": study, "name": name, **terms})
        self._write(known | {study: {"name": name, "approved": round(time.time()), **terms}})

    def withdraw(self, study: str) -> str:
        """Withdraw the approval of a study, named by its fingerprint, the beginning of it, or its name; returns the
        fingerprint. Its next order is refused."""
        known = self.read()
        chosen = _one_of(study, {one: str(about["name"]) for one, about in known.items()}, "approved")
        self._write({one: about for one, about in known.items() if one != chosen})
        Audit(self.store).note({"withdrawn": chosen})
        return chosen

    def find(self, study: str) -> str:
        """The fingerprint of a study that is approved, was approved once, or of which something is kept, named as for
        :meth:`withdraw`; an approved one comes first."""
        approved = {one: str(about["name"]) for one, about in self.read().items()}
        if len(_matching(study, approved)) == 1:
            return _matching(study, approved)[0]
        kept = dict.fromkeys(self._kept(), "not approved")
        return _one_of(study, {**kept, **approved_once(self.store), **approved}, "known")

    def forget(self, study: str) -> list[Path]:
        """Delete what the node keeps of a study: states, own models, lists of what was sent. An order that is being
        carried out is waited for. The audit log stays."""
        gone = self._kept().get(study, [])
        for folder in gone:
            with contextlib.ExitStack() as stack:
                for client in sorted(folder.iterdir()):
                    if client.is_dir():
                        stack.enter_context(NodeStore(client).lock())
                # In one step: an order that comes meanwhile finds all of it or nothing. What a crash leaves here is
                # still found by its mark.
                away = folder.with_name(f".{folder.name.strip('.')}")
                shutil.rmtree(folder.rename(away))
        Audit(self.store).note({"forgotten": study, "runs": [folder.name for folder in gone]})
        return gone

    def _kept(self) -> dict[str, list[Path]]:
        """The folders of runs in the store, by study."""
        found: dict[str, list[Path]] = {}
        for mark in sorted(self.store.glob(f"*/{_MARK}")):
            found.setdefault(mark.read_text(encoding="utf-8").strip(), []).append(mark.parent)
        return found

    def check(self, study: str, required: bool, round: int = 0, metrics: Collection[str] = ()) -> None:
        """Refuse a study that is not approved, where that is required, and what its approval does not cover."""
        if not required:
            return
        about, short = self.read().get(study), study[:16]
        if about is None:
            raise Refused(
                f"the study {short} is not approved at this site; its operator looks at the recipe with 'fedalloy "
                "flower review' and approves it with 'fedalloy flower approve'"
            )
        if round > about.get("rounds", round):
            raise Refused(
                f"this site has approved {about['rounds']} rounds of the study {short}, and this is round {round}; its "
                "operator can approve a recipe with more"
            )
        if more := sorted({*metrics} - {*about.get("metrics", metrics)}):
            raise Refused(
                f"this site has approved the study {short} without the metrics {', '.join(more)}; its operator can "
                "approve a recipe with them"
            )

    def mark(self, run: str, study: str) -> None:
        """Note to which study the folder of a run belongs."""
        file = self.store / run / _MARK
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(file, study + "\n")

    def _write(self, known: Mapping[str, Any]) -> None:
        self.store.mkdir(parents=True, exist_ok=True, mode=0o700)
        atomic.write_text(self.file, json.dumps(known, indent=2) + "\n")


def _plain(value: Any) -> Any:
    """Checked tables as plain values."""
    if isinstance(value, RuleSpec):
        return value.to_spec()
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    return [_plain(one) for one in value] if isinstance(value, tuple) else thawed(value)


def _matching(study: str, known: Mapping[str, str]) -> list[str]:
    """The studies of a fingerprint, the beginning of it, or a name."""
    return [one for one, name in known.items() if study and (one.startswith(study) or name == study)]


def _one_of(study: str, known: Mapping[str, str], state: str) -> str:
    chosen = _matching(study, known)
    if len(chosen) != 1:
        listed = ", ".join(f"{one[:12]} ({name})" for one, name in known.items()) or "none"
        raise SpecError(f"'{study}' is not one {state} study; {state}: {listed}")
    return chosen[0]

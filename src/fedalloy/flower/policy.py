"""What a node never gives away, whatever it is asked: a file of its operator, on its own disk.

    forbid = ["accuracy_after", "loss"]      # statistics and metrics that are never sent
    models = ["hospital.models:net"]         # own models that a server may name; built-in ones are always allowed
    max_megabytes = 2000                     # a larger letter is not read
    min_examples = 20                        # with fewer training examples the node takes no part

Everything may be left out. A statistic that the algorithm does not need is simply not sent; where the algorithm needs
it, the node refuses the round and says which statistic it is. A metric that is forbidden is missing in the scores.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedalloy.core.arguments import build
from fedalloy.core.errors import SpecError, nearest
from fedalloy.engines.flower import Refused


@dataclass(frozen=True)
class Policy:
    """The rules of one node."""

    forbid: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    max_megabytes: float = 2000.0
    min_examples: int = 1

    @staticmethod
    def read(path: Path | None) -> Policy:
        """The policy in a file; no file forbids nothing."""
        if path is None:
            return Policy()
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise SpecError(f"there is no policy file {path}; write one, or leave 'fedalloy-policy' out") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SpecError(f"policy {path} is not TOML: {error}") from None
        return _checked(values, str(path))

    def check_needs(self, names: Iterable[str], who: str) -> None:
        """Refuse what needs a forbidden statistic.

        >>> Policy(forbid=("loss_before",)).check_needs({"loss_before"}, "weighting 'afl'")
        Traceback (most recent call last):
        fedalloy.engines.flower.Refused: the policy of this node forbids loss_before, which weighting 'afl' needs
        """
        forbidden = sorted(set(names) & set(self.forbid))
        if forbidden:
            raise Refused(f"the policy of this node forbids {', '.join(forbidden)}, which {who} needs")

    def check_model(self, model: Any) -> None:
        """Refuse a model that is a function of some package, unless the operator has named it."""
        kind = model.get("kind") if isinstance(model, Mapping) else model
        if isinstance(kind, str) and ":" in kind and kind not in self.models:
            raise Refused(f"the model '{kind:.80}' is not in the list 'models' of this node's policy")

    def allowed(self, values: Mapping[str, float]) -> dict[str, float]:
        """What may be sent of some statistics or metrics."""
        return {name: value for name, value in values.items() if name not in self.forbid}


def _checked(values: Mapping[str, Any], where: str) -> Policy:
    known = [field.name for field in fields(Policy)]
    for name in values:
        if name not in known:
            raise SpecError(f"policy {where}: unknown key '{name}'; {nearest(name, known)}")
    policy: Policy = build(Policy, values, f"policy {where}")
    return policy

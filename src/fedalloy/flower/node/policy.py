"""A node's policy, what it never sends and never does: a file of its operator, on its own disk.

    forbid = ["accuracy_after", "loss"]      # statistics and metrics that are never sent
    models = ["hospital.models:net"]         # own models that a server may name; built-in ones are always allowed
    max_megabytes = 2000                     # a larger message is not read
    max_parameters = 1000000000              # a larger model is not built
    max_steps = 1000000                      # more local steps in one round are not taken
    max_memory_megabytes = 16000             # more memory is not used for one order
    min_examples = 20                        # with fewer training examples the node does not take part
    max_examples = 10000000                  # nor with more
    require_clip = 1.0                       # updates are sent clipped to this norm or less, or not at all
    require_noise = 0.01                     # and with noise of at least this standard deviation, drawn by the node
    require_approval = true                  # only studies that the operator has approved ('fedalloy flower approve')

Every key is optional. A forbidden statistic that the algorithm does not need is not sent; if the algorithm needs
it, the node refuses the round and names the statistic. A forbidden metric is missing in the scores.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedalloy.core.arguments import build
from fedalloy.core.errors import SpecError, nearest
from fedalloy.flower.protocol.header import Refused


@dataclass(frozen=True)
class Policy:
    """The policy of one node."""

    forbid: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    max_megabytes: float = 2000.0
    max_parameters: int = 1_000_000_000
    max_steps: int = 1_000_000
    max_memory_megabytes: float = 16_000.0
    min_examples: int = 1
    max_examples: int = 10_000_000
    require_clip: float | None = None
    require_noise: float | None = None
    require_approval: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not value >= 0:
                raise ValueError(f"{field.name} must be 0 or more, got {value}")
        if self.require_noise and not self.require_clip:
            raise ValueError("require_noise needs require_clip: how much noise protects depends on the largest update")

    @staticmethod
    def read(path: Path | None) -> Policy:
        """The policy in a file; without a file everything is allowed."""
        if path is None:
            return Policy()
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise SpecError(f"there is no policy file {path}; write one, or remove 'fedalloy-policy'") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SpecError(f"policy {path} is not TOML: {error}") from None
        return _checked(values, str(path))

    def check_needs(self, names: Iterable[str], who: str) -> None:
        """Refuse what needs a forbidden statistic.

        >>> Policy(forbid=("loss_before",)).check_needs({"loss_before"}, "'afl'")
        Traceback (most recent call last):
        fedalloy.flower.protocol.header.Refused: the policy of this node forbids loss_before, which 'afl' needs
        """
        forbidden = sorted(set(names) & set(self.forbid))
        if forbidden:
            raise Refused(f"the policy of this node forbids {', '.join(forbidden)}, which {who} needs")

    def check_examples(self, count: int) -> None:
        """Refuse to train on too few examples, or on more than are allowed."""
        if count < self.min_examples:
            raise Refused("this node has fewer training examples than its policy requires")
        if count > self.max_examples:
            raise Refused("this node has more training examples than its policy allows (max_examples)")

    def allowed(self, values: Mapping[str, float]) -> dict[str, float]:
        """The statistics or metrics that may be sent."""
        return {name: value for name, value in values.items() if name not in self.forbid}


def _checked(values: Mapping[str, Any], where: str) -> Policy:
    known = [field.name for field in fields(Policy)]
    for name in values:
        if name not in known:
            raise SpecError(f"policy {where}: unknown key '{name}'; {nearest(name, known)}")
    policy: Policy = build(Policy, values, f"policy {where}")
    return policy

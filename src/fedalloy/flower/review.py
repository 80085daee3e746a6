"""What a study will do at a site, in plain words, from its recipe; and its fingerprint, by which a site approves it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.aspects import is_mixable, is_personalised
from fedalloy.core.errors import FedalloyError
from fedalloy.core.inputs import shown
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Shared
from fedalloy.core.traffic import nbytes, sent_to
from fedalloy.experiment.recipe import Recipe, parse, resolve
from fedalloy.flower.node.approval import fingerprint
from fedalloy.flower.node.limits import check_protected
from fedalloy.flower.node.policy import Policy
from fedalloy.flower.payloads import ALWAYS, told_algorithm
from fedalloy.flower.protocol.orders import AlgorithmSpec, check_task
from fedalloy.flower.remote_task import RemoteTask, remote_task
from fedalloy.flower.submission import with_engine


@dataclass(frozen=True)
class Review:
    """A study as a site sees it."""

    study: str
    algorithm: Algorithm
    task: RemoteTask
    shared: Shared
    rounds: int
    metrics: tuple[str, ...]

    @staticmethod
    def of(recipe: Recipe, seed: int | None = None, models: tuple[str, ...] = ()) -> Review:
        """The review of a recipe; ``models`` are the site's own."""
        experiment = resolve(with_engine(recipe), seed)
        task = remote_task(parse(experiment.resolved))
        algorithm = experiment.algorithm.bind(task, Key.of(experiment.config.seed))
        told = AlgorithmSpec.model_validate(told_algorithm(algorithm))
        model = task.spec.get("model")
        kind = model.get("kind") if isinstance(model, dict) else model
        spec = check_task(task.spec, models=(*models, *([kind] if kind else ())))
        params, buffers = task.objective.init(Key.of(0))
        shared = algorithm.init(params, task.population, buffers)["shared"]
        config = experiment.config
        return Review(fingerprint(told, spec), algorithm, task, shared, config.rounds, tuple(config.metrics))

    @property
    def sent(self) -> list[str]:
        """The numbers that a site sends besides the update."""
        more = {"num_sequences"} if self.task.objective.unit == "targets" else set()
        return sorted({*ALWAYS, *more, *self.algorithm.weighting.requires} - {"cross_score"})

    @property
    def scored(self) -> str:
        """The models that the metrics are computed for."""
        own = " and this site's own" if is_personalised(self.algorithm.solver) else ""
        return f"the global model{own}{' and mixtures of both' if is_mixable(self.algorithm.solver) else ''}"

    @property
    def bytes(self) -> int:
        """The bytes of the shared parts."""
        return sum(tree.nbytes(leaves) for leaves in self.shared.values())

    def text(self, policy: Policy | None = None) -> str:
        """The review in plain words; with the objections of a policy."""
        shape, algorithm = shown(self.task.spec["shape"]), self.algorithm
        up = sum(tree.nbytes(leaves) for leaves in algorithm.templates(self.shared).values()) / 1e6
        down = nbytes(sent_to(algorithm, self.shared, known=True)) / 1e6
        parts, wires = sorted(algorithm.templates(self.shared)), [type(one).__name__.lower() for one in algorithm.wire]
        told = {
            "study": self.study,
            "it trains": f"a model with {self._parameters:,} parameters on this site's own examples of shape {shape}, "
            f"in up to {self.rounds} rounds",
            "by": f"{type(algorithm.solver).__name__}, weighted by {type(algorithm.weighting).__name__}",
            "it receives": f"{down:.3g} MB in a round",
            "it sends": f"{', '.join(parts)} (up to {up:.3g} MB in a round) and the numbers {', '.join(self.sent)}; "
            "never examples, labels or file names",
            "changed by": f"{', '.join(wires) or 'nothing'} before it is sent",
            "scored by": f"{', '.join(self.metrics)} of {self.scored} on this site's own test part; one number each is "
            "sent for every model, and how many examples (tokens) they are over",
            "it keeps": "a state of its own from round to round, until 'forget'" if algorithm.stateful else "no state",
        }
        if "cross_score" in algorithm.weighting.requires:
            told["others"] = "send their models here to be scored, and get this site's model"
        lines = [f"{name:<12} {text}" for name, text in told.items()]
        return "\n".join([*lines, *(f"REFUSED by this site's policy: {why}" for why in self.objections(policy))])

    def objections(self, policy: Policy | None) -> list[str]:
        """Why a node with this policy would refuse the study."""
        if policy is None:
            return []
        found = []
        try:
            policy.check_needs(self.algorithm.weighting.requires, "the weighting")
            check_protected(self.algorithm, self.shared, policy)
        except FedalloyError as error:
            found.append(str(error))
        if self._parameters > policy.max_parameters:
            found.append(f"the model has {self._parameters:,} parameters, and the most are {policy.max_parameters:,}")
        return found

    @property
    def _parameters(self) -> int:
        return sum(leaf.numel() for leaf in self.shared["params"].values())


def policy_at(folder: Path) -> Policy:
    """The policy of a node's folder, without the rest of its settings."""
    file = folder / "policy.toml"
    return Policy.read(file if file.is_file() else None)

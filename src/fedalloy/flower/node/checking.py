"""``fedalloy node check``: a node's data and one step of a federation's model, before the node connects to anybody."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from fedalloy.core import inputs
from fedalloy.core.blocks import client_keys
from fedalloy.core.client import Assignment, run_client
from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.keys import Key
from fedalloy.core.packing import pack
from fedalloy.core.types import Context, Examples
from fedalloy.experiment.recipe import Recipe
from fedalloy.experiment.recipe.resolving import algorithm_of, single_of
from fedalloy.flower.config import NodeConfig
from fedalloy.flower.node.answer import half_of
from fedalloy.flower.node.data import PARTS, LocalTask, local_task
from fedalloy.flower.node.limits import bounded_memory, check_protected, check_steps
from fedalloy.flower.node.policy import Policy
from fedalloy.flower.payloads import ALWAYS, told_algorithm
from fedalloy.flower.protocol.orders import AlgorithmSpec, TaskSpec, check_task
from fedalloy.flower.remote_task import remote_task
from fedalloy.tasks.examining import batch_of


@dataclass(frozen=True)
class NodeCheck:
    """What a node has and what it would send in a round: the tensors of every part by name, shape and bytes, and the
    statistics with their values after one step. ``filled`` missing values were filled."""

    client: str
    source: str
    examples: dict[str, int]
    shape: Any
    batch: int
    loss: float | None
    tensors: tuple[tuple[str, str, tuple[int, ...], int], ...]
    statistics: dict[str, float | None]
    filled: int = 0

    @property
    def bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(size for *_, size in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        tensors = [
            {"part": part, "name": name, "shape": list(shape), "bytes": size}
            for part, name, shape, size in self.tensors
        ]
        return {
            "client": self.client, "data": self.source, "examples": self.examples, "shape": inputs.listed(self.shape),
            "batch": self.batch, "loss": self.loss, "sent": tensors, "bytes": self.bytes, "statistics": self.statistics,
            "filled": self.filled,
        }  # fmt: skip


def check_node(config: NodeConfig, recipe: Recipe, seed: int | None = None) -> NodeCheck:
    """Read the node's data, run one step of the recipe's model on a batch, and collect what would be sent.

    The node's policy is applied as to an order of a server; nothing is stored and nobody is contacted.
    """
    single = single_of(recipe, recipe.run.seeds[0] if seed is None else seed, None)
    policy, whole, remote = Policy.read(config.policy), algorithm_of(single), remote_task(single)
    spec, client = check_task(remote.spec, policy.models), client_number(config.client, remote.names)
    half = AlgorithmSpec.model_validate(told_algorithm(whole))
    algorithm = half_of(half)
    policy.check_needs(algorithm.weighting.requires, f"weighting '{half.weighting}'")
    with torch.no_grad(), bounded_memory(policy.max_memory_megabytes, config.device):
        task = local_task(config.data, client, spec, config.device, policy)
        policy.check_examples(len(task.examples("train")))
        return _step(config, algorithm, task, spec, policy, client)


def _step(
    config: NodeConfig, algorithm: Any, task: LocalTask, spec: TaskSpec, policy: Policy, client: int
) -> NodeCheck:
    """One step on the first batch, from the initial model of the recipe's seed."""
    root, whole = Key.of(spec.seed), task.examples("train")
    if not len(whole):
        raise SpecError(f"{config.data} has no example to train on, so that no step can be taken")
    size = min(batch_of(algorithm.solver) or len(whole), len(whole))
    batch = Examples(inputs.take(whole.x, slice(size)), whole.y[:size])
    params, buffers = task.objective.init(root.fold("model"))
    shared = algorithm.init(params, 1, buffers)["shared"]
    check_protected(algorithm, shared, policy)
    check_steps(algorithm.solver, 1, size, policy)
    ctx = Context(1, client + 1, root.fold("round", 1), local_lr=algorithm.solver.lr_at(1, 1), rounds=1)
    key = client_keys(ctx.key, torch.tensor([client]))
    state = algorithm.init_client(shared, algorithm.client_key(root.fold("new client"), client, 1), task.objective.init)
    made = run_client(algorithm, task.objective, shared, state, Assignment(batch, 1), key, ctx)
    wanted = {*ALWAYS, "num_sequences", *algorithm.weighting.requires}
    told = {name: value for name, value in policy.allowed(made.stats).items() if name in wanted}
    sent = pack(made.payload, algorithm.packings)
    tensors = tuple(
        (part, name, tuple(leaf.shape), leaf.numel() * leaf.element_size())
        for part, leaves in sent.items()
        for name, leaf in leaves.items()
    )
    losses = task.objective.losses(task.objective.outputs(params, buffers, batch.x), batch.y)
    return NodeCheck(
        config.client, config.data, {part: len(task.examples(part)) for part in PARTS}, inputs.shape_of(whole.x), size,
        _plain(float(losses.mean())), tensors, {name: _plain(value) for name, value in told.items()},
        task.filled,
    )  # fmt: skip


def client_number(client: str, names: tuple[str, ...]) -> int:
    """The number of the node's client in the recipe, given by name or number."""
    if client in names:
        return names.index(client)
    if client.isdecimal() and int(client) < len(names):
        return int(client)
    raise SpecError(f"the recipe has no client '{client}': {nearest(client, names)}")


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None

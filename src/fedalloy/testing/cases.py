"""The cases in which engines are tested. FedAvg over equal clients reveals few mistakes: each case targets some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.types import Work
from fedalloy.methods import published as algorithms
from fedalloy.methods.servers.langevin import Langevin
from fedalloy.methods.servers.momentum import Momentum
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.cgan import Cgan
from fedalloy.methods.solvers.cvae import Cvae
from fedalloy.methods.solvers.ditto import Ditto
from fedalloy.methods.solvers.energy import Energy
from fedalloy.methods.solvers.personal import Personal
from fedalloy.methods.solvers.scaffold import Scaffold
from fedalloy.methods.solvers.schedules import Schedule
from fedalloy.methods.solvers.settings import LocalSettings
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.solvers.superfed import SuPerFed
from fedalloy.methods.weightings.energies import Energies
from fedalloy.methods.weightings.samples import Samples
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.testing.problems import EQUAL, SmallTask, small_task
from fedalloy.testing.toys import HalfWithMemory, Jitter, Lopsided, Wavering


@dataclass(frozen=True, eq=False)
class EngineCase:
    """An algorithm, a task and the work of every round; ``why`` names the mistake that it reveals."""

    name: str
    why: str
    algorithm: Algorithm
    task: SmallTask
    rounds: tuple[Work, ...]


def work(*ids: int, epochs: tuple[int, ...] | None = None, active: tuple[bool, ...] | None = None) -> Work:
    """Short form of some clients' work.

    >>> work(4, 0, epochs=(2, 1)).epochs.tolist()
    [1, 2]
    """
    return Work.of(
        torch.tensor(ids),
        None if epochs is None else torch.tensor(epochs),
        None if active is None else torch.tensor(active),
    )


# No client takes part in every round, and hardly any has the same position twice.
CHANGING = (work(0, 2, 3), work(1, 2, 3, 4), work(0, 1, 4))
UNEVEN = (
    work(0, 1, 2, 3, 4, epochs=(3, 1, 2, 0, -1)),
    work(1, 3, 4, epochs=(0, 2, 5)),
    work(0, 2, 3, epochs=(1, 4, 1)),
)
FAILING = (
    work(0, 1, 2, 3, active=(True, False, True, False)),
    work(1, 2, 4, active=(True, True, False)),
    work(0, 3, 4, active=(False, False, False)),
    work(1, 2, 3, 4),
)


def engine_cases() -> tuple[EngineCase, ...]:
    """All cases, built again."""
    return (*_published(), *_local_optimizers(), *_hard_rules(), *_models(), *_personal(), *_generative(), *_devices())


def plain_case() -> EngineCase:
    """FedAvg over equal clients with full participation: a test that finds few mistakes."""
    everyone = (work(0, 1, 2, 3), work(0, 1, 2, 3))
    return EngineCase("plain", "nothing", algorithms.fedavg(batch_size=3), small_task(sizes=EQUAL), everyone)


def crossed_case() -> EngineCase:
    """Clients score each other's models: for engines that support ``cross_score``."""
    boosted = algorithms.fedboosting(batch_size=3, epochs=2)
    return EngineCase("cross scores", "the exchange of models", boosted, small_task(), CHANGING)


def _published() -> tuple[EngineCase, ...]:
    task, small = small_task(), LocalSettings(batch_size=3, epochs=2)
    pushed = algorithms.fednova(momentum=0.5, batch_size=3, epochs=2)
    return (
        EngineCase("fedavg", "keys by position, batches", algorithms.fedavg(**small), task, CHANGING),
        EngineCase("fedprox", "a step without data", algorithms.fedprox(mu=0.5, **small), task, CHANGING),
        EngineCase("scaffold", "client states, two parts", algorithms.scaffold(**small), task, CHANGING),
        EngineCase("fednova", "the solver's statistics", pushed, task, CHANGING),
        EngineCase("fedavgm", "the server's state", algorithms.fedavgm(**small), small_task("linear"), CHANGING),
    )


def _local_optimizers() -> tuple[EngineCase, ...]:
    task = small_task()
    nesterov = Sgd(lr=0.05, epochs=2, batch_size=4, momentum=0.9, nesterov=True)
    adam = Sgd(lr=0.02, epochs=2, batch_size=3, optimizer="adam", weight_decay=0.1)
    decay = Sgd(lr=0.1, epochs=1, batch_size=2, weight_decay=0.2, decay=0.5)
    whole = Sgd(lr=0.1, epochs=3, batch_size=None)
    cosine = Schedule(kind="cosine", over="steps", warmup=1)
    composed = Sgd(lr=0.1, epochs=2, batch_size=3, momentum=0.5, accumulate=2, clip_norm=0.2, schedule=cosine)
    return (
        EngineCase("momentum", "memory within a round", _with(nesterov), task, CHANGING),
        EngineCase("adam", "a step counter under the mask", _with(adam), task, CHANGING),
        EngineCase("weight decay", "a forgotten step mask", _with(decay), task, CHANGING),
        EngineCase("composed steps", "settings that a kernel ignores", _with(composed), task, UNEVEN),
        EngineCase("whole batches", "clients padded to the largest", _with(whole), task, CHANGING),
    )


def _hard_rules() -> tuple[EngineCase, ...]:
    task, server = small_task(), Momentum(0.7, 0.6)
    sgd = Sgd(lr=0.2, batch_size=3, weight_decay=0.1)
    memory = Algorithm(sgd, Samples(), server, (HalfWithMemory(), Jitter()))
    lopsided = Algorithm(sgd, Lopsided(), server)
    wavering = Algorithm(Wavering(), Lopsided(), server, (Jitter(), HalfWithMemory()))
    return (
        EngineCase("wire with memory", "lost or mixed-up wire states", memory, task, CHANGING),
        EngineCase("lopsided weights", "shuffled clients, wrong statistics", lopsided, task, CHANGING),
        EngineCase("wavering steps", "draws, phases, masks and states", wavering, task, CHANGING),
    )


def _models() -> tuple[EngineCase, ...]:
    local = Sgd(lr=0.1, epochs=2, batch_size=3)
    both = Algorithm(Scaffold(lr=0.1, batch_size=3), Lopsided(), ServerSgd(), (HalfWithMemory(),))
    return (
        EngineCase("batchnorm", "buffers of their own per client", _with(local), small_task("batchnorm"), CHANGING),
        EngineCase("dropout", "one mask per client and step", _with(local), small_task("dropout"), CHANGING),
        EngineCase("batchnorm and state", "buffers beside states", both, small_task("batchnorm"), CHANGING),
    )


def _personal() -> tuple[EngineCase, ...]:
    local: dict[str, Any] = {"lr": 0.1, "batch_size": 3, "momentum": 0.5, "weight_decay": 0.1}
    mixed = Algorithm(SuPerFed(start=2, mixing="layer", **local), Lopsided(), ServerSgd())
    phases = Algorithm(Ditto(personal_epochs=2, **local), Lopsided(), Momentum(0.7, 0.6))
    kept = Algorithm(Personal(Sgd(**local), ("norm*",)), Lopsided(), Momentum(0.7, 0.6), (HalfWithMemory(), Jitter()))
    apart = Algorithm(Personal(Sgd(**local), shared_epochs=2), Lopsided(), ServerSgd())
    return (
        EngineCase(
            "a model at home", "own starts, draws by layer, another step from round 2", mixed, small_task(), CHANGING
        ),
        EngineCase("two phases", "phases, buffers of one of two models", phases, small_task("batchnorm"), CHANGING),
        EngineCase(
            "leaves at home", "own leaves and buffers, parts of a model", kept, small_task("batchnorm"), CHANGING
        ),
        EngineCase("leaves at home, two phases", "planned steps and phases", apart, small_task(), UNEVEN),
        EngineCase(
            "leaves at home, failing links", "buffers kept as they were", kept, small_task("batchnorm"), FAILING
        ),
    )


def _generative() -> tuple[EngineCase, ...]:
    local: dict[str, Any] = {"lr": 0.05, "batch_size": 3, "optimizer": "adam"}
    cgan = Algorithm(Cgan(official=True, **local), Lopsided(), Momentum(0.7, 0.6))
    evg = Algorithm(Energy(per_class=2, langevin=2, **local), Energies(), Langevin(noise=0.1))
    cvae = Algorithm(Cvae(**local), Lopsided(), ServerSgd())
    return (
        EngineCase("cgan", "two losses in parts of the model, noise by slot", cgan, small_task("acgan"), CHANGING),
        EngineCase(
            "fedevg",
            "samples instead of a model, input gradients, a fresh model per client",
            evg,
            small_task("mlp"),
            CHANGING,
        ),
        EngineCase("cvae", "a loss of its own under the mask", cvae, small_task("cvae"), UNEVEN),
    )


def _devices() -> tuple[EngineCase, ...]:
    sgd = Sgd(lr=0.1, batch_size=3, weight_decay=0.1)
    memory = Algorithm(Scaffold(lr=0.1, batch_size=3), Lopsided(), ServerSgd(), (HalfWithMemory(), Jitter()))
    nova, norm = algorithms.fednova(batch_size=3), small_task("batchnorm")
    return (
        EngineCase("uneven epochs", "work per client", _with(sgd), small_task(), UNEVEN),
        EngineCase("uneven epochs, normalised", "planned steps", nova, small_task(), UNEVEN),
        EngineCase("failing links", "a re-sent model has a zero update", memory, small_task(), FAILING),
        EngineCase("failing links, batchnorm", "a re-sent model keeps its buffers", _with(sgd), norm, FAILING),
    )


def _with(solver: Sgd) -> Algorithm:
    return Algorithm(solver, Uniform(), ServerSgd())

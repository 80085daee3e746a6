"""``fedalloy.unfold``: learn a table of weights from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.arguments import build
from fedalloy.core.engine import check_engine_kind
from fedalloy.core.errors import FedalloyError, SpecError, nearest
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Engine, Task
from fedalloy.core.spec import algorithm_to_spec
from fedalloy.core.task import check_task
from fedalloy.experiment.fit import as_algorithm
from fedalloy.experiment.interrupt import Caught, put_off
from fedalloy.experiment.placement import placed
from fedalloy.experiment.weight_files import save_table
from fedalloy.methods.weightings.weight_table import WeightTable
from fedalloy.studies.unfolding.learning import Learner, OuterEvent, Standing, learn, sampled, shares, sizes_of
from fedalloy.studies.unfolding.settings import Learning
from fedalloy.studies.unfolding.unrolled import UnrolledProblem, layer_names
from fedalloy.tasks.devices import DeviceProfile


class Stopped(FedalloyError):
    """The learning was interrupted; its progress is saved if a file was named."""


def unfold(
    algorithm: Algorithm | str | Mapping[str, Any],
    task: Task,
    *,
    rounds: int,
    seed: int = 0,
    devices: DeviceProfile | None = None,
    device: str = "cpu",
    output: str | Path | None = None,
    resume: bool = False,
    watcher: Callable[[OuterEvent], None] | None = None,
    engine: Engine | None = None,
    caught: Caught | None = None,
    **settings: Any,
) -> WeightTable:
    """Learn the weights of ``rounds`` rounds of ``algorithm`` on ``task`` before the run.

    ``algorithm`` is what will run: its solver, its server and whether updates are normalised (FedNova) are kept, its
    weighting is replaced by the table. ``settings`` are the fields of ``Learning``: iterations, lr, gradient, ...
    With an ``output`` the table is written there, its progress beside it until then, and ``resume=True`` continues from
    that. The result's ``weighting()`` is the rule that uses it. A signal that stopped the learning takes effect when
    everything is saved; with a list ``caught`` it is put there instead, and ``Stopped`` is raised.

    >>> import fedalloy
    >>> task = fedalloy.task("digits", clients=2)
    >>> fedalloy.unfold("fedavg", task, rounds=2, iterations=1).weights.shape
    torch.Size([2, 2])
    """
    check_task(task, "unfold: the second argument (the order is unfold(algorithm, task))")
    if engine is not None:
        check_engine_kind(engine, "unfold: engine")
    problem = _problem(as_algorithm(algorithm), placed(task, device), rounds, seed, devices, _learning(settings))
    learned = _settings(problem, seed, sizes_of(problem.task).tolist())
    path = Path(output) if output is not None else None
    progress = _progress(path, resume) if path else None
    learner = Learner(sampled(problem, seed), seed, device, progress, watcher=watcher, identity=learned, engine=engine)
    standing = _learn(learner, resume, caught)
    table = WeightTable(
        shares(standing, problem.learning), problem.layers, tuple(learned["sizes"]), problem.normalise,
        tuple(standing.losses), learned,
    )  # fmt: skip
    if path and progress:
        save_table(table, path)
        progress.unlink(missing_ok=True)
    return table


def _problem(
    algorithm: Algorithm, task: Task, rounds: int, seed: int, devices: DeviceProfile | None, learning: Learning
) -> UnrolledProblem:
    """The problem to unroll: the algorithm, bound to the task, over ``rounds`` rounds."""
    layers = layer_names(task) if learning.level == "layer" else ()
    return UnrolledProblem(
        algorithm.bind(task, Key.of(seed)), task, rounds, devices or DeviceProfile(), learning, layers
    )


def _progress(output: Path, resume: bool) -> Path:
    """The progress file of this learning; that of another one is not overwritten."""
    progress = progress_file(output)
    if not resume and progress.exists():
        raise SpecError(f"{progress} holds the progress of an interrupted learning: resume it, or delete it")
    return progress


def _learn(learner: Learner, resume: bool, caught: Caught | None) -> Standing:
    """Learn to the end; after a signal, raise ``Stopped`` with what was kept."""
    with put_off() if caught is None else nullcontext(caught) as caught_signals:
        standing, stopped = learn(learner, resume, caught_signals)
        if stopped:
            raise Stopped(_farewell(standing, learner.progress, stopped))
    return standing


def progress_file(output: Path) -> Path:
    """The progress file of a learning."""
    return output.with_name(f"{output.name}.progress")


def _learning(settings: dict[str, Any]) -> Learning:
    known = {field.name for field in fields(Learning)}
    for name in settings:
        if name not in known:
            raise SpecError(f"unfold: unknown setting '{name}'; {nearest(name, known)}")
    made: Learning = build(Learning, settings, "unfold")
    return made


def _settings(problem: UnrolledProblem, seed: int, sizes: list[int]) -> dict[str, Any]:
    """The settings as plain values, which identify a learning."""
    chosen = asdict(problem.learning)
    chosen["betas"] = list(problem.learning.betas)
    spec = algorithm_to_spec(problem.algorithm)
    return {
        "algorithm": {name: part for name, part in spec.items() if name != "weighting"},
        "normalise": problem.normalise,
        "rounds": problem.rounds,
        "seed": seed,
        "sizes": sizes,
        "settings": {name: value for name, value in chosen.items() if value is not None},
        "devices": repr(problem.devices),
    }


def _farewell(standing: Standing, progress: Path | None, why: str) -> str:
    where = (
        f"its progress is in {progress}; resume it to continue" if progress else "nothing was kept: no file was named"
    )
    return f"{why} after outer iteration {standing.iteration}: {where}"

"""``fedalloy.fit``: one federated experiment from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fedalloy.core import aspects
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import RegistryError, SpecError, nearest
from fedalloy.core.protocols import Task
from fedalloy.core.showing import ShownRuns
from fedalloy.core.spec import algorithm_from_spec
from fedalloy.core.task import check_task
from fedalloy.core.types import Tree
from fedalloy.experiment import predicting, saved
from fedalloy.experiment.callbacks import Checkpoints
from fedalloy.experiment.calling_clients import Client, names_of, number_of
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.describing import Described, parts_of, recipe_of
from fedalloy.experiment.driver import Ending, RoundEvent, run
from fedalloy.experiment.interrupt import put_off
from fedalloy.experiment.notebook import ProgressBar, in_notebook
from fedalloy.experiment.recorder import MemoryRecorder, Recorder, Row
from fedalloy.experiment.records.reading import name_of, read_run
from fedalloy.experiment.sampling import UniformSampling
from fedalloy.experiment.settings import FitSettings
from fedalloy.experiment.tracking import Tracker
from fedalloy.experiment.trained import Trained
from fedalloy.methods import published as algorithms
from fedalloy.methods.classifier import synthetic_set
from fedalloy.tasks.describing import preparation_of
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.tasks.preparing import Preparation
from fedalloy.tasks.sources import raw_rows


@dataclass(frozen=True, repr=False)
class RunResult(ShownRuns):
    """The result of a run: how it ended, the model, and every row it recorded."""

    ending: Ending
    recorder: Recorder
    folder: Path | None
    name: str = "run"

    def __repr__(self) -> str:
        where = f"; folder {self.folder}" if self.folder else ""
        scores = self.last(self.metric) if self.metric in self.trained.fed.config.metrics else {}
        scored = f", {self.metric} {scores['mean']:.3f}" if scores.get("mean") is not None else ""
        return f"<{self.name}, seed {self.seed}: {self.status} in round {self.ending.progress.round}{scored}{where}>"

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.trained.fed.config.seed

    @property
    def metric(self) -> str:
        """The metric by which the run is judged."""
        return self.trained.fed.config.target_metric

    @property
    def status(self) -> str:
        """finished, failed or stopped."""
        return self.ending.status

    @property
    def model(self) -> Tree:
        """Parameters and buffers of the global model, ready for ``module.load_state_dict``: for methods that learn
        samples, those of a classifier trained on them."""
        model = self.trained.server_model()
        return {**model.params, **model.buffers}

    def module(self, client: Client | None = None) -> nn.Module:
        """The model as it was given to the task, in evaluation mode, with the trained weights: those of the server, or
        the personal ones of a client, which is given by its number or its name (refused for a method whose clients have
        none)."""
        model = self.trained.server_model()
        params, buffers = model.params, model.buffers
        if client is not None:
            number = self._number(client)
            self._check_personalised()
            ((params, buffers),) = self.trained.models(torch.tensor([number]))
        if not isinstance(model.objective, ModuleObjective):
            raise SpecError(f"objective {type(model.objective).__name__} has no module; result.model has its leaves")
        return model.objective.module(params, buffers)

    def save_pretrained(self, folder: str | Path, client: Client | None = None) -> None:
        """Write the trained model as its own library does (``save_pretrained`` of transformers or PEFT), for programs
        without fedalloy."""
        module = self.module(client)
        save = getattr(module, "save_pretrained", None)
        if save is None:
            raise SpecError(
                f"{type(module).__name__} has no 'save_pretrained', as models of transformers and PEFT do: write "
                "result.module().state_dict() with torch.save"
            )
        save(str(folder))

    def personal_module(self, client: Client) -> nn.Module:
        """A client's own model; refused for a method whose clients have none."""
        self._check_personalised()
        return self.module(client)

    def _check_personalised(self) -> None:
        if not aspects.is_personalised(self.trained.fed.algorithm.solver):
            raise SpecError("the clients of this method have no model of their own: result.module() is that of all")

    def prepare(self, x: Any, rows_of: Client | None = None) -> Any:
        """Raw rows as the model gets them: a frame's columns are encoded, gaps filled, features standardised, as far as
        the task does it. ``rows_of`` is the client whose rows they are, where that is done per client."""
        number = None if rows_of is None else self._number(rows_of)
        return raw_rows.prepare(x, self._preparation(() if number is None else (number,)), number)

    def predict(
        self, x: Any, client: Client | None = None, *, rows_of: Client | None = None, prepared: bool = False
    ) -> Tensor:
        """The outputs of the global model for raw rows (logits for classes), or those of a client's own model.

        The rows are prepared first (:meth:`prepare`). Where that is done per client, ``rows_of`` says whose rows these
        are (default: ``client``). With ``prepared=True`` the model gets ``x`` as it is.
        """
        model = self.trained.server_model()
        leaves = (model.params, model.buffers)
        if client is not None:
            self.personal_module(client)
            (leaves,) = self.trained.models(torch.tensor([self._number(client)]))
        rows = predicting.rows_for(x, self.prepare, client, rows_of, prepared)
        floats = not model.objective.takes_integers
        return predicting.outputs(lambda part: model.objective.outputs(*leaves, part), rows, leaves[0], floats)

    def save(
        self, folder: str | Path, clients: Sequence[Client] = (), *, rows_of: Sequence[Client] | None = None
    ) -> Path:
        """Write the model, those of some ``clients``, all rounds, and how raw rows are prepared, as safetensors and
        JSON; :func:`fedalloy.load` reads them (:mod:`fedalloy.experiment.saved`). Where rows are prepared per client,
        that of the clients ``rows_of`` is saved (default: all whose data are in memory, else ``clients``)."""
        if not isinstance(folder, str | Path) or not str(folder):
            raise SpecError(f"save: folder must be the path of a new folder, got {folder!r}")
        for name, given in (("clients", clients), ("rows_of", () if rows_of is None else rows_of)):
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise SpecError(f"save: {name} must be a list of clients, such as [0, 3], got {given!r}")
        for client in clients:
            self.personal_module(client)
        numbers = [self._number(client) for client in clients]
        steps = self._preparation(numbers if rows_of is None else [self._number(client) for client in rows_of])
        if rows_of is not None and steps.per_client:
            steps = steps.of_clients([self._number(client) for client in rows_of])
        objective, encoding = self.trained.server_model().objective, self.trained.fed.task.encoding
        own = self.trained.models(torch.tensor(numbers, dtype=torch.int64)) if numbers else []
        told = {
            "name": self.name, "seed": self.seed, "status": self.status, "round": self.ending.progress.round,
            "metric": self.metric, "rounds": list(self.rounds()), "names": self._names_of({*numbers, *steps.known}),
            "encoding": encoding or {}, "model": objective.told_model,
            "floats": not objective.takes_integers,
        }  # fmt: skip
        each = {number: {**params, **buffers} for number, (params, buffers) in zip(numbers, own, strict=True)}
        return saved.write(Path(folder), told, self.model, each, steps)

    def _names_of(self, numbers: Iterable[int]) -> dict[str, int]:
        """The names of some clients, as far as they have one."""
        names = self.trained.fed.task.names
        return {} if names is None else {str(names[number]): number for number in sorted(numbers)}

    def _preparation(self, clients: Sequence[int]) -> Preparation:
        """What the task does to raw rows, at least to those of ``clients``."""
        return preparation_of(self.trained.fed.task, clients)

    def _number(self, client: Client) -> int:
        task = self.trained.fed.task
        return number_of(client, names_of(task.names), task.population)

    def synthetic(self, per_class: int = 10) -> tuple[Tensor, Tensor]:
        """The labelled synthetic samples ``(x, y)`` of the run; refused for a method that makes none."""
        fed, key = self.trained.fed, self.trained.fed.root.fold("synthetic", self.trained.round)
        made = synthetic_set(fed.task, fed.algorithm, self.ending.state, key, per_class)
        if made is None:
            raise SpecError(f"solver '{type(fed.algorithm.solver).__name__}' makes no synthetic samples; fedevg does")
        return made

    @property
    def trained(self) -> Trained:
        """The final state of the run, for unseen clients and for every client's own model."""
        return self.ending.trained

    @property
    def notices(self) -> tuple[str, ...]:
        """What was unusual about the data: clients without examples, or with less than a batch of them."""
        return self.trained.fed.notices

    @property
    def reached(self) -> int | None:
        """The round in which the target was reached first."""
        return self.ending.progress.reached

    def rounds(self) -> Iterator[Row]:
        """One row per round (columns: ``fedalloy.experiment.records.reading``)."""
        return self._rows("rounds")

    def clients(self) -> Iterator[Row]:
        """One row per evaluation with every client's value."""
        return self._rows("clients")

    def last(self, metric: str | None = None) -> dict[str, float]:
        """The newest summary of a metric (default: the run's target metric) over clients: mean, worst_served, gini, ...

        ``worst`` and ``best`` are the lowest and the highest tenth whatever the metric; ``worst_served`` and
        ``best_served`` are told apart by its direction.
        """
        metric = self.trained.fed.config.target_metric if metric is None else metric
        found: dict[str, float] = {}
        known: set[str] = set()
        for row in self.rounds():
            scores = row.get("evaluation", {})
            known |= scores.keys()
            found = scores.get(metric, found)
        if known and not found:
            raise SpecError(f"the run was not scored by '{metric}': {nearest(metric, known)}")
        return found

    def _rows(self, stream: str) -> Iterator[Row]:
        if isinstance(self.recorder, MemoryRecorder):
            return iter(self.recorder.streams["rounds" if stream == "rounds" else "clients"])
        assert self.folder is not None
        record = read_run(self.folder)
        return record.rounds() if stream == "rounds" else record.clients()


def fit(
    algorithm: Algorithm | str | Mapping[str, Any],
    task: Task,
    *,
    rounds: int = 50,
    cohort: int | float | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    resume: bool = False,
    watcher: Callable[[RoundEvent], None] | None = None,
    initial: Tree | None = None,
    track: Sequence[str | Tracker] = (),
    callbacks: Sequence[Any] = (),
    progress: bool | None = None,
    start_over: bool = False,
    allow_engine_change: bool = False,
    **settings: Unpack[FitSettings],
) -> RunResult:
    """Train ``algorithm`` on ``task`` and return what happened.

    ``algorithm`` is a value (``fedavg(lr=0.05)``), the name of a published method, or a spec. ``settings`` are
    the further fields of ``RunConfig``: devices, metrics, evaluate_every, target, engine, ... With a ``folder``
    everything is written there and ``resume=True`` continues after an interruption. ``callbacks`` are called while it
    runs (:class:`fedalloy.Callback`: early stopping, logging, ...); ``track=["tensorboard"]`` logs to other tools
    (:mod:`fedalloy.results.track`); ``progress`` shows a bar (default: in notebooks). Ctrl-C and SIGTERM end the run
    after its round; when everything is saved the signal takes effect, or goes to the handler that the caller has set;
    then, and after the stop button of a notebook, the result is returned.
    A folder is resumed only with the run that it holds, possibly with more ``rounds``; ``allow_engine_change`` allows
    another engine or device, ``start_over`` starts over where no checkpoint can be used.
    """
    _check_order(algorithm, task)
    _check_given(folder, callbacks, track, watcher)
    chosen = as_algorithm(algorithm)
    _check_whose(settings, chosen)
    config = RunConfig(rounds=rounds, seed=seed, **_settings({**settings}, cohort, task, resume))
    told = recipe_of(chosen, task, config) if folder is not None else _told_parts(chosen)
    recipe = Described({**told, **_given_name(algorithm)})
    bars = [ProgressBar()] if (in_notebook() if progress is None else progress) else []
    with put_off(keep=in_notebook()) as caught:
        ending, recorder = run(
            chosen, task, config, folder=folder, resume=resume, recipe=recipe, watcher=watcher, initial=initial,
            track=track, callbacks=[*_with_folder(list(callbacks), folder), *bars], caught=caught,
            start_over=start_over, allow_engine_change=allow_engine_change,
        )  # fmt: skip
    return RunResult(ending, recorder, Path(folder) if folder is not None else None, name_of(recipe))


def as_algorithm(algorithm: Algorithm | str | Mapping[str, Any]) -> Algorithm:
    """An algorithm from a value, a name or a spec."""
    if isinstance(algorithm, Algorithm):
        return algorithm
    if not isinstance(algorithm, str | Mapping):
        raise SpecError(f"algorithm is a {type(algorithm).__name__}: give fedavg(lr=0.05), a method's name, or a spec")
    if isinstance(algorithm, str):
        return algorithms.named(algorithm)
    # As in a comparison and in a recipe: the name of a method and its settings.
    return algorithms.named(**algorithm) if "name" in algorithm else algorithm_from_spec(algorithm)


def _given_name(algorithm: object) -> dict[str, Any]:
    """The name under which a method was asked for; a value has only its parts."""
    named = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
    return {"name": named} if isinstance(named, str) else {}


def _told_parts(algorithm: Algorithm) -> dict[str, Any]:
    """An algorithm's parts for a result that has no folder; rules of one's own need no registered names there."""
    try:
        return parts_of(algorithm)
    except RegistryError:
        parts = algorithm.solver, algorithm.weighting, algorithm.server
        return {"name": ", ".join(type(part).__name__ for part in parts)}


def _check_given(folder: object, callbacks: object, track: object, watcher: object) -> None:
    if folder is not None and (not isinstance(folder, str | Path) or not str(folder)):
        raise SpecError(f"fit: folder must be the path of a run folder, or None for none, got {folder!r}")
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        how = "" if isinstance(callbacks, str) else f": write [{type(callbacks).__name__}()]"
        raise SpecError(f"fit: callbacks must be a list of objects, got {callbacks!r}{how}")
    if isinstance(track, str) or not isinstance(track, Iterable):
        raise SpecError(f"fit: track must be a list, such as ['tensorboard'], got {track!r}")
    if watcher is not None and not callable(watcher):
        raise SpecError(f"fit: watcher must be a function of a round's event, or None, got {watcher!r}")


def _with_folder(callbacks: list[Any], folder: object) -> list[Any]:
    """The callbacks; checkpoints of a run without a folder would be written nowhere."""
    if folder is None and any(isinstance(one, Checkpoints) for one in callbacks):
        raise SpecError("fit: Checkpoints needs the folder of the run: fit(..., folder='runs/mine')")
    return callbacks


def _check_order(algorithm: object, task: object) -> None:
    """Refuse swapped or wrong arguments, with their order."""
    if isinstance(algorithm, Task) and not isinstance(algorithm, Algorithm):
        raise SpecError("fit: the first argument is a task; the order is fit(algorithm, task)")
    check_task(task, "fit: the second argument (the order is fit(algorithm, task))")


def _check_whose(settings: Mapping[str, Any], chosen: Algorithm) -> None:
    """Refuse settings of the method, such as its step size, in words of their own."""
    ours = {field.name for field in fields(RunConfig)}
    parts: tuple[Any, ...] = (chosen.solver, chosen.weighting, chosen.server)
    theirs = {field.name for part in parts if is_dataclass(part) for field in fields(part)}
    for name in settings:
        if name not in ours and name in theirs:
            raise SpecError(
                f"fit: '{name}' is a setting of the method, not of fit: give it to the method, "
                f"fedalloy.algorithms.fedavg({name}=...)"
            )


def _settings(settings: dict[str, Any], cohort: int | float | None, task: Task, resume: bool) -> dict[str, Any]:
    """The settings with ``cohort`` turned into a sampling rule and, unless given, the default metrics of the task."""
    allowed = {field.name for field in fields(RunConfig)}
    for name in settings:
        if name not in allowed:
            raise SpecError(f"fit: unknown setting '{name}'; {nearest(name, allowed | {'cohort'})}")
    if cohort is not None and "sampling" in settings:
        raise SpecError("fit: 'cohort' and 'sampling' both choose the clients of a round; give one of them")
    scores = _scores(settings, tuple(task.metrics) or RunConfig.metrics, resume)
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    return {"sampling": UniformSampling(cohort), **scores, **plain}


def _scores(settings: Mapping[str, Any], defaults: tuple[str, ...], resume: bool) -> dict[str, Any]:
    """What a run is scored and judged by where ``settings`` do not say it: as for a recipe, by the task's first metric
    if that is evaluated, else by the first that is. Folders of earlier versions may hold another metric."""
    metrics = settings.get("metrics", defaults)
    if isinstance(metrics, str) or not isinstance(metrics, Sequence) or not metrics:
        return {}  # refused by the settings themselves
    chosen = settings.get("target_metric", defaults[0] if defaults[0] in metrics else metrics[0])
    if chosen not in metrics and not resume:
        raise SpecError(f"fit: target_metric '{chosen}' is not evaluated: {nearest(str(chosen), metrics)}")
    return {"metrics": tuple(metrics), "target_metric": chosen}

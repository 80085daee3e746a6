"""The tables of a recipe, as pydantic models: their fields, types, limits and one line of explanation each.

Tables that name a rule (``kind`` plus the rule's own arguments) accept any further key here; the rule checks them
when the recipe is resolved, with the same kind of message. :func:`schema` returns the JSON schema for editors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedalloy.core import registry
from fedalloy.core.statistics import MAX_EXAMPLES

Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0)]
Table = dict[str, Any]


class Closed(BaseModel):
    """A table whose keys are all known."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Open(BaseModel):
    """A table that also holds the arguments of the rule it names."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @property
    def arguments(self) -> Table:
        """The rule's own arguments."""
        return dict(self.model_extra or {})


class RuleTable(Open):
    """A rule: its name and its arguments."""

    kind: str
    """Name of the rule; `fedalloy list` shows all."""


class SyntheticTable(Closed):
    """Samples that all clients train on."""

    path: str
    """An `.npz` file with the arrays `x` and `y`, as `fedalloy synth export` writes it."""
    per_class: Count | None = None
    """How many of every class; default: all."""


class AugmentTable(Closed):
    """Random changes of training examples."""

    flip: Literal["none", "horizontal", "vertical"] = "none"
    """Mirror an image with probability one half."""
    crop: Annotated[int, Field(ge=0)] = 0
    """Move an image by up to so many pixels in each direction."""
    noise: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the normal noise that is added to every feature."""


class TaskTable(Closed):
    """The data, the model and the loss."""

    dataset: str | Table = "digits"
    """A dataset's name, a folder, `package.module:function`, or a table of a dataset's `kind` and arguments."""
    model: str | Table | None = None
    """A model's name, `package.module:function`, or a table of `kind` and arguments; default: chosen by the data."""
    loss: str | Table | None = None
    """A loss's name, or a table of its `kind` and arguments; default: that of the dataset, else by the kind of task."""
    kind: Literal["classification", "multilabel", "regression", "segmentation", "tokens"] | None = None
    """What the targets are; default: as loss and targets say, which is refused where they leave it open."""
    unit: Literal["examples", "targets"] = "examples"
    """What `num_examples` counts, by which clients are weighted: examples, or the targets (tokens) that count."""
    augment: AugmentTable | None = None
    """Random changes of the examples in training: `{ flip, crop, noise }`; default: none."""
    buckets: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] | None = None
    """Lengths to which batches of padded sequences are cut, `[32, 64]`; default: all keep the padded length."""
    standardise: Literal["none", "client"] | None = None
    """`client`: scale every client's features by its own training part; default: that of the dataset."""
    trainable: list[str] | None = None
    """Patterns of the parameter names that are trained and exchanged; default: those with `requires_grad`."""
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Share of every client's examples kept for testing."""
    valid_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of every client's examples kept for validation."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of the model and the features."""
    cache_mb: Annotated[float, Field(gt=0)] = 256.0
    """Megabytes of examples in memory, for data that are read on demand."""
    classifier: str | Table | None = None
    """The model that the server trains on synthetic samples; default: the task's model."""
    synthetic: str | SyntheticTable | None = None
    """A file of synthetic samples that every client trains on in addition to its own examples."""


class PartitionTable(Open):
    """How examples are divided among clients."""

    kind: str | None = None
    """Name of the partition rule; default: the data's own clients, or iid."""
    clients: Count | None = None
    """Number of clients; not needed for rules that determine it themselves."""
    newcomers: Annotated[int, Field(ge=0)] = 0
    """How many of these clients, drawn once, never take part; `fedalloy unseen` scores them."""


class NoiseTable(Closed):
    """Wrong labels."""

    kind: Literal["pair", "symmetric"]
    """A wrong label is the next class, or any other class with equal probability."""
    ratio: Probability
    """Share of the labels that become wrong."""
    test: Literal["clean", "noisy"] = "clean"
    """Whether the clients' test labels stay true."""
    protocol: Literal["paper", "public_code"] = "paper"
    """`public_code`: the two kinds swapped and all labels corrupted before the split, as for the published numbers."""


class EpochsTable(Closed):
    """A range of local epochs, drawn per client and round."""

    low: Annotated[int, Field(ge=0)]
    """Fewest epochs."""
    high: Annotated[int, Field(ge=0)]
    """Most epochs."""


class SlowTable(Closed):
    """Slow devices."""

    fraction: Probability
    """Share of the clients that are slow."""
    factor: Annotated[float, Field(ge=1)]
    """How many times slower they compute."""


class DevicesTable(Closed):
    """What the clients' devices can do."""

    epochs: Annotated[int, Field(ge=0)] | list[int] | EpochsTable | None = None
    """Local epochs: one number, one per client, or `{ low, high }` drawn per round; default: the solver's."""
    success: Probability | list[float] = 1.0
    """Probability that a client's link works in a round; one number or one per client."""
    availability: Probability | list[float] = 1.0
    """Probability that a client can be sampled in a round; one number or one per client."""
    slow: SlowTable | None = None
    """Slow clients: `{ fraction, factor }`."""
    seconds_per_step: Seconds = 0.0
    """Simulated time of one local step."""
    seconds_per_megabyte: Seconds = 0.0
    """Simulated time of sending a megabyte."""
    deadline: Seconds | None = None
    """Simulated seconds after which a client has failed."""
    on_failure: Literal["drop", "resend"] = "drop"
    """What a failed client's contribution becomes: nothing, or the received model."""


class SamplingTable(Closed):
    """Which clients take part in a round."""

    kind: Literal["uniform", "by_size", "list"] = "uniform"
    """Uniform, in proportion to the number of examples, or given cohorts."""
    cohort: int | float | None = None
    """Clients per round: a number, or a fraction up to 1.0; default: all clients."""
    cohorts: list[list[int]] | None = None
    """For `list`: the cohorts, used in turn."""


class AlgorithmTable(Open):
    """A published method and its settings; those that the method does not declare are passed to local training."""

    name: str | None = None
    """Name of the method; `fedalloy list algorithms` shows all."""
    on_failure: Literal["drop", "resend"] | None = None
    """Overrides the devices' setting for failed links."""


class RunTable(Closed):
    """How many rounds, which seeds, and when to stop."""

    rounds: Count = 50
    """Number of rounds."""
    seeds: Annotated[list[int], Field(min_length=1)] = [0]
    """One run per seed; results are reported over all of them."""
    tuning_seeds: list[int] = []
    """Seeds on which a grid is tuned; none of them may be in `seeds`."""
    target: float | None = None
    """A score: the first round that reaches it is reported (at least this value, or at most where lower is better)."""
    target_metric: str | None = None
    """The metric for the target, patience and tuning, in its own direction; default: that of the dataset
    (accuracy)."""
    target_on: Literal["clients", "global"] | None = None
    """Scores for the target, patience and tables: the mean over clients (default), or on the global test set."""
    stop_at_target: bool = False
    """End the run when the target is reached."""
    patience: Count | None = None
    """End the run after this many evaluations without improvement."""
    max_examples: Count = MAX_EXAMPLES
    """A client that reports more training examples is dropped and named; so is one that changes its number."""
    max_norm: Annotated[float, Field(gt=0)] | None = None
    """Longer updates are dropped and named."""
    checkpoint_every: Seconds = 30.0
    """Seconds between checkpoints."""
    client_memory_mb: Annotated[float, Field(ge=0)] = 64.0
    """Client states are kept on disk when those of all clients together are larger than this."""
    quick: Literal[True] | None = None
    """Set by `--quick`: the recipe was shortened to see whether it runs; its scores are not results."""


class ClassifierTable(Closed):
    """How the server's classifier is trained on synthetic samples, for methods that generate them."""

    epochs: Count = 200
    """Passes over the samples."""
    batch_size: Count = 64
    """Samples per step."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Step size of Adam."""
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    """Weight decay."""
    per_class: Count = 10
    """Samples of every class that a generator makes."""


class EvaluateTable(Closed):
    """When and on which clients the model is scored."""

    every: Count = 1
    """Rounds between evaluations; the last round is always evaluated."""
    metrics: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of metrics; `fedalloy list metrics` shows all; default: those of the dataset (accuracy, loss)."""
    clients: Count | None = None
    """Score only this many clients, drawn once; default: all clients."""
    part: Literal["test", "valid"] = "test"
    """Which part of every client's examples is scored; `valid`: settings can be chosen without looking at the test
    parts."""
    mix_every: Count | None = None
    """Rounds between evaluations at lambda = 0, 0.1, ..., 1, for methods that mix two models; default: at the end."""
    snapshots: Count | None = None
    """Rounds between snapshots of synthetic samples in the run folder, for generative methods; default: none."""
    parquet_from: Annotated[int, Field(ge=0)] | None = None
    """Evaluations of so many clients or more become Parquet files in the run folder instead of lines of JSON, 0: never;
    default: 100,000 where pyarrow is installed."""
    classifier: ClassifierTable = ClassifierTable()
    """The classifier that scores synthetic samples."""


class EngineTable(Open):
    """The engine that runs the clients; further keys are its arguments."""

    kind: str = "auto"
    """Name of the engine."""
    device: str = "cpu"
    """A torch device."""
    threads: Count | None = None
    """Threads of torch; default: torch's choice in a run, one in a comparison."""
    contributions_mb: Annotated[float, Field(ge=0)] = 4000.0
    """The contributions of a round are kept on disk when those of the cohort together are larger than this."""
    contributions_folder: str | None = None
    """Where they are kept then; default: the run folder."""


class UnfoldTable(Closed):
    """How a table of weights is learned before the run (`fedalloy unfold`)."""

    iterations: Count = 400
    """Outer iterations, each of which unrolls all rounds once."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Step size of the outer Adam."""
    gradient: Literal["first_order", "exact"] = "first_order"
    """`exact` differentiates the local steps too."""
    parametrisation: Literal["square", "softmax"] = "square"
    """Shares are theta^2 / sum theta^2, or a softmax of theta."""
    level: Literal["client", "layer"] = "client"
    """A weight for every client, or for every layer of every client."""
    loss: Literal["task", "mse"] = "task"
    """The loss that is summed: the task's, or the squared error of the softmax against one-hot labels."""
    final: bool = True
    """Whether the model after the last round is scored too; without it the last row learns nothing."""
    initial: Literal["fixed", "fresh"] = "fixed"
    """One initial model for all iterations, that of a run with the same seed, or a new one in each."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of every client's training examples that is used."""
    smoothness: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the penalty on changes from row to row."""
    patience: Count | None = None
    """Stop when the validation loss has not improved for this many evaluations; needs task.valid_fraction."""
    check_every: Count = 10
    """Iterations between evaluations of the validation loss."""
    seed: int = 0
    """Seed of the learning."""


class TuneTable(Closed):
    """A search for good settings (`fedalloy tune`); give one of `trials`, `rounds` and `seconds`."""

    trials: Count | None = None
    """Settings to try per algorithm; default: 20 if no other budget is given."""
    rounds: Count | None = None
    """Rounds to spend per algorithm, those of stopped trials included."""
    seconds: Annotated[float, Field(gt=0)] | None = None
    """Seconds of runs to spend per algorithm."""
    sampler: Literal["tpe", "random"] = "tpe"
    """How the next settings are chosen: by a model of those tried (TPE), or at random."""
    pruner: Literal["asha", "hyperband", "none"] = "asha"
    """How trials that fall behind are stopped early: successive halving, several such races, or not at all."""
    score: Literal["mean", "worst_served"] = "mean"
    """What trials are compared by: the mean of the target metric over clients, or that of the worst-served tenth."""
    valid_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of every client's training examples that trials are scored on, if the task has no validation parts."""
    seed: int = 0
    """Seed of the search."""
    space: Table = {}
    """Ranges: `"algorithm.lr" = { low = 0.01, high = 1.0, log = true }`, or a list of values; default: the rules'."""


class EntryTable(Closed):
    """One algorithm of a comparison."""

    name: str
    """Its name in tables; a published method's name also selects that method."""
    set: Table = {}
    """What differs from the recipe: `{ "algorithm.mu" = 0.1 }`."""
    grid: dict[str, list[Any]] = {}
    """Values to tune for this entry alone: `{ "algorithm.mu" = [0.01, 0.1] }`."""


class Recipe(Closed):
    """Everything about an experiment. Every table is optional."""

    name: str | None = None
    """The experiment's name in tables."""
    description: str | None = None
    """Its purpose, in a sentence."""
    imports: list[str] = []
    """Your modules with rules; their code runs. On PYTHONPATH or, with `--allow-imports`, in the current folder."""
    task: TaskTable = TaskTable()
    partition: PartitionTable = PartitionTable()
    noise: NoiseTable | None = None
    devices: DevicesTable = DevicesTable()
    sampling: SamplingTable = SamplingTable()
    algorithm: AlgorithmTable = AlgorithmTable()
    solver: RuleTable | None = None
    """Replaces the algorithm's solver."""
    weighting: RuleTable | None = None
    """Replaces the algorithm's weighting."""
    server: RuleTable | None = None
    """Replaces the algorithm's server optimizer."""
    wire: list[RuleTable] | None = None
    """Replaces the algorithm's wire rules, which transform contributions on the way to the server; in order."""
    run: RunTable = RunTable()
    evaluate: EvaluateTable = EvaluateTable()
    unfold: UnfoldTable | None = None
    tune: TuneTable | None = None
    engine: EngineTable = EngineTable()
    compare: list[EntryTable] = []
    """The algorithms of a comparison."""
    grid: dict[str, list[Any]] = {}
    """Values to tune for every entry: `"algorithm.lr" = [0.05, 0.1]`."""


_NAMES = {
    ("PartitionTable", "kind"): "partition",
    ("AlgorithmTable", "name"): "algorithm",
    ("EngineTable", "kind"): "engine",
}


def schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a recipe."""
    made = Recipe.model_json_schema()
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for (table, field), category in _NAMES.items():
        made["$defs"][table]["properties"][field]["examples"] = registry.names(category)
    for category in ("solver", "weighting", "server"):
        made["properties"][category]["examples"] = [{"kind": name} for name in registry.names(category)]
    return made

"""What a server may send to a node: a strict schema, and the only function that reads it.

:func:`read_order` turns received records into a frozen :class:`ReceivedOrder`, or raises a :class:`FedalloyError` with
the reason. It reads no file, imports nothing and builds nothing; for an invalid message not even the tensors are made.
Nothing else of a message is ever used. Everything from a server is data: registered names and plain arguments. Dotted
paths, imports and files come only from the node's own configuration; a node's own model can be named if the name is
listed in the node's policy.

(Answers in the other direction: :func:`fedalloy.flower.protocol.replies.read_reply`; those of apps that are not
fedalloy's: :meth:`fedalloy.flower.foreign.ReplyReader.read`.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

import fedalloy
from fedalloy.core.inputs import is_one_shape
from fedalloy.core.types import Payload
from fedalloy.flower.protocol.header import FORMAT, Refused
from fedalloy.flower.protocol.plain_values import plain_arguments, thawed
from fedalloy.flower.protocol.tensor_messages import outline, unpack

if TYPE_CHECKING:
    from flwr.app import RecordDict

MOST_CLIENTS, MOST_EPOCHS, MOST_CLASSES = 1_000_000, 1_000_000, 1_000_000
_KIND = r"[A-Za-z0-9_.-]{1,64}"
_PARTS = {"hello": (), "train": ("shared/",), "evaluate": ("shared/",), "cross": ("shared/", "cohort/")}

_listed = BeforeValidator(lambda given: tuple(given) if isinstance(given, list) else given)
Bits = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Round = Annotated[int, Field(ge=0, le=1_000_000_000)]
Text = Annotated[str, Field(min_length=1, max_length=200)]
Kind = Annotated[str, Field(pattern=f"^{_KIND}$")]
Pattern = Annotated[str, Field(pattern=r"^[\w.*?!\[\]-]{1,200}$")]
Extent = Annotated[int, Field(ge=1, le=1 << 31)]
Shape = Annotated[tuple[Extent, ...], _listed, Field(max_length=8)]
Input = Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,63}$")]
Inputs = Annotated[tuple[Shape, ...], _listed, Field(min_length=1, max_length=16)]
NamedInputs = Annotated[dict[Input, Shape], Field(min_length=1, max_length=16)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class StrictTable(BaseModel):
    """A frozen table that refuses unknown keys and values of other types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class RuleSpec(StrictTable):
    """A registered rule by name, and its arguments as plain values."""

    kind: Kind
    arguments: Mapping[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _gathered(cls, given: Any) -> Any:
        table = {"kind": given} if isinstance(given, str) else given
        if not isinstance(table, dict):
            raise ValueError("is neither a name nor a table with a 'kind'")
        return {"kind": table.get("kind"), "arguments": {name: table[name] for name in table if name != "kind"}}

    @field_validator("arguments", mode="plain")
    @classmethod
    def _plain(cls, given: Any) -> Mapping[str, Any]:
        return plain_arguments(given)

    def to_spec(self) -> dict[str, Any]:
        """As :func:`fedalloy.core.spec.from_spec` reads it."""
        return {"kind": self.kind, **thawed(self.arguments)}


class ModelSpec(RuleSpec):
    """A registered model; or one of the node's own, if its policy lists exactly this name."""

    kind: Text

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str, info: ValidationInfo) -> str:
        own: tuple[str, ...] = tuple((info.context or {}).get("models", ()))
        if kind in own:
            return own[own.index(kind)]  # the node's own string, not the server's
        if not re.fullmatch(_KIND, kind):
            raise ValueError(f"'{kind:.80}' is not in the list 'models' of this node's policy")
        return kind

    @field_validator("arguments", mode="plain")
    @classmethod
    def _plain(cls, given: Any) -> Mapping[str, Any]:
        return plain_arguments(given, strict=True)


class NoiseSpec(StrictTable):
    """Wrong labels, for trials."""

    kind: Literal["pair", "symmetric"]
    ratio: Annotated[float, Field(ge=0, le=1)]
    test: Literal["clean", "noisy"] = "clean"
    protocol: Literal["paper", "public_code"] = "paper"


class TrialSpec(StrictTable):
    """The data of a trial, for nodes that use their share of the recipe's own."""

    dataset: RuleSpec
    partition: RuleSpec | None = None
    clients: Annotated[int, Field(ge=1, le=MOST_CLIENTS)] | None = None
    newcomers: Annotated[int, Field(ge=0, le=MOST_CLIENTS)] = 0
    noise: NoiseSpec | None = None


class AugmentSpec(StrictTable):
    """Random changes of training examples."""

    flip: Literal["none", "horizontal", "vertical"] = "none"
    crop: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    noise: Annotated[float, Field(ge=0)] = 0.0


class TaskSpec(StrictTable):
    """The model, the form of the examples, and how a node splits its own."""

    shape: Shape | Inputs | NamedInputs
    classes: Annotated[int, Field(ge=0, le=MOST_CLASSES)]
    bounds: Annotated[tuple[float, float], _listed] | None = None
    model: ModelSpec | None = None
    loss: RuleSpec | None = None
    kind: Literal["classification", "multilabel", "regression", "segmentation", "tokens"] | None = None
    unit: Literal["examples", "targets"] = "examples"
    augment: AugmentSpec | None = None
    buckets: Annotated[tuple[Extent, ...], _listed, Field(min_length=1, max_length=64)] | None = None
    targets: Shape = ()
    real: bool | None = None
    ignore_index: int = -100
    dtype: Literal["float32", "float64"] = "float32"
    trainable: Annotated[tuple[Pattern, ...], _listed, Field(min_length=1, max_length=256)] | None = None
    frozen: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None
    standardise: Literal["none", "client"] = "none"
    test_fraction: Fraction = 0.2
    valid_fraction: Fraction = 0.0
    seed: Bits = 0
    trial: TrialSpec | None = None

    @model_validator(mode="after")
    def _together(self) -> TaskSpec:
        if self.test_fraction + self.valid_fraction >= 1:
            raise ValueError("test_fraction and valid_fraction leave nothing to train on")
        if any(math.prod(shape) > 1 << 31 for shape in (*self.shapes, self.targets)):
            raise ValueError("an example is larger than any memory")
        return self

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of every input."""
        if isinstance(self.shape, dict):
            return list(self.shape.values())
        return [self.shape] if is_one_shape(self.shape) else list(self.shape)  # type: ignore[list-item,arg-type]


class AlgorithmSpec(StrictTable):
    """The node's part of an algorithm, and the statistics that the server's part needs."""

    solver: RuleSpec
    wire: Annotated[tuple[RuleSpec, ...], _listed, Field(max_length=16)] = ()
    weighting: Kind
    requires: Annotated[tuple[Kind, ...], _listed, Field(max_length=64)] = ()


class Hello(StrictTable):
    """Asks a new node for its identity, without information about the run."""

    kind: Literal["hello"]
    format: int
    fedalloy: Text


class Addressed(StrictTable):
    """An order for one client, with its run, task and algorithm."""

    format: int
    fedalloy: Text
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]
    sitting: Count
    serial: Count
    seed: Bits
    population: Annotated[int, Field(ge=1, le=MOST_CLIENTS)]
    task: TaskSpec
    client: Text
    id: Annotated[int, Field(ge=0, lt=MOST_CLIENTS)]
    algorithm: AlgorithmSpec
    round: Round = 0

    @model_validator(mode="after")
    def _one_of_them(self) -> Addressed:
        if self.id >= self.population:
            raise ValueError(f"client {self.id} of {self.population} does not exist")
        return self


class Train(Addressed):
    """Local work of a round."""

    kind: Literal["train"]
    state: Round
    on_lag: Literal["continue", "drop"]
    epochs: Annotated[int, Field(ge=-1, le=MOST_EPOCHS)]
    active: bool
    rounds: Round | None
    key: Bits
    local_lr: float


class Evaluate(Addressed):
    """Scores on the node's own test part."""

    kind: Literal["evaluate"]
    state: Round
    on_lag: Literal["continue", "drop"]
    metrics: Annotated[tuple[Kind, ...], _listed, Field(max_length=64)]
    models: Annotated[
        tuple[Literal["global", "personal"] | Annotated[float, Field(ge=0, le=1)], ...],
        _listed,
        Field(max_length=256),
    ]


class Cross(Addressed):
    """The accuracy of other clients' models on the node's validation part."""

    kind: Literal["cross"]


Work = Train | Evaluate | Cross
"""Orders that a client carries out."""
_ORDERS: TypeAdapter[Hello | Work] = TypeAdapter(Annotated[Hello | Work, Field(discriminator="kind")])


@dataclass(frozen=True)
class ReceivedOrder:
    """A checked message from a server: its header, and its tensors by part."""

    head: Hello | Work
    parts: Payload


def read_order(content: RecordDict, max_bytes: float = math.inf, models: Collection[str] = ()) -> ReceivedOrder:
    """The order in a received record; ``models`` are the node's own models that a server may name.

    Raises :class:`~fedalloy.flower.protocol.header.Malformed` if it is not a message, :class:`Refused` if this node
    does not accept it. The record loses its array, which belongs to the order from now on.
    """
    header = outline(content, max_bytes).header
    check_version(header)
    head = check_header(header, models)
    tensor_message = unpack(content, max_bytes, release=True)
    for part in tensor_message.parts:
        if not part.startswith(_PARTS[head.kind]):
            raise Refused(f"the order has a part '{part:.80}', which does not belong to it")
    return ReceivedOrder(head, tensor_message.parts)


def check_version(header: Mapping[str, Any]) -> None:
    """Refuse an order that another version of fedalloy wrote: its spec could mean something else here."""
    theirs, ours = str(header.get("fedalloy"))[:40], fedalloy.__version__
    if theirs == ours and header.get("format") == FORMAT:
        return
    known = re.fullmatch(r"\d[\w.+]*", theirs)
    advice = f": pip install 'fedalloy[flower]=={theirs}' at the node, then start it again" if known else ""
    raise Refused(
        f"the server runs fedalloy {theirs} (messages of format {header.get('format')!s:.10}), this node "
        f"fedalloy {ours} (format {FORMAT}): install the same version on both{advice}. What the node keeps stays"
    )


def check_header(header: Mapping[str, Any], models: Collection[str] = ()) -> Hello | Work:
    """Check the header of an order against the schema."""
    try:
        return _ORDERS.validate_python(header, context={"models": tuple(models)})
    except ValidationError as error:
        raise Refused(f"the order cannot be understood: {problems(error)}") from None


def check_task(spec: Mapping[str, Any], models: Collection[str] = ()) -> TaskSpec:
    """Check the description of model and data for nodes against the schema; for the server, before it sends it."""
    try:
        return TaskSpec.model_validate(spec, context={"models": tuple(models)})
    except ValidationError as error:
        raise Refused(f"nodes would refuse the task: {problems(error)}") from None


def problems(error: ValidationError) -> str:
    """The first problems as text, without the values that were sent."""
    found = error.errors(include_url=False, include_input=False, include_context=False)[:3]
    return "; ".join(f"{'.'.join(map(str, one['loc']))[:120]}: {_words(str(one['msg']))}" for one in found)


def _words(message: str) -> str:
    return message.removeprefix("Value error, ").replace("Extra inputs are not permitted", "unknown key")[:300]

"""Answers of nodes: checked once against a strict schema before they are used.

:func:`read_reply` is the only function that reads messages from fedalloy's nodes: it returns a frozen :class:`Reply`
or raises a :class:`FedalloyError`. It uses no file and no network, and makes tensors only in ``full``.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fedalloy.core.types import Payload
from fedalloy.flower.protocol.header import LeavesLost, Malformed, Refused, Unwell
from fedalloy.flower.protocol.tensor_messages import TensorMessage, outline, unpack

if TYPE_CHECKING:
    from fedalloy.flower.protocol.tensor_messages import RecordDict

_MOST_STATISTICS, _MOST_SCORES, _MOST_TEXT, _SHOWN = 64, 1_000_000, 100_000, 500


def _number(value: Any) -> float:
    """A number from a header, with null for NaN."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > sys.float_info.max:
        raise ValueError("is not a number")
    return float(value)


Number = Annotated[float, BeforeValidator(_number)]
Text = Annotated[str, Field(max_length=_MOST_TEXT)]
Name = Annotated[str, Field(max_length=200)]


class ReplyHead(BaseModel):
    """The schema of an answer's header."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: int
    fedalloy: Name
    status: Text
    client: Name = ""
    reason: Text = ""
    stats: Annotated[dict[Name, Number], Field(max_length=_MOST_STATISTICS)] | None = None
    scores: Annotated[list[Number], Field(max_length=_MOST_SCORES)] | None = None
    test_size: Annotated[int, Field(ge=0, lt=1 << 53)] | None = None
    cross_score: Annotated[list[Number], Field(max_length=_MOST_SCORES)] | None = None
    lag: Text = ""

    def numbers(self, name: Literal["scores", "cross_score"], count: int) -> list[float]:
        """A list of ``count`` numbers."""
        values: list[float] | None = getattr(self, name)
        if values is None or len(values) != count:
            raise Malformed(f"its '{name}' are not {count} numbers")
        return values


@dataclass(frozen=True)
class Reply:
    """A positive answer: its header, and its parts (without content unless read in ``full``)."""

    head: ReplyHead
    parts: Payload


def read_reply(content: RecordDict, max_bytes: float = math.inf, *, full: bool = False) -> Reply:
    """A node's answer; raises :class:`Refused` if it refused, :class:`Unwell` if it failed, :class:`Malformed` if it is
    not an answer. Tensors are read only in ``full``, once: the record loses them. Otherwise they only have names,
    shapes and dtypes."""
    tensor_message = unpack(content, max_bytes, release=True) if full else outline(content, max_bytes)
    head = _checked(tensor_message)
    if head.status == "refused":
        raise Refused(f"refused: {head.reason:.{_SHOWN}}")
    if head.status == "incomplete":
        raise LeavesLost(f"incomplete: {head.reason:.{_SHOWN}}")
    if head.status != "ok":
        raise Unwell(f"failed: {head.reason:.{_SHOWN}}")
    return Reply(head, tensor_message.parts)


def _checked(tensor_message: TensorMessage) -> ReplyHead:
    try:
        return ReplyHead.model_validate(tensor_message.header)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = str(first["loc"][-1]) if first["loc"] else "header"
        raise Malformed(f"its '{where:.80}' {_words(str(first['msg']))}") from None


def _words(message: str) -> str:
    """Pydantic's message as the end of a sentence."""
    return message.removeprefix("Value error, ").replace("Extra inputs are not permitted", "is an unknown key")

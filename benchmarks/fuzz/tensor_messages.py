"""Messages as cases: the header of a message, the bytes of its tensors, and their Flower records."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.fuzz.mutating import Case

HEADER, TENSORS, FORM = "header.json", "tensors", "form"


def case_of_message(content: Any) -> Case:
    """The case of a message."""
    record = content.config_records["fedalloy"]
    data, form = record.get("tensors", b""), b"bytes"
    if content.array_records:
        data, form = content.array_records["tensors"]["all"].data, b"array"
    return {HEADER: str(record["header"]).encode(), TENSORS: bytes(data), FORM: form}


def content_of(case: Case) -> Any:
    """The message of a case."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    head: dict[str, Any] = {}
    if HEADER in case:
        head["header"] = case[HEADER].decode("utf-8", "replace")
    data = case.get(TENSORS, b"")
    if case.get(FORM) == b"array":
        array = Array("uint8", (len(data),), "fedalloy.raw", data)
        return RecordDict({"fedalloy": ConfigRecord(head), "tensors": ArrayRecord({"all": array})})
    return RecordDict({"fedalloy": ConfigRecord({**head, "tensors": data} if data else head)})


def status_of(content: Any) -> tuple[str, str]:
    """Status and reason of an answer."""
    told = json.loads(str(content.config_records["fedalloy"]["header"]))
    return told["status"], told.get("reason", "")

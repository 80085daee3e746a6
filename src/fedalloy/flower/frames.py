"""Flower's records as bytes between two processes of one node: a JSON line, then the arrays as they are. No pickle."""

from __future__ import annotations

import json
import socket
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

_HEAD_BYTES = 8
_AT_ONCE = 1 << 24


def send_frame(link: socket.socket, said: dict[str, Any], content: RecordDict) -> None:
    """Write plain values and records."""
    arrays = [(part, name, array) for part, record in content.array_records.items() for name, array in record.items()]
    values = [(part, key, value) for part, record in content.config_records.items() for key, value in record.items()]
    strings = [(part, key, value) for part, key, value in values if isinstance(value, bytes)]
    head = {
        "said": said,
        "records": list(content.config_records),
        "config": [entry for entry in values if not isinstance(entry[2], bytes)],
        "bytes": [(part, key, len(value)) for part, key, value in strings],
        "arrays": [(p, name, a.dtype, list(a.shape), a.stype, len(a.data)) for p, name, a in arrays],
    }
    text = json.dumps(head).encode()
    link.sendall(len(text).to_bytes(_HEAD_BYTES, "big") + text)
    for data in (*(value for _, _, value in strings), *(array.data for _, _, array in arrays)):
        if data:  # else the other side may have answered and gone by now
            link.sendall(data)


def receive_frame(link: socket.socket) -> tuple[dict[str, Any], RecordDict]:
    """Read what :func:`send_frame` wrote; ``ConnectionError`` when the other side has gone."""
    head = json.loads(_read(link, int.from_bytes(_read(link, _HEAD_BYTES), "big")))
    values: dict[str, dict[str, Any]] = {part: {} for part in head["records"]}
    for part, key, value in head["config"]:
        values[part][key] = value
    for part, key, size in head["bytes"]:
        values[part][key] = _read(link, size)
    content = RecordDict({part: ConfigRecord(record) for part, record in values.items()})
    records: dict[str, dict[str, Array]] = {}
    for part, name, dtype, shape, stype, size in head["arrays"]:
        array = Array(dtype=dtype, shape=tuple(shape), stype=stype, data=_read(link, size))
        records.setdefault(part, {})[name] = array
    for part, record in records.items():
        content[part] = ArrayRecord(record)
    return head["said"], content


def _read(link: socket.socket, size: int) -> bytes:
    """So many bytes; memory is asked for as they come, not as they are announced."""
    found = bytearray()
    while len(found) < size:
        came = link.recv(min(size - len(found), _AT_ONCE))
        if not came:
            raise ConnectionError("the other process has gone")
        found += came
    return bytes(found)

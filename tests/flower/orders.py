"""Orders as a server sends them, to be changed by tests: one of every kind, taken from a federation in one process."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flwr.app import RecordDict

from fedalloy.core.types import Payload
from fedalloy.flower.config import NodeConfig
from fedalloy.flower.node.answer import respond
from fedalloy.flower.protocol.tensor_messages import TensorMessage, pack, unpack
from tests.flower import fake

Example = tuple[dict[str, Any], Payload]
KINDS = ("hello", "train", "evaluate", "cross")


@functools.cache
def _examples() -> dict[str, Example]:
    found: dict[str, Example] = {}

    def watched(content: RecordDict, config: dict[str, Any], *rest: Any) -> RecordDict:
        message = unpack(content)
        found.setdefault(message.header["kind"], (message.header, message.parts))
        return respond(content, config, *rest)

    with tempfile.TemporaryDirectory() as folder, patch.object(fake, "respond", watched):
        recipe = fake.recipe_file(Path(folder), "fedboosting", run={"rounds": 1}, evaluate={"every": 1})
        fake.play(recipe, Path(folder) / "run", fake.federation(Path(folder)))
    return found


def example(kind: str = "train") -> Example:
    """A header that may be changed, and its parts."""
    header, parts = _examples()[kind]
    return copy.deepcopy(header), dict(parts)


def node_keys(place: Path, data: str = "recipe", client: str = "0", policy: str = "") -> dict[str, Any]:
    """A node's configuration, with a policy of its own where one is given."""
    file = place / "policy.toml"
    place.mkdir(parents=True, exist_ok=True)
    file.write_text(policy)
    return NodeConfig(client, data, place / "store", file).to_keys()


def answered(header: dict[str, Any], parts: Payload, keys: dict[str, Any]) -> tuple[str, str]:
    """Status and reason of a node's answer."""
    return said(respond(pack(TensorMessage(header, parts)), keys))


def said(content: RecordDict) -> tuple[str, str]:
    told = json.loads(str(content.config_records["fedalloy"]["header"]))
    return told["status"], told.get("reason", "")

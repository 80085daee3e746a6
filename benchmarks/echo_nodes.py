"""Nodes without torch that answer every order with a fixed update: many of them in one process, to load a server.

``python -m benchmarks.echo_nodes ADDRESS CA KEY...``: a node for every private key, whose client has the number of its
place; each is a thread. They connect to the server as Flower's node does, and poll it as often.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects, push_objects
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_connection import http_request_response

from fedalloy.flower.prefork.polling import Backoff
from fedalloy.flower.protocol.header import PARTS, plain_record, read_header, signed

# Flower lets only the process of an app make messages: let this one be such a process.
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


def answer(content: RecordDict, client: str, updates: dict[int, bytes]) -> RecordDict:
    """The reply to an order: an update that is made once, of the names and shapes of the received model."""
    head = read_header(content)
    if head["kind"] == "hello":
        return plain_record(signed(status="ok", client=client))
    leaves = head[PARTS]["shared/params"]
    if not updates:
        draw = np.random.default_rng(int(client))
        updates[0] = b"".join(_padded(1e-4 * draw.standard_normal(shape, dtype=np.float32)) for _, _, shape in leaves)
    data = updates[0]
    stats = {"num_examples": 100.0, "num_steps": 1.0, "train_loss": 1.0}
    reply = {**signed(status="ok", client=client, stats=stats), PARTS: {"delta": leaves}}
    if len(data) <= 1 << 18:
        return plain_record(reply, {"tensors": data})
    record = plain_record(reply)
    record["tensors"] = ArrayRecord({"all": Array("uint8", (len(data),), "fedalloy.raw", data)})
    return record


def _padded(leaf: np.ndarray) -> bytes:
    """A tensor as messages hold it: tensors begin at multiples of eight bytes."""
    data = leaf.astype(np.float32).tobytes()
    return data + bytes(-len(data) % 8)


def serve(address: str, authority: bytes, key: Path, client: str) -> None:
    """One node, until the process ends."""
    private: Any = load_ssh_private_key(key.read_bytes(), password=None)
    updates: dict[int, bytes] = {}
    pause = Backoff(0.3, 3.0)
    keys = (private, private.public_key())
    with http_request_response(address, False, authority, keys) as (number, receive, send, _, _, pull, push, confirm):
        while True:
            got = receive()
            if got is None:
                pause.sleep(3.0)
                continue
            pause.work()
            order = _pulled(got, pull, confirm)
            reply = Message(answer(order.content, client, updates), reply_to=order)
            reply.metadata.__dict__["_src_node_id"] = number
            _pushed(reply, order.metadata.run_id, send, push)


def _pulled(got: Any, pull: Any, confirm: Any) -> Message:
    message, tree = got
    run, known = message.metadata.run_id, message.metadata.message_id
    contents = pull_objects([one.object_id for one in iterate_object_tree(tree)], lambda wanted: pull(run, wanted))
    confirm(run, known)
    found: Any = inflate_object_from_contents(known, contents)
    found.metadata.__dict__["_message_id"] = known
    return found  # type: ignore[no-any-return]


def _pushed(reply: Message, run: int, send: Any, push: Any) -> None:
    with no_object_id_recompute():
        reply.metadata.__dict__["_message_id"] = reply.object_id
        objects, tree = get_all_nested_objects(reply), get_object_tree(reply)
        wanted, session = send(reply, tree, 0.0)
        push_objects(objects, lambda known, content: push(run, session, known, content), object_ids_to_push=wanted)


def main() -> None:
    """A thread for every key."""
    address, authority = sys.argv[1], Path(sys.argv[2]).read_bytes()
    threads = [
        threading.Thread(target=serve, args=(address, authority, Path(key), str(client)))
        for client, key in enumerate(sys.argv[3:])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()

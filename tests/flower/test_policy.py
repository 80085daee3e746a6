"""A node's policy: what it bounds and what it requires, whatever the order says."""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("flwr")

from fedalloy.core.errors import SpecError
from fedalloy.flower.node.answer import respond
from fedalloy.flower.node.limits import check_size
from fedalloy.flower.node.policy import Policy
from fedalloy.flower.protocol.header import Refused
from fedalloy.flower.protocol.tensor_messages import TensorMessage, pack, unpack
from fedalloy.tasks.assembly import as_factory
from tests.flower.orders import Example, answered, example, node_keys

pytestmark = pytest.mark.flower
CLIPPED = [{"kind": "clip", "norm": 0.5}]
NOISY = [*CLIPPED, {"kind": "noise", "std": 0.2}]


def order(wire: list[dict[str, Any]]) -> Example:
    header, parts = example()
    header["algorithm"] |= {"solver": {"kind": "sgd"}, "wire": wire, "requires": ["num_examples"]}
    return header, parts


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("max_parameters = 649", "more parameters than the policy of this node allows (649)"),
        ("max_steps = 2", "local steps, the policy of this node allows 2"),
        ("max_examples = 10", "more examples than the policy of this node allows"),
        ("min_examples = 100000", "fewer training examples"),
        ("max_memory_megabytes = 0.01", "the policy of this node allows"),
        ("max_megabytes = 0.001", "the limit is 0.001 MB"),
    ],
)
def test_a_policy_bounds_what_an_order_may_cost(policy, reason, tmp_path):
    status, said = answered(*order([]), node_keys(tmp_path, policy=policy))
    assert (status, reason in said) == ("refused", True), said


def test_data_of_more_clients_than_examples_are_allowed_are_not_made(tmp_path):
    header, parts = order([])
    header["task"]["trial"]["dataset"] = {"kind": "synthetic", "devices": 1 << 62}
    with patch("fedalloy.flower.node.data.as_dataset", side_effect=AssertionError("they were made")):
        status, said = answered(header, parts, node_keys(tmp_path))
    assert (status, "the policy of this node allows 10000000 examples" in said) == ("refused", True), said


def test_the_bounds_are_exact(tmp_path):
    assert answered(*order([]), node_keys(tmp_path, policy="max_parameters = 650"))[0] == "ok"


@pytest.mark.parametrize(
    ("policy", "wire", "reason"),
    [
        ("require_clip = 0.5", [], "requires clipping to at most 0.5 of every part that it sends, and 'delta'"),
        ("require_clip = 0.4", CLIPPED, "requires clipping to at most 0.4"),
        ("require_clip = 0.5", CLIPPED, ""),
        ("require_clip = 0.5", NOISY, ""),
        ("require_clip = 0.5", [*CLIPPED, {"kind": "topk", "ratio": 0.5}], "requires clipping"),
        ("require_clip = 0.5\nrequire_noise = 0.2", CLIPPED, "requires noise of at least 0.2"),
        ("require_clip = 0.5\nrequire_noise = 0.3", NOISY, "requires noise of at least 0.3"),
        ("require_clip = 0.5\nrequire_noise = 0.2", NOISY, ""),
    ],
)
def test_a_policy_can_require_clipping_and_noise(policy, wire, reason, tmp_path):
    status, said = answered(*order(wire), node_keys(tmp_path, policy=policy))
    assert status == ("refused" if reason else "ok"), said
    assert reason in said


def test_a_part_that_no_wire_protects_is_not_sent(tmp_path):
    header, parts = order(CLIPPED)
    header["algorithm"]["solver"] = {"kind": "scaffold"}
    status, said = answered(
        header, {**parts, "shared/control": parts["shared/params"]}, node_keys(tmp_path, policy="require_clip = 0.5")
    )
    assert status == "refused"
    assert "'control' would be sent without it" in said


@pytest.mark.parametrize("shape", [(), (1, 10), (1000, 10)])
def test_noise_that_a_server_could_take_off_again_is_not_the_noise_required(shape, tmp_path):
    """One number for all entries of a leaf, or a thousand copies of it to take the mean of."""
    header, parts = order([*CLIPPED, {"kind": "noise", "std": 0.2, "like": "form"}])
    parts["shared/form"] = {**parts["shared/params"], "output.bias": torch.zeros(shape)}
    keys = node_keys(tmp_path, policy="require_clip = 0.5\nrequire_noise = 0.2")
    status, said = answered(header, parts, keys)
    assert (status, "noise of at least 0.2" in said) == ("refused", True), said


def test_required_noise_is_drawn_by_the_node_and_not_by_the_servers_key(tmp_path):
    def sent(policy: str, folder: str) -> torch.Tensor:
        keys = node_keys(tmp_path / folder, policy=policy)
        reply = unpack(respond(pack(TensorMessage(*order(NOISY))), keys))
        return reply.parts["delta"]["output.bias"]

    assert torch.equal(sent("", "a"), sent("", "b")), "the same order, the same noise: the server can take it away"
    required = "require_clip = 0.5\nrequire_noise = 0.2"
    assert not torch.equal(sent(required, "c"), sent(required, "d"))


def test_a_policy_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="max_steps must be 0 or more"):
        Policy(max_steps=-1)
    with pytest.raises(ValueError, match="require_noise needs require_clip"):
        Policy(require_noise=0.1)


def test_memory_beyond_the_limit_is_an_error_and_not_the_end_of_the_machine():
    """In a process of its own, since it matters what a process has had before."""
    program = (
        "import resource, torch\n"
        "from fedalloy.flower.node.limits import bounded_memory\n"
        "before = resource.getrlimit(resource.RLIMIT_DATA)\n"
        "try:\n"
        "    with bounded_memory(50, 'cpu'):\n"
        "        torch.empty(30_000_000)\n"
        "except RuntimeError as error:\n"
        "    assert 'allocate memory' in str(error)\n"
        "else:\n"
        "    raise AssertionError('120 MB were had where 50 are allowed')\n"
        "assert resource.getrlimit(resource.RLIMIT_DATA) == before\n"
        "assert len(torch.empty(30_000_000)) == 30_000_000\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["mlp", "char_lstm", "cnn", "resnet20"])
def test_a_model_is_measured_without_memory_and_without_drawing(kind):
    shape = (80,) if kind == "char_lstm" else (3, 32, 32)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    factory = as_factory(kind, shape, 10)
    count = sum(one.numel() for one in factory().parameters())
    torch.manual_seed(0)
    check_size(factory, count)
    with pytest.raises(Refused, match="more parameters"):
        check_size(factory, count - 1)
    assert torch.equal(torch.rand(1), expected)
    check_size(lambda: torch.nn.Linear(3, 1), 4, own=True)


def test_every_built_in_model_can_be_measured():
    from fedalloy.core import registry

    shapes = {
        "char_lstm": (80,),
        "sent140_lstm": (25,),
        "text_pair": (2, 48),
        "keyword_cnn": (1, 49, 40),
        "lenet": (3, 32, 32),
    }
    for name in registry.names("model"):
        if registry.find("model", name).__module__.startswith("fedalloy."):
            bounds = (0.0, 1.0)
            check_size(as_factory(name, shapes.get(name, (3, 64, 64)), 10, bounds), 10**9)


def test_unknown_keys_of_a_policy_are_named(tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text("max_step = 3")
    with pytest.raises(SpecError, match="did you mean 'max_steps'"):
        Policy.read(file)

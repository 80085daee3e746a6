"""What a server can make a node do: nothing but what the schema, the node's configuration and its policy allow."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, RecordDict

from fedalloy import algorithms
from fedalloy.core import registry
from fedalloy.core.errors import FedalloyError
from fedalloy.flower.node.answer import half_of
from fedalloy.flower.payloads import told_algorithm, without_infinities
from fedalloy.flower.protocol.orders import AlgorithmSpec, RuleSpec, read_order
from fedalloy.flower.protocol.replies import read_reply
from tests.flower import shares
from tests.flower.orders import KINDS, answered, example, node_keys

pytestmark = pytest.mark.flower


@pytest.mark.parametrize("kind", KINDS)
def test_the_orders_of_an_honest_server_are_carried_out(kind, tmp_path):
    header, parts = example(kind)
    assert answered(header, parts, node_keys(tmp_path, client=header.get("client", "0"))) == ("ok", "")


class TestAttacks:
    """Each of these ran a command or imported a module on the node."""

    @pytest.fixture
    def mark(self, tmp_path: Path) -> Path:
        return tmp_path / "mark"

    @pytest.mark.parametrize("source", ["folder", "tests.flower.hostile:data", "recipe"])
    def test_a_model_given_as_pairs_runs_no_command(self, source, mark, tmp_path):
        if source == "folder":
            source = str(tmp_path / "data")
            shares.write_share(tmp_path / "data", 0)
        header, parts = example()
        header["task"]["model"] = [["kind", "subprocess:Popen"], ["args", ["touch", str(mark)]]]
        self.refused(header, parts, node_keys(tmp_path, source), mark)

    @pytest.mark.parametrize("name", ["model", "classifier"])
    @pytest.mark.parametrize("form", [dict, list])
    def test_a_recipe_runs_no_command(self, name, form, mark, tmp_path):
        header, parts = example()
        command = {"kind": "subprocess:Popen", "args": ["touch", str(mark)]}
        header["task"]["recipe"] = self.recipe()
        header["task"]["recipe"]["task"][name] = form(command.items()) if form is list else command
        self.refused(header, parts, node_keys(tmp_path), mark)

    def test_a_recipe_imports_nothing(self, mark, tmp_path, monkeypatch):
        (tmp_path / "planted_by_a_server.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
        monkeypatch.syspath_prepend(tmp_path)
        header, parts = example()
        header["task"]["recipe"] = {**self.recipe(), "imports": ["planted_by_a_server"]}
        self.refused(header, parts, node_keys(tmp_path), mark)
        assert "planted_by_a_server" not in sys.modules

    def test_a_recipe_reads_no_file(self, mark, tmp_path):
        import numpy as np

        np.savez(tmp_path / "secret.npz", x=np.zeros((4, 64), dtype=np.float32), y=np.zeros(4, dtype=np.int64))
        header, parts = example()
        header["task"]["recipe"] = self.recipe()
        header["task"]["recipe"]["task"]["synthetic"] = str(tmp_path / "secret.npz")
        self.refused(header, parts, node_keys(tmp_path), mark)

    @staticmethod
    def recipe() -> dict[str, Any]:
        """A whole recipe, as servers used to send it."""
        return {
            "task": {"dataset": "digits", "model": "logistic", "valid_fraction": 0.1},
            "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 3},
            "run": {"seeds": [7]},
        }

    @staticmethod
    def refused(header: dict[str, Any], parts: Any, keys: dict[str, Any], mark: Path) -> None:
        status, reason = answered(header, parts, keys)
        assert not mark.exists(), "the node did what the server wanted"
        assert status == "refused", reason


def put(header: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The header with another value at a dotted place."""
    *way, last = path.split(".")
    place = header
    for step in way:
        place = place[step]
    place[last] = value
    return header


HUGE = 10**30
WRONG: dict[str, list[Any]] = {
    "run": ["../../etc", "", "A" * 32, None, 7],
    "sitting": [-1, HUGE, "1", True],
    "serial": [-1, HUGE, 1.5],
    "seed": [HUGE, "0", None],
    "population": [0, -1, HUGE, 10**7],
    "id": [-1, 3, HUGE, "0"],
    "client": ["", 0, "x" * 1000, None],
    "round": [-1, HUGE, "1"],
    "rounds": [-1, HUGE],
    "state": [-1, HUGE, None],
    "epochs": [-2, 10**7, HUGE, 1.5, True],
    "active": [1, "yes"],
    "key": [HUGE, 1.0],
    "local_lr": ["0.1", None],
    "on_lag": ["panic"],
    "kind": ["exec", "Train", None, ["train"]],
    "more": [1],
    "task": [None, [], "digits"],
    "task.shape": [[0], [-1], [HUGE], [1] * 9, [1.5], ["a"], 64, [1 << 30, 1 << 30]],
    "task.classes": [-1, HUGE, True],
    "task.bounds": [[1], [0, 1, 2], ["a", "b"]],
    "task.model": [
        "subprocess:Popen", "os.path:join", "../x", "x" * 100, 5, [], {}, {"kind": None}, {"kind": ["logistic"]},
        {"kind": "mlp", "activation": "/etc/passwd"}, {"kind": "mlp", "activation": "x.pt"},
        {"kind": "mlp", "hidden": [[[[[[[[1]]]]]]]]}, {"kind": "mlp", "hidden": [1] * 200_000},
        {"kind": "mlp", "x y": 1}, {"kind": "mlp", "__class__.x": 1},
    ],
    "task.loss": ["os:system", 5],
    "task.dtype": ["float16", "object"],
    "task.trainable": [[], "*", ["x" * 300], ["*"] * 1000, ["a/b"], [1]],
    "task.standardise": ["everything"],
    "task.test_fraction": [-0.1, 1.0, "0"],
    "task.valid_fraction": [0.9],
    "task.recipe": [{}, {"imports": ["os"]}],
    "task.imports": [["os"]],
    "task.synthetic": ["/etc/passwd"],
    "task.trial.dataset": ["../x", [["kind", "digits"]], {"kind": "folder", "path": "/etc"}, None],
    "task.trial.partition": ["os:system", 5, [["kind", "iid"]]],
    "task.trial.clients": [0, HUGE],
    "task.trial.newcomers": [-1],
    "task.trial.noise": [{"kind": "evil", "ratio": 1.0}, "pair"],
    "task.trial.imports": [["os"]],
    "algorithm": [None, "fedavg"],
    "algorithm.solver": [[["kind", "sgd"]], "os:system", {"kind": "sgd", "lr": {"a": {"b": "c/d"}}}, None],
    "algorithm.wire": ["clip", ["clip"] * 17, [[["kind", "clip"]]], ["os:system"]],
    "algorithm.weighting": ["os:system", {"kind": "ewwa", "scratch": "/etc"}],
    "algorithm.requires": ["loss_before", ["a:b"], ["x"] * 100],
    "algorithm.server": [{"kind": "sgd"}],
}  # fmt: skip


@pytest.mark.parametrize("path", WRONG)
def test_what_the_schema_does_not_allow_is_refused(path, tmp_path):
    keys = node_keys(tmp_path)
    for value in WRONG[path]:
        header, parts = example()
        status, reason = answered(put(header, path, value), parts, keys)
        assert status == "refused", (value, status, reason)
        assert len(reason) < 1200, "a refusal does not repeat what was sent"
    assert not (tmp_path / "store").exists(), "nothing is written for an order that is refused"


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("metrics", ["accuracy", "os:system"], "metrics.1"),
        ("metrics", ["accuracy"] * 65, "at most 64"),
        ("metrics", ["acuracy"], "did you mean 'accuracy'"),
        ("models", ["global", "both"], "models.1"),
        ("models", [2.0], "models.0"),
    ],
)
def test_an_evaluation_names_registered_metrics_and_known_models(path, value, reason, tmp_path):
    header, parts = example("evaluate")
    status, said = answered(put(header, path, value), parts, node_keys(tmp_path, client=header["client"]))
    assert status == "refused"
    assert reason in said


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("task.model", "no_such_model", "unknown model 'no_such_model'"),
        ("task.model", {"kind": "mlp", "wdth": 3}, "no argument 'wdth'|unknown argument 'wdth'"),
        ("task.model", {"kind": "mlp", "hidden": [1 << 40]}, "more parameters than the policy"),
        ("task.model", {"kind": "mlp", "hidden": [70_000, 70_000]}, "more parameters than the policy"),
        ("task.model", {"kind": "char_lstm", "layers": 10**9}, "more parameters than the policy|cannot be understood"),
        ("task.trial.dataset", {"kind": "folder", "path": "x"}, "only a node itself may name"),
        ("task.trial.dataset", {"kind": "callable", "function": "x"}, "only a node itself may name"),
        ("task.trial.dataset", {"kind": "nodes", "shape": [1]}, "only a node itself may name"),
        ("task.trial.dataset", "no_such_data", "unknown dataset"),
        ("task.trial.dataset", "synthetic", "the data are of shape"),
        ("task.trial", None, "set 'fedalloy-data'"),
        ("algorithm.solver", "no_such_solver", "unknown solver"),
        ("algorithm.solver", {"kind": "sgd", "epochs": -1}, "epochs must be 0 or more"),
        ("algorithm.requires", ["shoe_size"], "do not exist here"),
        ("epochs", 1_000_000, "local steps, the policy of this node allows 1000000"),
        ("algorithm.solver", {"kind": "sgd", "epochs": 10**12}, "local steps"),
        ("algorithm.solver", {"kind": "ditto", "personal_epochs": 10**12}, "local steps"),
        ("algorithm.solver", {"kind": "pfedme", "inner": 10**12}, "local steps"),
        ("algorithm.solver", {"kind": "personal", "solver": {"kind": "sgd", "epochs": 10**12}}, "local steps"),
    ],
)
def test_what_the_node_does_not_have_or_its_policy_does_not_allow_is_refused(path, value, reason, tmp_path):
    header, parts = example()
    put(header, "algorithm.requires", ["num_examples"])
    status, said = answered(put(header, path, value), parts, node_keys(tmp_path))
    assert re.search(reason, said), said
    assert status == "refused"


def test_a_server_may_name_a_model_of_the_nodes_own_policy_and_no_other(tmp_path):
    header, parts = example()
    put(header, "task.model", "fedalloy.tasks.models.linear:logistic")
    assert answered(header, parts, node_keys(tmp_path))[0] == "refused"
    keys = node_keys(tmp_path, policy='models = ["fedalloy.tasks.models.linear:logistic"]')
    assert answered(header, parts, keys) == ("ok", "")


def test_the_text_of_an_error_in_the_operators_own_model_stays_at_the_node(tmp_path, monkeypatch):
    (tmp_path / "own_net.py").write_text("def net():\n    raise ValueError('Jane Doe')\n")
    monkeypatch.syspath_prepend(tmp_path)
    header, parts = example()
    keys = node_keys(tmp_path, policy='models = ["own_net:net"]')
    status, reason = answered(put(header, "task.model", "own_net:net"), parts, keys)
    assert status in ("refused", "failed")
    assert "Jane" not in reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"kind": "hello", "kind": "train"}', "has the name 'kind' twice"),
        ('{"a": NaN}', "holds NaN"),
        ('{"a": -Infinity}', "holds -Infinity"),
        ('{"a": 1e999}', "too large"),
        ('{"a": ' + "9" * 100_000 + "}", "a number of 100000 digits"),
        ('{"a": ' + "9" * 5_000 + ".0}", "too large"),
        ('{"a\\ud800": 1}', "invalid Unicode"),
        ('{"a": ["\\uDC00"]}', "invalid Unicode"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON"),
        ('{"a": ' + "[" * 40 + "]" * 40 + "}", "more than 32 levels"),
        ("[]", "not an object"),
        ("", "not JSON"),
        ('{"parts": []}', "does not list its parts"),
        ('{"parts": {"x": [["w", "float32", [1]]]}}', "need 8"),
        ('{"parts": {"x": [["w", "float64", [72057594037927936]]]}}', "their shapes and dtypes need"),
        ('{"parts": {"x": [["w", "float64", [1152921504606846976]]]}}', "no valid shape"),
        ('{"parts": {"x": [' + ", ".join(f'["{n}", "int8", [0]]' for n in range(10_001)) + "]}}", "10000 tensors"),
        ('{"parts": {}, "format": [1]}', "install the same version"),
        (" " * (5 << 20), "no fedalloy header"),
    ],
)
@pytest.mark.parametrize("read", [read_order, read_reply])
def test_headers_that_are_none_are_refused_on_both_sides(read, text, reason):
    content = RecordDict({"fedalloy": ConfigRecord({"header": text})})
    with pytest.raises(FedalloyError) as caught:
        read(content)
    if read is read_order or "version" not in reason:
        assert reason in str(caught.value)
    assert len(str(caught.value)) < 500


def test_tensors_that_do_not_belong_to_an_order_are_refused(tmp_path):
    header, parts = example()
    status, reason = answered(header, {**parts, "state/solver": parts["shared/params"]}, node_keys(tmp_path))
    assert (status, "which does not belong to it" in reason) == ("refused", True)


@pytest.mark.parametrize("category", ["solver", "wire", "model", "dataset", "partition", "metric"])
def test_every_registered_rule_can_be_named_by_a_server(category):
    assert registry.names(category)
    for name in registry.names(category):
        assert RuleSpec.model_validate(name).kind == name


def test_infinities_of_a_rule_travel_as_words():
    rule = {"kind": "energy", "low": "-inf", "nested": [{"high": "inf"}]}
    assert RuleSpec.model_validate(rule).to_spec() == {
        "kind": "energy", "low": -math.inf, "nested": [{"high": math.inf}],
    }  # fmt: skip
    assert without_infinities({"low": -math.inf, "nested": [math.inf, 1.0]}) == {"low": "-inf", "nested": ["inf", 1.0]}


def test_every_method_can_be_told_to_a_node():
    for name in registry.names("algorithm"):
        try:
            algorithm = algorithms.named(name)
        except FedalloyError:
            continue  # it needs a table that was learned before
        told = json.loads(json.dumps(told_algorithm(algorithm), allow_nan=False))
        half = half_of(AlgorithmSpec.model_validate(told))
        assert (half.solver, half.wire) == (algorithm.solver, algorithm.wire)
        assert half.weighting.requires == set(told["requires"]) <= algorithm.weighting.requires


class TestTensors:
    """What is computed with is the model that the order names, and nothing else."""

    @pytest.mark.parametrize("kind", ["train", "evaluate", "cross"])
    def test_a_missing_or_foreign_part_is_refused(self, kind, tmp_path):
        header, parts = example(kind)
        for number, changed in enumerate(
            (
                {name: leaves for name, leaves in parts.items() if name != "shared/params"},
                {name: leaves for name, leaves in parts.items() if name != "shared/buffers"},
                {**parts, "shared/params": {name: leaf[:1] for name, leaf in parts["shared/params"].items()}},
                {**parts, "shared/params": {name: leaf.double() for name, leaf in parts["shared/params"].items()}},
                {**parts, "shared/buffers": dict(parts["shared/params"])},
            )
        ):
            status, reason = answered(header, changed, node_keys(tmp_path / str(number)))
            assert status == "refused", reason
            assert re.search("has no part|not those of the model|the model's is", reason)

    def test_models_of_others_must_be_models(self, tmp_path):
        header, parts = example("cross")
        changed = {**parts, "cohort/delta": {name: leaf[..., :1] for name, leaf in parts["cohort/delta"].items()}}
        assert answered(header, changed, node_keys(tmp_path / "a"))[0] == "refused"
        del changed["cohort/delta"]
        assert answered(header, changed, node_keys(tmp_path / "b"))[0] == "refused"

"""Every model of the zoo runs as it is, and all engines agree; faults that are planted are reported."""

from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("transformers", reason="needs the extra 'huggingface'")
pytest.importorskip("peft", reason="needs the extra 'huggingface'")

from examples.zoo.__main__ import Row, main, row_of
from fedalloy.tasks import keyed

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing"),
    pytest.mark.filterwarnings("ignore:.*nested tensors"),
]


@pytest.fixture(autouse=True)
def as_before():
    """The program disables vmap's slow path, and uses one thread."""
    functorch: Any = torch._C._functorch
    threads = torch.get_num_threads()
    yield
    functorch._set_vmap_fallback_enabled(True)
    torch.set_num_threads(threads)


def test_every_model_of_the_zoo_runs_as_it_is(capsys):
    assert main() == 0, capsys.readouterr().out


def test_a_dropout_that_is_not_keyed_would_be_seen(monkeypatch):
    monkeypatch.delitem(keyed.ANSWERS, functional.dropout)
    with pytest.warns(RuntimeWarning, match="cannot be batched"):
        row = row_of("MLP")
    assert any("ran by loop" in problem for problem in row.problems)


def test_a_difference_is_a_problem():
    good: dict[str, Any] = {"kernel": "vmap", "bytes_up": 1, "leaves": ("a",), "expected": ("a",), "seconds": 1.0}
    assert not Row("BERT", **good, batched=1e-10, workers=0.0, logits=1e-7).problems
    assert len(Row("BERT", **good, batched=1e-8, workers=torch.nan, logits=1e-5).problems) == 3
    assert Row("BERT", **{**good, "expected": ("a", "b")}, batched=0.0, workers=0.0, logits=0.0).problems

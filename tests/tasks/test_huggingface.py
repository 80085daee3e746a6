"""A PEFT model as it is: its adapters are exchanged, and what is saved is read without fedalloy."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

pytest.importorskip("transformers", reason="needs the extra 'huggingface'")
pytest.importorskip("peft", reason="needs the extra 'huggingface'")

import fedalloy
from examples.zoo import data
from examples.zoo.models import bert, gpt2, lora, with_adapters
from fedalloy.core.errors import FedalloyError
from fedalloy.core.keys import Key
from fedalloy.core.tree import layers
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.evaluation import evaluate_clients
from fedalloy.tasks.federation import FederatedTask
from fedalloy.tasks.pure_module import PureModule

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")

READ = """
import json, sys
import torch
from peft import PeftModel
from transformers import BertForSequenceClassification

base, *adapters = sys.argv[1:]
x = {name: torch.tensor(rows) for name, rows in json.load(sys.stdin).items()}
for adapter in adapters:
    model = PeftModel.from_pretrained(BertForSequenceClassification.from_pretrained(base), adapter).eval()
    print(json.dumps(model(**x).logits.tolist()))
assert not any(name.startswith("fedalloy") for name in sys.modules)
"""


def test_adapters_are_exchanged_and_the_saved_model_is_read_by_peft_alone(tmp_path):
    base: Any = bert()
    base.save_pretrained(tmp_path / "base")
    pretrained = with_adapters(base)
    before: Any = {name: leaf.clone() for name, leaf in pretrained.state_dict().items()}
    task = make_task(data.sentences(), model=pretrained, test_fraction=0.0)
    result = fedalloy.fit(fedalloy.algorithms.ditto(lr=0.5, batch_size=4), task, rounds=2)
    assert all("lora_" in name or "modules_to_save" in name for name in result.model)
    assert len(layers({name: leaf for name, leaf in result.model.items() if "lora_" in name})) == 2
    assert all(torch.equal(leaf, before[name]) for name, leaf in pretrained.state_dict().items())
    result.save_pretrained(tmp_path / "server")
    result.save_pretrained(tmp_path / "client", client=1)
    expected = [result.module()(**task.train.x).logits, result.module(client=1)(**task.train.x).logits]
    assert (expected[0] - expected[1]).abs().max() > 1e-4, "the client has a model of its own"
    found = _read_elsewhere(task.train.x, *(str(tmp_path / name) for name in ("base", "server", "client")))
    for mine, theirs in zip(expected, found, strict=True):
        torch.testing.assert_close(torch.tensor(theirs), mine, rtol=0, atol=1e-6)
    own = task.objective.outputs(result.model, {}, task.train.x)
    torch.testing.assert_close(own, expected[0], rtol=0, atol=1e-6)


def _read_elsewhere(x: Any, *folders: str) -> list[Any]:
    told = json.dumps({name: rows.tolist() for name, rows in x.items()})
    done = subprocess.run(
        [sys.executable, "-c", READ, *folders], input=told, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_only_one_matrix_can_be_trained():
    task = fedalloy.task(data.sentences(), model=lora, trainable=("*lora_B*",))
    assert all("lora_B" in name for name in task.objective.forms["params"])
    assert any("lora_A" in name for name in task.objective.frozen)


def test_an_attention_that_differs_is_not_replaced(monkeypatch):
    """The model then keeps its own, after one warning."""
    monkeypatch.setattr(PureModule, "_agree", lambda *_: False)
    with pytest.warns(RuntimeWarning, match="keeps its own"):
        task = fedalloy.task(data.sentences(), model=bert)
    structure: Any = task.objective.structure
    assert structure.config._attn_implementation == "sdpa"
    own: Any = bert()
    assert own.config._attn_implementation == "sdpa", "the user's model is not changed"


@pytest.mark.parametrize("own", ["model", "next_token"])
def test_the_models_own_loss_is_that_by_name_and_padding_never_enters_it(own):
    """One client has a sequence in which nothing counts: alone in its batch, it is no step."""
    examples = data.next_tokens()
    examples.y[-1] = data.IGNORED
    task = fedalloy.task(examples, model=gpt2, loss=own, kind="tokens", test_fraction=0.0)
    made = {
        engine: fedalloy.fit(fedalloy.algorithms.fedavg(lr=0.1, batch_size=3), task, rounds=1, engine=engine).model
        for engine in ("loop", "batched", "workers")
    }
    assert task.objective.needs_full_batches == (own == "model")
    block = task.data("train", torch.arange(3))
    found = evaluate_clients(task.objective, *task.objective.init(Key.of(0)), block, ("perplexity",))
    assert found["perplexity"].tolist() == pytest.approx(_perplexities(task), rel=1e-5)
    for engine in ("batched", "workers"):
        torch.testing.assert_close(made[engine], made["loop"], rtol=1e-5, atol=1e-7)
    named = fedalloy.task(examples, model=gpt2, loss="next_token", kind="tokens", test_fraction=0.0)
    expected = fedalloy.fit(fedalloy.algorithms.fedavg(lr=0.1, batch_size=3), named, rounds=1, engine="loop")
    torch.testing.assert_close(made["loop"], expected.model, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def _perplexities(task: Any) -> list[float]:
    """Every client's, from the outputs of the model: that at one token belongs to the next one."""
    module, found = task.objective.module(*task.objective.init(Key.of(0))), []
    for client in range(3):
        some = task.data("train", torch.tensor([client])).client(0)
        logits = module(**some.x).logits[:, :-1]
        found.append(float(functional.cross_entropy(logits.flatten(0, 1), some.y[:, 1:].flatten()).exp()))
    return found


class Scored(nn.Module):
    """A model that computes binary cross-entropy itself, whatever the targets are, as BERT does for several."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(4, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.output(x)
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": functional.binary_cross_entropy_with_logits(logits, labels)}


def test_the_models_own_loss_of_several_labels_is_scored_by_itself():
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    task = fedalloy.task(Dataset(x, (x[:, :2] > 0).double(), 0), Scored, clients=2, loss="model", kind="multilabel")
    result = fedalloy.fit("fedavg", task, rounds=1)
    assert isinstance(task, FederatedTask)
    own = task.data("test", torch.tensor([0])).client(0)
    wanted = functional.binary_cross_entropy_with_logits(result.module()(own.x)["logits"].detach(), own.y)
    assert list(result.clients())[-1]["loss"][0] == pytest.approx(float(wanted), abs=1e-6)


def test_a_models_own_loss_that_differs_from_its_score_is_told():
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    with pytest.warns(RuntimeWarning, match="by which it is scored"):
        fedalloy.task(Dataset(x, x[:, :2], 0), Scored, clients=2, loss="model", kind="regression")


def test_a_model_without_a_loss_is_told_so():
    task = fedalloy.task("digits", model="logistic", loss="model", clients=2)
    with pytest.raises(FedalloyError, match="unexpected keyword argument 'labels'"):
        fedalloy.fit("fedavg", task, rounds=1)


def test_rows_that_see_padding_only_are_no_reason_to_keep_another_attention(recwarn):
    """A sliding window over padding, in float64: such a row was NaN, and Mistral kept its own attention."""
    from transformers import MistralConfig, MistralForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = MistralConfig(
        vocab_size=data.WORDS, num_key_value_heads=1, num_labels=data.CLASSES, pad_token_id=0, sliding_window=2, **sizes
    )
    task = make_task(data.sentences(), MistralForSequenceClassification(config), test_fraction=0.0, dtype="float64")
    assert not [one for one in recwarn if "keeps its own" in str(one.message)]
    assert bool(task.objective.outputs(*task.objective.init(Key.of(0)), task.train.x).isfinite().all())

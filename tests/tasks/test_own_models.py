"""What of a user's model is trained and exchanged, what it may take and return, and where it starts."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedalloy
from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.tree import layers
from fedalloy.results.outcome import read_outcome
from fedalloy.results.redrawn import redrawn
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.base import Dataset, from_clients
from fedalloy.tasks.objective import ModuleObjective

X = Key.of(1).normal(40, 4, dtype=torch.float32)
Y = (X[:, 0] > 0).long()
TOKENS = (Key.of(2).bits(40, 6) & 0xFFFF) % 20


def body_and_head() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    model[:2].requires_grad_(False)
    return model


def test_frozen_parameters_and_their_norms_are_kept_unless_patterns_say_otherwise():
    objective = ModuleObjective(body_and_head)
    assert list(objective.forms["params"]) == ["3.weight", "3.bias"]
    assert not objective.forms["buffers"]
    assert "1.running_mean" in objective.frozen
    assert not objective.needs_full_batches
    assert list(ModuleObjective(body_and_head, trainable=("0.*",)).forms["params"]) == ["0.weight", "0.bias"]
    everything = ModuleObjective(body_and_head, trainable=("*",))
    assert len(everything.forms["params"]) == 6
    assert len(everything.forms["buffers"]) == 3
    with pytest.raises(SpecError, match="nothing would be trained"):
        ModuleObjective(lambda: nn.Linear(2, 2).requires_grad_(False))


def tied_words() -> nn.Module:
    """Embedding and output with one weight, as language models have them."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    model[1].weight = model[0].weight
    return model


def test_a_pattern_may_match_any_name_of_a_tied_parameter():
    for patterns, trained in (
        (("0.*",), ["0.weight"]),
        (("1.weight",), ["0.weight"]),
        (("1.*",), ["0.weight", "1.bias"]),
    ):
        assert list(ModuleObjective(tied_words, trainable=patterns).forms["params"]) == trained
    assert list(ModuleObjective(tied_words, trainable=("1.bias",)).forms["params"]) == ["1.bias"]


def test_frozen_parameters_do_not_move_and_are_not_counted():
    task = make_task(Dataset(X, Y, 2), body_and_head, clients=3)
    result = fedalloy.fit("fedavg", task, rounds=2)
    sent = next(result.rounds())["bytes_up"]
    assert sorted(result.model) == ["3.bias", "3.weight"]
    assert sent == 3 * 18 * 4
    leaves = result.module().state_dict()
    assert torch.equal(leaves["0.weight"], task.objective.frozen["0.weight"])
    assert torch.equal(leaves["3.weight"], result.model["3.weight"])


class Positions(nn.Module):
    """A token model with position ids and a fixed table, as pretrained models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("position_ids", torch.arange(6))
        self.register_buffer("table", torch.linspace(-1, 1, 48).reshape(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        assert not x.is_floating_point()
        out: Tensor = self.head((self.words(x) + self.get_buffer("table")[self.get_buffer("position_ids")]).mean(1))
        return out


def test_position_ids_do_not_travel_tied_weights_stay_tied_and_tokens_stay_whole():
    half = [(TOKENS[:20].numpy(), Y[:20]), (TOKENS[20:], Y[20:])]
    task = make_task(from_clients(half, classes=20), Positions)
    assert task.train.x.dtype == torch.int64
    result = fedalloy.fit("fedavg", task, rounds=1)
    assert list(result.model) == ["words.weight"]
    module: Any = result.module()
    assert module.head.weight is module.words.weight
    torch.testing.assert_close(module(TOKENS), task.objective.outputs(result.model, {}, TOKENS))


def test_whole_numbers_become_floats_for_a_model_that_takes_only_those():
    task = make_task(Dataset(TOKENS, Y, 2), lambda: nn.Linear(6, 2), clients=2)
    assert task.train.x.dtype == torch.float32


class OwnNorm(nn.Module):
    """Statistics that are assigned instead of written in place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return (x - self.mean) * self.weight


class Averaging(OwnNorm):
    exchanged_buffers = ("mean",)


class Forgetful(OwnNorm):
    pass


@pytest.mark.parametrize("kind", [OwnNorm, Averaging])
@pytest.mark.parametrize("engine", ["loop", "batched", "workers"])
def test_buffers_that_are_assigned_in_training_are_exchanged(kind, engine):
    task = make_task(Dataset(X, Y, 2), lambda: nn.Sequential(kind(), nn.Linear(4, 2)), clients=2)
    result = fedalloy.fit(fedalloy.algorithms.fedavg(batch_size=32), task, rounds=1, engine=engine)
    expected = torch.stack([0.5 * task.data("train", torch.tensor([k])).client(0).x.mean(0) for k in (0, 1)]).mean(0)
    torch.testing.assert_close(result.model["0.mean"], expected)


def test_a_changing_buffer_that_would_not_be_exchanged_is_refused():
    with pytest.raises(SpecError, match=r"changes the buffer '0\.mean', which is not exchanged.*exchanged_buffers"):
        make_task(Dataset(X, Y, 2), lambda: nn.Sequential(Forgetful(), nn.Linear(4, 2)), clients=2)


class Normalize(nn.Module):
    """The scale of the pixels is a constant, whatever the name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get_buffer("scale")


def test_constants_do_not_travel_because_of_their_name():
    objective = ModuleObjective(lambda: nn.Sequential(Normalize(), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    assert {name.partition(".")[0] for name in objective.forms["buffers"]} == {"1"}
    assert "0.scale" in objective.frozen


class Returns(nn.Module):
    def __init__(self, how) -> None:
        super().__init__()
        self.how, self.head = how, nn.Linear(4, 2)

    def forward(self, x: Tensor, more: Tensor):
        return self.how(self.head(x + more))


WAYS = {
    "tensor": lambda out: out, "tuple": lambda out: (out, None), "dict": lambda out: {"logits": out},
    "object": lambda out: SimpleNamespace(logits=out, loss=None),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [tuple, dict])
def test_tuples_and_dicts_of_inputs_and_outputs_of_all_kinds(way, kind):
    x = (X, 0.1 * X) if kind is tuple else {"more": 0.1 * X, "x": X}
    made = {}
    for engine in ("loop", "batched"):
        task = make_task(Dataset(x, Y, 2), lambda: Returns(WAYS[way]), clients=3, dtype="float64")
        made[engine] = fedalloy.fit("fedavg", task, rounds=1, engine=engine).model
    plain = make_task(Dataset(1.1 * X, Y, 2), lambda: nn.Linear(4, 2), clients=3, dtype="float64")
    same = fedalloy.fit("fedavg", plain, rounds=1, engine="loop").model
    torch.testing.assert_close(made["loop"], made["batched"], rtol=1e-9, atol=1e-12)
    assert made["loop"]["head.weight"].shape == same["weight"].shape


def test_other_outputs_are_refused_in_words():
    with pytest.raises(SpecError, match="returns a SimpleNamespace: it must return a tensor"):
        make_task(Dataset((X, X), Y, 2), lambda: Returns(lambda out: SimpleNamespace(states=out)), clients=3)


def test_a_built_module_is_the_start_of_every_seed_and_stays_as_it_is():
    model = body_and_head()
    before = copy.deepcopy(model.state_dict())
    task = make_task(Dataset(X, Y, 2), model, clients=3)
    for seed in (0, 1):
        first, _ = task.objective.init(Key.of(seed))
        assert torch.equal(first["3.weight"], before["3.weight"])
    result = fedalloy.fit("fedavg", task, rounds=1)
    assert not torch.equal(result.model["3.weight"], before["3.weight"])
    assert all(torch.equal(leaf, before[name]) for name, leaf in model.state_dict().items())
    with pytest.raises(SpecError, match=r"needs several starts.*give the function that builds it"):
        fedalloy.fit("superfed_mm", task, rounds=1)


def test_a_function_with_a_seed_of_its_own_has_one_start_too():
    def seeded():
        torch.manual_seed(0)
        return body_and_head()

    with pytest.raises(SpecError, match=r"gives the same values every time.*without a seed of its own"):
        fedalloy.fit("superfed_mm", make_task(Dataset(X, Y, 2), seeded, clients=3), rounds=1)
    assert fedalloy.fit("superfed_mm", make_task(Dataset(X, Y, 2), body_and_head, clients=3), rounds=1).status


def test_seeds_that_begin_with_one_model_do_not_claim_to_redraw_it(tmp_path):
    said = {}
    for kind, model in (("built", body_and_head()), ("function", body_and_head)):
        task = make_task(Dataset(X, Y, 2), model, clients=2)
        for seed in (0, 1):
            fedalloy.fit("fedavg", task, rounds=1, seed=seed, folder=tmp_path / f"{kind}-{seed}")
        drawn = redrawn(read_outcome(tmp_path / f"{kind}-{seed}").drawn for seed in (0, 1))
        assert drawn is not None
        said[kind] = drawn.text
    assert "the initial model" in said["function"]
    assert "the initial model" not in said["built"]
    assert "redraws the order of batches" in said["built"]


def test_another_base_is_another_experiment(tmp_path):
    def base(value: float) -> nn.Module:
        model: Any = body_and_head()
        with torch.no_grad():
            model[0].weight.fill_(value)
        return model

    def run(value: float, **more):
        task = make_task(Dataset(X, Y, 2), base(value), clients=3)
        return fedalloy.fit("fedavg", task, rounds=2, folder=tmp_path / "run", **more)

    torch.manual_seed(0)
    run(0.5)
    torch.manual_seed(0)
    with pytest.raises(CheckpointError, match=r"task\.model\.frozen"):
        run(0.25, resume=True)


def test_the_matrices_of_an_adapter_are_one_layer():
    names = [f"block.query.{part}.default.weight" for part in ("lora_A", "lora_B")]
    groups = layers(dict.fromkeys([*names, "block.query.lora_embedding_A.other", "head.weight", "head.bias"], X))
    assert list(groups) == ["block.query.lora.default", "block.query.lora.other", "head"]
    assert groups["block.query.lora.default"] == names


@pytest.mark.parametrize(
    "parts",
    [("lora_A.default.weight", "lora_B.default.weight", "lora_B.default.bias", "lora_magnitude_vector.default.weight"),
     ("hada_w1_a.default", "hada_w2_b.default"), ("gralora_A.default", "gralora_B_general.default"),
     ("delora_A.default", "delora_lambda.default"), ("randlora_lambda.default", "randlora_gamma.default"),
     ("vblora_logits_A.default", "vblora_logits_B.default"), ("poly_lora_A.default", "poly_lora_B.default")],
)  # fmt: skip
def test_so_are_the_parts_of_other_adapters(parts):
    assert len(layers({f"block.query.{part}": X for part in parts})) == 1


def test_saving_needs_a_model_that_can():
    result = fedalloy.fit("fedavg", make_task(Dataset(X, Y, 2), body_and_head, clients=3), rounds=1)
    with pytest.raises(SpecError, match="has no 'save_pretrained'"):
        result.save_pretrained("nowhere")
    with pytest.raises(SpecError, match="client 9 does not exist"):
        result.module(client=9)


def test_a_built_module_may_have_lazy_layers_and_has_one_start():
    module = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))
    task = make_task(Dataset(X, Y, 2), module, clients=2)
    one, other = (task.objective.init(Key.of(seed))[0] for seed in (1, 2))
    assert all(torch.equal(leaf, other[name]) for name, leaf in one.items())
    assert float(one["0.weight"].std()) > 0
    assert fedalloy.fit("fedavg", task, rounds=1).module()(X).shape == (len(X), 2)
    assert isinstance(module[0], nn.LazyLinear), "the user's module stays as it is"


def test_lazy_layers_get_their_sizes_from_whole_numbers_too():
    pixels = torch.randint(0, 256, (24, 1, 6, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)

    def model():
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.LazyLinear(2))

    data = Dataset(pixels, (pixels[:, 0, 0, 0] > 127).long(), 2)
    result = fedalloy.fit("fedavg", make_task(data, model, clients=2), rounds=1)
    assert result.model["2.weight"].shape == (2, 32)


class Reversal(torch.autograd.Function):
    """The input itself, with its gradient reversed; written for autograd only, as most functions of users are."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, slope):
        return -slope


class Reversed(nn.Module):
    """A network with this function, or with the same in terms that every transform knows."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.plain, self.body, self.head = plain, nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.body(x).tanh()
        changed: Tensor = 2 * inner.detach() - inner if self.plain else Reversal.apply(inner)
        return self.head(changed)


@pytest.mark.parametrize("method", ["fedavg", "ditto", "apfl", "fedavg_ft", "propfair"])
@pytest.mark.parametrize("engine", ["loop", "workers"])
def test_functions_that_were_written_for_autograd_only_are_trained_by_every_method(method, engine):
    """Methods that leave batch statistics alone, or change the loss, used a transform that refuses such functions."""
    solver: Any = {"propfair": {"official": True}}.get(method, {})
    algorithm = getattr(fedalloy.algorithms, method)(lr=0.1, batch_size=4, **solver)
    made = [
        fedalloy.fit(
            algorithm, make_task(Dataset(X, Y, 2), lambda plain=plain: Reversed(plain), clients=2), rounds=2, engine=one
        )
        for plain, one in ((False, engine), (True, "batched"))
    ]
    for name, leaf in made[1].model.items():
        torch.testing.assert_close(made[0].model[name], leaf, rtol=0, atol=1e-6)
    if method in ("ditto", "apfl", "fedavg_ft"):
        one, other = (result.module(client=1)(X) for result in made)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def words_of(layer: Any, sparse: bool) -> nn.Module:
    return nn.Sequential(layer(20, 4, sparse=sparse), nn.Flatten(), nn.LazyLinear(2))


@pytest.mark.parametrize(
    ("layer", "engine"), [(nn.Embedding, "loop"), (nn.Embedding, "batched"), (nn.EmbeddingBag, "loop")]
)
def test_embeddings_with_sparse_gradients_are_trained_as_others_are(layer, engine):
    """Their gradients reached the local optimizer, which has no rule for sparse tensors."""
    settings: dict[str, Any] = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.1, "batch_size": 4}
    made = []
    for sparse, one in ((True, engine), (False, "loop")):
        task = make_task(Dataset(TOKENS, Y, 2), partial(words_of, layer, sparse), clients=2)
        made.append(fedalloy.fit(fedalloy.algorithms.ditto(**settings), task, rounds=1, engine=one).model)
    for name, leaf in made[1].items():
        torch.testing.assert_close(made[0][name], leaf, rtol=0, atol=1e-6)

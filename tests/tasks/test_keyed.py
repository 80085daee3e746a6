"""Random numbers of a model come from the client's key, alone, in a block and padded."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.tasks import keyed
from fedalloy.tasks.keyed import KeyedDraws
from fedalloy.tasks.objective import ModuleObjective

CLIENTS, BATCH, LENGTH, WIDTH = 3, 5, 4, 8
X = Key.of(1).normal(CLIENTS, BATCH, LENGTH, WIDTH, dtype=torch.float64)
Y = (Key.of(2).bits(CLIENTS, BATCH) & 0xFFFF) % 3
DRAWS = Key.of(3).bits(CLIENTS)
SIZES = torch.tensor([[4], [5], [2]])


class Body(nn.Module):
    """A layer, or a function, on sequences, and a head."""

    def __init__(self, body, turned: bool = False) -> None:
        super().__init__()
        self.body, self.turned, self.head = body, turned, nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.turned else x
        made = self.body(x)
        made = made[0] if isinstance(made, tuple) else made
        made = made.transpose(0, 1) if self.turned else made
        return self.head(made.mean(1)) + 0 * self.head(x.mean((0, 1)))


def attend(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True)


def stochastic_depth(x: Tensor) -> Tensor:
    return x + x.sin() * (torch.rand(x.shape[0], 1, 1, dtype=x.dtype) + 0.7).floor_()


def filled(x: Tensor) -> Tensor:
    return x * x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.5)


def noise(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn_like(x) + torch.normal(torch.zeros_like(x), 0.1) + torch.bernoulli(0.5 + 0 * x)


def latent(x: Tensor) -> Tensor:
    """As in a variational autoencoder."""
    return torch.distributions.Normal(x, x.exp()).rsample()


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


BODIES: dict[str, Any] = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "channels": lambda x: functional.dropout1d(x, 0.3),
    "alpha": lambda x: functional.alpha_dropout(x, 0.3, training=True),
    "lstm": nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True),
    "gru": nn.GRU(WIDTH, WIDTH // 2, 2, dropout=0.3, batch_first=True, bidirectional=True),
    "encoder": encoder(),
    "attention": attend,
    "gumbel": functional.gumbel_softmax,
    "depth": stochastic_depth,
    "filled": filled,
    "noise": noise,
    "latent": latent,
}


@pytest.fixture
def no_fallback():
    functorch: Any = torch._C._functorch
    functorch._set_vmap_fallback_enabled(False)
    yield
    functorch._set_vmap_fallback_enabled(True)


def objective_of(body, **options) -> ModuleObjective:
    def build() -> nn.Module:
        return Body(copy.deepcopy(body), **options)

    return ModuleObjective(build, dtype=torch.float64, example=X[0])


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("name", BODIES)
def test_draws_are_the_same_alone_in_a_block_and_padded(name):
    objective = objective_of(BODIES[name])
    params, buffers = objective.init(Key.of(4))
    stacked = {leaf: value.expand(CLIENTS, *value.shape) for leaf, value in params.items()}
    mask = torch.arange(BATCH) < SIZES
    assert objective.needs_draw
    assert not objective.needs_full_batches
    gradient = vmap(grad(lambda p, x, y, m, d: objective.loss(p, buffers, x, y, m, d)[0]))
    together = gradient(stacked, X, Y, mask, DRAWS)
    for client in range(CLIENTS):
        x, y = X[client][mask[client]], Y[client][mask[client]]
        alone = grad(lambda p, x=x, y=y, d=DRAWS[client]: objective.loss(p, buffers, x, y, None, d)[0])(params)
        for leaf in params:
            torch.testing.assert_close(together[leaf][client], alone[leaf], rtol=1e-9, atol=1e-12)
    first, second = (objective.loss(params, buffers, X[0], Y[0], None, DRAWS[place])[0] for place in (0, 1))
    assert first != second


@pytest.mark.parametrize("name", ["encoder", "lstm"])
def test_a_batch_axis_that_is_not_first_is_never_padded(name):
    body = copy.deepcopy(BODIES[name])
    for part in body.modules():
        if hasattr(part, "batch_first"):
            part.batch_first = False
    objective = objective_of(body, turned=True)
    assert objective.needs_full_batches
    with pytest.raises(SpecError, match="random draws"):
        objective.loss(*objective.init(Key.of(4)), X[0], Y[0], torch.ones(BATCH, dtype=torch.bool), DRAWS[0])


def test_without_an_example_padding_is_refused_where_something_is_drawn():
    objective = ModuleObjective(lambda: Body(stochastic_depth), dtype=torch.float64)
    params, buffers = objective.init(Key.of(4))
    objective.loss(params, buffers, X[0], Y[0], None, DRAWS[0])
    with pytest.raises(SpecError, match="give ModuleObjective an example"):
        objective.loss(params, buffers, X[0], Y[0], torch.ones(BATCH, dtype=torch.bool), DRAWS[0])


@pytest.mark.parametrize("body", [lambda x: torch.poisson(x.abs()), lambda x: x * torch.ops.aten.bernoulli.p(x, 0.5)])
def test_what_has_no_answer_uses_a_generator_seeded_by_the_key(body):
    """Poisson numbers are known to have no answer; an operator that no mode sees is found by the probe."""
    objective = ModuleObjective(lambda: Body(body), dtype=torch.float64, example=X[0])
    params, buffers = objective.init(Key.of(4))
    before = torch.random.get_rng_state()
    one, same, other = (float(objective.loss(params, buffers, X[0], Y[0], None, DRAWS[i])[0]) for i in (0, 0, 1))
    assert one == same != other
    assert torch.equal(before, torch.random.get_rng_state())
    with pytest.raises((SpecError, RuntimeError)):
        vmap(lambda x, y, d: objective.loss(params, buffers, x, y, None, d)[0])(X, Y, DRAWS)


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["random", "numpy"])
def test_draws_of_python_and_numpy_come_from_the_key_too(draw):
    """As in models that leave out layers by chance; seen by the probe, since no mode of torch sees them."""
    objective = ModuleObjective(lambda: Body(lambda x: x * draw()), dtype=torch.float64, example=X[0])
    params, buffers = objective.init(Key.of(4))
    before = keyed.other_generators()
    one, same, other = (float(objective.loss(params, buffers, X[0], Y[0], None, DRAWS[i])[0]) for i in (0, 0, 1))
    assert one == same != other
    assert not keyed.other_draws(before, keyed.other_generators())
    with pytest.raises(SpecError, match="several clients at once"):
        vmap(lambda x, y, d: objective.loss(params, buffers, x, y, None, d)[0])(X, Y, DRAWS)


def test_no_dropout_is_no_reason_to_draw():
    quiet = objective_of(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True))
    assert not quiet.needs_draw
    quiet.loss(*quiet.init(Key.of(4)), X[0], Y[0], torch.ones(BATCH, dtype=torch.bool), None)


@pytest.mark.parametrize(
    ("draw", "low", "high", "mean"),
    [
        (lambda: torch.rand(20, 30), 0, 1, 0.5), (lambda: torch.rand((600,)), 0, 1, 0.5),
        (lambda: torch.randint(3, 7, (600,)).double(), 3, 6, 4.5), (lambda: torch.randint(5, (600,)).double(), 0, 4, 2),
        (lambda: torch.randint(low=2, high=5, size=(600,)).double(), 2, 4, 3),
        (lambda: torch.randn(600), -6, 6, 0), (lambda: torch.normal(2.0, 1.0, (600,)), -6, 8, 2),
        (lambda: torch.empty(600).uniform_(2, 4), 2, 4, 3), (lambda: torch.empty(600).exponential_(), 0, 20, 1),
        (lambda: torch.empty(600).bernoulli_(0.25), 0, 1, 0.25), (lambda: torch.empty(600).random_(1, 4), 1, 3, 2),
        (lambda: torch.multinomial(torch.tensor([1.0, 3.0]), 600, replacement=True).double(), 0, 1, 0.75),
        (lambda: torch.randperm(601).double(), 0, 600, 300),
        (lambda: torch.rand(600, dtype=torch.bfloat16), 0, 0.9999, 0.5),
        (lambda: torch.stack([torch.multinomial(torch.ones(3), 2) for _ in range(300)]).double(), 0, 2, 1),
    ],
)  # fmt: skip
def test_answers_have_the_range_and_the_mean_of_torchs(draw, low, high, mean):
    before = torch.random.get_rng_state()
    with KeyedDraws(Key.of(7)) as mode:
        made = draw()
    assert torch.equal(before, torch.random.get_rng_state())
    assert mode.count
    assert low <= float(made.min()) <= float(made.max()) <= high
    assert float(made.double().mean()) == pytest.approx(mean, abs=0.09 * (high - low if high < 600 else 6))


def test_a_generator_of_the_callers_own_is_its_own():
    with KeyedDraws(Key.of(7)) as mode:
        made = torch.rand(3, generator=torch.Generator().manual_seed(1))
    assert mode.count == 0
    assert torch.equal(made, torch.rand(3, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_torchs(causal):
    query, key, value = (Key.of(place).normal(2, 4, 5, 8, dtype=torch.float64) for place in range(3))
    mask = None if causal else (Key.of(9).uniform(5, 5) < 0.6).index_fill(0, torch.tensor([2]), False)
    own = functional.scaled_dot_product_attention
    with KeyedDraws(None):
        ours = own(query, key[:, :2], value[:, :2], attn_mask=mask, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(ours, own(query, key[:, :2], value[:, :2], mask, is_causal=causal, enable_gqa=True))


def test_dropout_of_a_planted_global_generator_would_be_caught(monkeypatch):
    """The first test fails if the mode passes dropout through to torch."""
    monkeypatch.delitem(keyed.ANSWERS, functional.dropout)
    objective = objective_of(BODIES["dropout"])
    params, buffers = objective.init(Key.of(4))
    with pytest.raises((SpecError, RuntimeError)):
        vmap(lambda x, y, d: objective.loss(params, buffers, x, y, None, d)[0])(X, Y, DRAWS)


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 1 / 3, 0.9, 1e-9, 1 - 1e-9, 1.0])
def test_a_mask_keeps_what_is_at_least_p_as_a_float32(p):
    edge = round(p * 2**24)
    whole = torch.arange(max(0, edge - 3), min(2**24, edge + 3))
    assert (whole >= keyed._least(p)).equal(whole.to(torch.float32) * 2.0**-24 >= p)


def test_the_keys_of_many_calls_are_those_of_single_ones():
    key = Key.of(5)
    mode, block = KeyedDraws(key), KeyedDraws(Key(torch.tensor([key.seed() | (key.state >> 63) * -(2**63)])))
    for _ in range(2 * keyed._AHEAD + 3):
        assert mode.next().seed() == block.next().seed()

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Objective
from fedalloy.tasks.dropout import Dropout
from fedalloy.tasks.objective import ModuleObjective

CLIENTS, BATCH, FEATURES, CLASSES = 3, 6, 4, 5
X = Key.of(1).normal(CLIENTS, BATCH, FEATURES, dtype=torch.float64)
Y = (Key.of(2).bits(CLIENTS, BATCH) & 0xFFFF) % CLASSES
DRAWS = Key.of(3).bits(CLIENTS)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


def dropping() -> nn.Module:
    return nn.Sequential(Dropout(0.3), nn.Linear(FEATURES, 8), nn.ReLU(), Dropout(0.6), nn.Linear(8, CLASSES))


def objective_of(factory=plain, **options) -> tuple[ModuleObjective, dict[str, Tensor], dict[str, Tensor]]:
    objective = ModuleObjective(factory, dtype=torch.float64, **options)
    return objective, *objective.init(Key.of(7))


def test_it_is_an_objective():
    objective: Objective = objective_of()[0]
    assert objective.loss is not None


def test_init_depends_on_the_key_only():
    objective, params, _ = objective_of()
    before = torch.random.get_rng_state()
    torch.manual_seed(99)
    again, _ = objective.init(Key.of(7))
    other, _ = objective.init(Key.of(8))
    torch.random.set_rng_state(before)
    assert all(torch.equal(params[name], again[name]) for name in params)
    assert not torch.equal(params["0.weight"], other["0.weight"])
    assert all(leaf.dtype == torch.float64 and not leaf.requires_grad for leaf in params.values())


def test_the_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    objective, params, buffers = objective_of(dropping)
    objective.loss(params, buffers, X[0], Y[0], None, DRAWS[0])
    assert torch.equal(before, torch.random.get_rng_state())


def test_loss_and_gradient_are_those_of_the_module():
    objective, params, buffers = objective_of()
    module = plain().double()
    module.load_state_dict(params)
    expected = functional.cross_entropy(module(X[0]), Y[0])
    expected.backward()
    loss, new = objective.loss(params, buffers, X[0], Y[0], None, None)
    assert new == {}
    torch.testing.assert_close(loss, expected.detach())
    gradient = grad(lambda p: objective.loss(p, buffers, X[0], Y[0], None, None)[0])(params)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(gradient[name], parameter.grad)


def test_a_mask_takes_the_mean_over_valid_rows():
    objective, params, buffers = objective_of()
    mask = torch.tensor([True, True, False, True, False, False])
    masked, _ = objective.loss(params, buffers, X[0], Y[0], mask, None)
    short, _ = objective.loss(params, buffers, X[0][mask], Y[0][mask], None, None)
    torch.testing.assert_close(masked, short)
    assert float(objective.loss(params, buffers, X[0], Y[0], mask & False, None)[0]) == 0.0


def test_float_inputs_take_the_dtype_of_the_model():
    objective, params, buffers = objective_of()
    assert objective.outputs(params, buffers, X[0].float()).dtype == torch.float64


@pytest.mark.parametrize("shared_buffers", [True, False])
@pytest.mark.parametrize("shared_params", [True, False])
def test_batchnorm_under_grad_and_vmap(shared_buffers, shared_params):
    """Every client gets the gradient and the statistics it would get alone, from a plain module."""
    objective, params, buffers = objective_of(normed)
    stacked = {name: leaf.expand(CLIENTS, *leaf.shape).clone() for name, leaf in params.items()}
    statistics = {name: leaf.expand(CLIENTS, *leaf.shape).clone() for name, leaf in buffers.items()}
    gradient = grad(lambda p, b, x, y: objective.loss(p, b, x, y, None, None), has_aux=True)
    axes = (None if shared_params else 0, None if shared_buffers else 0, 0, 0)
    mine = (params if shared_params else stacked, buffers if shared_buffers else statistics)
    gradients, after = vmap(gradient, in_dims=axes)(*mine, X, Y)
    for client in range(CLIENTS):
        module = normed().double()
        module.load_state_dict({**params, **buffers})
        functional.cross_entropy(module(X[client]), Y[client]).backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(gradients[name][client], parameter.grad, rtol=1e-6, atol=1e-10)
        for name, leaf in module.named_buffers():
            torch.testing.assert_close(after[name][client], leaf)
            assert after[name].dtype == buffers[name].dtype


def test_batchnorm_with_shared_data_and_own_parameters():
    objective, params, buffers = objective_of(normed)
    stacked = {name: torch.stack([leaf, leaf + 0.1]) for name, leaf in params.items()}
    _, after = vmap(lambda p: objective.loss(p, buffers, X[0], Y[0], None, None))(stacked)
    _, alone = objective.loss({name: leaf[1] for name, leaf in stacked.items()}, buffers, X[0], Y[0], None, None)
    torch.testing.assert_close(after["1.running_mean"][1], alone["1.running_mean"])


def test_batchnorm_leaves_its_inputs_alone_and_evaluates_by_running_statistics():
    objective, params, buffers = objective_of(normed)
    before = copy.deepcopy(buffers)
    _, after = objective.loss(params, buffers, X[0], Y[0], None, None)
    assert all(torch.equal(before[name], buffers[name]) for name in buffers)
    assert int(after["1.num_batches_tracked"]) == 1
    assert not torch.equal(after["1.running_mean"], buffers["1.running_mean"])
    whole = objective.outputs(params, after, X[0])
    torch.testing.assert_close(whole[:2], objective.outputs(params, after, X[0][:2]))
    fresh, _ = objective.init(Key.of(7))
    assert all(torch.equal(fresh[name], params[name]) for name in params)


def test_batchnorm_refuses_padding():
    objective, params, buffers = objective_of(normed)
    assert objective.needs_full_batches
    assert not objective_of()[0].needs_full_batches
    with pytest.raises(SpecError, match="without a mask"):
        objective.loss(params, buffers, X[0], Y[0], torch.ones(BATCH, dtype=torch.bool), None)


def test_training_and_evaluation_do_not_disturb_each_other():
    objective, params, buffers = objective_of(dropping)
    calm = objective.outputs(params, buffers, X[0])
    first, _ = objective.loss(params, buffers, X[0], Y[0], None, DRAWS[0])
    assert torch.equal(objective.outputs(params, buffers, X[0]), calm)
    second, _ = objective.loss(params, buffers, X[0], Y[0], None, DRAWS[0])
    assert torch.equal(first, second)


def test_a_failed_call_leaves_the_skeleton_usable():
    objective, params, buffers = objective_of()
    before = objective.outputs(params, buffers, X[0])
    with pytest.raises(RuntimeError):
        objective.outputs(params, buffers, X[0][:, :2])
    assert torch.equal(objective.outputs(params, buffers, X[0]), before)


def test_dropout_is_the_same_alone_in_a_block_and_padded():
    objective, params, buffers = objective_of(dropping)
    mask = torch.arange(BATCH) < torch.tensor([[4], [6], [2]])
    together = vmap(partial(objective.loss, params, buffers))
    losses, _ = together(X, Y, mask, DRAWS)
    for client in range(CLIENTS):
        rows = mask[client]
        alone, _ = objective.loss(params, buffers, X[client][rows], Y[client][rows], None, DRAWS[client])
        torch.testing.assert_close(losses[client], alone)


def test_dropout_masks_differ_by_draw_and_by_place():
    objective, params, buffers = objective_of(dropping)
    one, _ = objective.loss(params, buffers, X[0], Y[0], None, DRAWS[0])
    other, _ = objective.loss(params, buffers, X[0], Y[0], None, DRAWS[1])
    assert one != other

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = Dropout(0.5), Dropout(0.5), nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return (self.first(x) > 0) == (self.second(x) > 0)

    twice = ModuleObjective(Twice, loss=lambda outputs, y: outputs.double().mean(1))
    agree, _ = twice.loss(twice.init(Key.of(0))[0], {}, torch.ones(50, 40), torch.zeros(50), None, DRAWS[0])
    assert 0.45 < float(agree) < 0.55


def test_dropout_keeps_the_mean_and_the_share():
    layer = Dropout(0.3)
    dropped = torch.func.functional_call(layer, {"draw": DRAWS[0]}, (torch.ones(200, 100),))
    assert float((dropped == 0).double().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.02)
    assert torch.equal(layer.eval()(dropped), dropped)


def test_dropout_is_no_part_of_what_is_exchanged():
    _, params, buffers = objective_of(dropping)
    assert buffers == {}
    assert not any("draw" in name for name in params)
    assert "draw" not in str(dropping().state_dict().keys())


def test_dropout_errors():
    objective, params, buffers = objective_of(dropping)
    assert objective.needs_draw
    with pytest.raises(SpecError, match="draw=key"):
        objective.loss(params, buffers, X[0], Y[0], None, None)
    with pytest.raises(SpecError, match="0 <= p < 1"):
        Dropout(1.0)


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout(0.5), nn.Dropout1d(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5),
     nn.RReLU(),
     nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True), nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)],
    ids=lambda layer: type(layer).__name__,
)  # fmt: skip
def test_dropout_of_torch_needs_a_draw_and_takes_no_other(layer):
    objective = ModuleObjective(lambda: Through(layer), dtype=torch.float64, example=X[0].unsqueeze(1))
    params, buffers = objective.init(Key.of(1))
    before = torch.random.get_rng_state()
    one, same, other = (
        float(objective.loss(params, buffers, X[0].unsqueeze(1), Y[0], None, DRAWS[place])[0]) for place in (0, 0, 1)
    )
    assert torch.equal(before, torch.random.get_rng_state())
    assert objective.needs_draw
    assert one == same != other
    with pytest.raises(SpecError, match="with a draw"):
        objective.loss(params, buffers, X[0].unsqueeze(1), Y[0], None, None)


class Through(nn.Module):
    """A layer of any kind on one token, and a head."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        given = (x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else (x,)
        made = self.layer(*given)
        out: Tensor = self.head((made[0] if isinstance(made, tuple) else made).flatten(1))
        return out


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), Dropout(0.5), nn.ReLU())
        self.head = nn.Sequential(Dropout(0.5), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def test_a_frozen_backbone_stays_where_it_is():
    objective, params, buffers = objective_of(Backbone, trainable=("head.*",))
    assert set(params) == {"head.1.weight", "head.1.bias"}
    assert buffers == {}
    assert not objective.needs_full_batches
    gradient, new = grad(
        lambda p: objective.loss(p, buffers, X[0], Y[0], torch.ones(BATCH, dtype=torch.bool), DRAWS[0]), has_aux=True
    )(params)
    assert set(gradient) == set(params)
    assert new == {}
    other, _ = objective.init(Key.of(123))
    assert not torch.equal(other["head.1.weight"], params["head.1.weight"])
    mixed = objective.outputs(params, buffers, X[0])
    objective.loss(params, buffers, X[0], Y[0], None, DRAWS[0])
    assert torch.equal(mixed, objective.outputs(params, buffers, X[0]))


def test_frozen_parts_are_the_same_in_every_copy():
    one, params, buffers = objective_of(Backbone, trainable=("head.*",))
    two, _, _ = objective_of(Backbone, trainable=("head.*",))
    assert torch.equal(one.outputs(params, buffers, X[0]), two.outputs(params, buffers, X[0]))
    assert torch.equal(one.outputs(params, buffers, X[0]), one.to("cpu").outputs(params, buffers, X[0]))


def test_frozen_dropout_is_off_and_a_trained_one_on():
    objective, _, _ = objective_of(Backbone, trainable=("head.*",))
    assert objective._model.dropouts == ["head.0"]
    everything, _, _ = objective_of(Backbone)
    assert everything._model.dropouts == ["body.2", "head.0"]


def test_buffers_follow_their_module():
    _, params, buffers = objective_of(normed, trainable=("*.weight",))
    assert set(params) == {"0.weight", "1.weight", "3.weight"}
    assert set(buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


@pytest.mark.parametrize(
    ("trainable", "message"),
    [(("haed.*",), r"'haed\.\*' matches no parameter.*head\.1\.\*"), ((), "empty"), ("head.*", "give a tuple")],
)
def test_bad_patterns_are_named(trainable, message):
    with pytest.raises(SpecError, match=message):
        ModuleObjective(Backbone, trainable=trainable)


def test_lazy_layers_get_their_sizes_from_the_first_examples():
    with pytest.raises(SpecError, match="give every layer its sizes"):
        ModuleObjective(lambda: nn.LazyLinear(3))

    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())

    objective = ModuleObjective(lazy, example=X[0])
    params, buffers = objective.init(Key.of(1))
    again, _ = objective.init(Key.of(1))
    assert params["0.weight"].shape == (3, FEATURES)
    assert torch.equal(params["0.weight"], again["0.weight"])
    assert int(buffers["1.num_batches_tracked"]) == 0


def test_tied_parameters_are_one_leaf():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(FEATURES, FEATURES, bias=False), nn.Linear(FEATURES, FEATURES, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.two(self.one(x))
            return out

    objective, params, buffers = objective_of(Tied)
    assert set(params) == {"one.weight"}
    weight = params["one.weight"]
    torch.testing.assert_close(objective.outputs(params, buffers, X[0]), X[0] @ weight.T @ weight.T)


def test_the_binary_loss_reads_one_logit():
    objective, params, buffers = objective_of(lambda: nn.Linear(FEATURES, 1), loss="binary")
    y = Y[0] % 2
    outputs = objective.outputs(params, buffers, X[0])
    expected = functional.binary_cross_entropy_with_logits(outputs[:, 0], y.double())
    torch.testing.assert_close(objective.loss(params, buffers, X[0], y, None, None)[0], expected)
    assert torch.equal(objective.hits(outputs, y), ((outputs[:, 0] > 0).long() == y).double())
    with pytest.raises(SpecError, match="classes=1"):
        objective.losses(torch.zeros(3, 2), torch.zeros(3))


def test_the_squared_loss_averages_over_outputs():
    objective = ModuleObjective(lambda: nn.Linear(FEATURES, 2), "mse", dtype=torch.float64)
    outputs, y = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [3.0, 1.0]])
    assert objective.losses(outputs, y).tolist() == [2.5, 5.0]
    assert objective.hits(outputs, y).isnan().all()
    assert objective.losses(torch.tensor([[2.0], [1.0]]), torch.tensor([0.0, 1.0])).tolist() == [4.0, 0.0]


def test_any_function_is_a_loss():
    objective = ModuleObjective(plain, lambda outputs, y: outputs.abs().sum(1))
    assert objective.losses(torch.tensor([[1.0, -2.0]]), torch.tensor([0])).tolist() == [3.0]
    assert objective.hits(torch.tensor([[1.0, -2.0]]), torch.tensor([0])).tolist() == [1.0]
    own = ModuleObjective(plain, "mse", hits=lambda outputs, y: (outputs - y).abs() < 0.5)
    assert own.hits(torch.tensor([1.2]), torch.tensor([1.0])).tolist() == [True]
    with pytest.raises(SpecError, match="did you mean 'cross_entropy'"):
        ModuleObjective(plain, "cross_entrpy")


def test_an_objective_can_be_sent_to_another_process():
    objective, params, buffers = objective_of(Backbone, trainable=("head.*",))
    twin: ModuleObjective = pickle.loads(pickle.dumps(objective))
    assert torch.equal(twin.outputs(params, buffers, X[0]), objective.outputs(params, buffers, X[0]))
    first = objective.loss(params, buffers, X[0], Y[0], None, DRAWS[0])[0]
    assert torch.equal(twin.loss(params, buffers, X[0], Y[0], None, DRAWS[0])[0], first)

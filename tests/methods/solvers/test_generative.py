"""FedCGAN and FedCVAE: their losses by hand, their steps by plain torch, and what they make."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedalloy import algorithms
from fedalloy.core.algorithm import Algorithm, server_step
from fedalloy.core.aspects import Generative
from fedalloy.core.client import Assignment, run_client
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.objective import BatchGradient
from fedalloy.core.types import Cohort, Context, Examples
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.driver import run
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.cgan import Cgan, discriminator_loss, generator_loss
from fedalloy.methods.solvers.cvae import Cvae, divergence, evidence_loss
from fedalloy.methods.weightings.samples import Samples
from fedalloy.tasks.models.acgan import acgan_rows
from fedalloy.tasks.models.cvae import cvae_rows
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.testing.problems import small_task

NOISE = torch.tensor(12345)
X = torch.tensor([[0.1, 0.2], [0.3, -0.4], [0.5, 0.6]], dtype=torch.float64)
Y = torch.tensor([0, 1, 1])


class Scripted:
    """A model that says what the test wrote down, and remembers what it was asked."""

    def __init__(self, **answers):
        self.answers, self.asked = answers, []

    def __call__(self, capability, *inputs):
        self.asked.append((capability, inputs))
        return self.answers[capability]


def bce(logit, target):
    """Binary cross-entropy written out."""
    p = 1 / (1 + math.exp(-logit))
    return -math.log(p if target else 1 - p)


def ce(logits, label):
    return -logits[label] + math.log(sum(math.exp(value) for value in logits))


def test_discriminator_loss_by_hand():
    fake = torch.zeros(3, 2, dtype=torch.float64)
    # Judged rows alternate: real 0, fake 0, real 1, fake 1, ...
    logit = torch.tensor([0.5, -1.0, 2.0, 0.3, -0.7, 1.1], dtype=torch.float64)
    classes = torch.arange(12, dtype=torch.float64).reshape(6, 2) / 7 * torch.tensor([1.0, -1.0])
    model = Scripted(generate=fake, judge=(logit, classes))
    found = discriminator_loss(NOISE)(model, X, Y)
    for i, label in enumerate(Y.tolist()):
        real, made = 2 * i, 2 * i + 1
        expected = bce(logit[real], 1) + bce(logit[made], 0)
        expected += ce(classes[real].tolist(), label) + ce(classes[made].tolist(), label)
        assert float(found[i]) == pytest.approx(expected, rel=1e-12)
    judged = model.asked[1][1][0]
    assert torch.equal(judged[0::2], X)
    assert torch.equal(judged[1::2], fake)


def test_the_published_code_names_fakes_at_random():
    y = torch.zeros(400, dtype=torch.int64)
    x, logit = torch.zeros(400, 2), torch.zeros(800)
    classes = torch.tensor([9.0, 0.0, 0.0]).expand(800, 3)
    right, wrong = (
        discriminator_loss(NOISE, official)(Scripted(generate=x, judge=(logit, classes)), x, y)
        for official in (False, True)
    )
    assert float(right.max() - right.min()) == 0.0
    # A third of the random labels is right, the others cost 9 more.
    assert float((wrong > right + 8).double().mean()) == pytest.approx(2 / 3, abs=0.08)


def test_generator_loss_by_hand():
    fake = torch.full((3, 2), 0.25, dtype=torch.float64)
    logit = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    classes = torch.tensor([[0.1, 0.9], [1.5, -0.5], [0.0, 0.2]], dtype=torch.float64)
    model = Scripted(generate=fake, judge=(logit, classes))
    found = generator_loss(NOISE)(model, X, Y)
    expected = [bce(logit[i], 1) + ce(classes[i].tolist(), label) for i, label in enumerate(Y.tolist())]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert model.asked[1][1][0] is fake


def test_evidence_loss_by_hand():
    made = torch.tensor([[0.0, 0.0], [0.3, 0.1], [1.0, 0.6]], dtype=torch.float64)
    mean = torch.tensor([[1.0], [0.0], [-2.0]], dtype=torch.float64)
    spread = torch.tensor([[1.0], [0.5], [2.0]], dtype=torch.float64)
    model = Scripted(reconstruct=(X, made, mean, spread))
    squares = [0.01 + 0.04, 0.25, 0.25]
    kl = [-0.5 * (1 + math.log(s * s) - m * m - s * s) for m, s in zip((1, 0, -2), (1, 0.5, 2), strict=True)]
    summed = [square + k for square, k in zip(squares, kl, strict=True)]
    averaged = [square / 2 + k for square, k in zip(squares, kl, strict=True)]
    assert evidence_loss(NOISE)(model, X, Y).tolist() == pytest.approx(summed, rel=1e-12)
    assert evidence_loss(NOISE, official=True)(model, X, Y).tolist() == pytest.approx(averaged, rel=1e-12)


def test_divergence_is_the_integral():
    mean, spread = 0.7, 0.6
    grid = torch.linspace(-9, 9, 200_001, dtype=torch.float64)
    log_q = -((grid - mean) ** 2) / (2 * spread**2) - math.log(spread)
    log_p = -(grid**2) / 2
    density = log_q.exp() / math.sqrt(2 * math.pi)
    integral = float(torch.trapezoid(density * (log_q - log_p), grid))
    found = divergence(torch.tensor([[mean]], dtype=torch.float64), torch.tensor([[spread]], dtype=torch.float64))
    assert float(found) == pytest.approx(integral, abs=1e-8)


def client_delta(solver, objective, steps=1):
    """What one client of three examples sends after whole-batch steps."""
    params, buffers = objective.init(Key.of(3))
    algorithm = Algorithm(solver, Samples(), ServerSgd())
    shared = algorithm.init(params, 1, buffers)["shared"]
    key, ctx = Key.of(5).each(torch.tensor([0])), Context(1, 1, Key.of(5), solver.lr_at(1))
    with torch.no_grad():
        sent = run_client(
            algorithm, objective, shared, algorithm.init_client(shared, Key.of(0)), Assignment(Examples(X, Y), steps),
            key, ctx,
        )  # fmt: skip
    plan = solver.plan(torch.tensor([3]), torch.tensor([steps]), key.fold("plan"))
    noise = solver.draws(plan, key.fold("draws"), shared)["noise"][0]
    order = [plan.index[0, step] for step in range(steps)]
    return params, sent.payload["delta"], noise, order


def filled(objective, params):
    """The module itself with these parameters, to be trained by torch."""
    module = acgan_rows((2,), 2, width=4, latent=3) if "generator.0.weight" in params else cvae_rows((2,), 2, 4, 3)
    module.double().load_state_dict(params)
    return module


def test_two_gan_steps_are_those_of_torch():
    objective = ModuleObjective(lambda: acgan_rows((2,), 2, width=4, latent=3), dtype=torch.float64)
    solver = Cgan(lr=0.05, batch_size=None, optimizer="adam", betas=(0.5, 0.999))
    params, delta, noise, order = client_delta(solver, objective, steps=2)
    module = filled(objective, params)
    judges = torch.optim.Adam(module.discriminator.parameters(), 0.05, betas=(0.5, 0.999))
    makes = torch.optim.Adam(module.generator.parameters(), 0.05, betas=(0.5, 0.999))
    for draw, rows in zip(noise, order, strict=True):
        x, y = X[rows], Y[rows]
        fake = module(draw, y, capability="generate").detach()
        (real_logit, real_class), (fake_logit, fake_class) = (
            module(x, capability="judge"),
            module(fake, capability="judge"),
        )
        with_logits = functional.binary_cross_entropy_with_logits
        loss = with_logits(real_logit, torch.ones_like(real_logit)) + with_logits(fake_logit, torch.zeros(3).double())
        loss = loss + functional.cross_entropy(real_class, y) + functional.cross_entropy(fake_class, y)
        judges.zero_grad()
        loss.backward()
        judges.step()
        logit, named = module(module(draw, y, capability="generate"), capability="judge")
        makes.zero_grad()
        (with_logits(logit, torch.ones_like(logit)) + functional.cross_entropy(named, y)).backward()
        makes.step()
    for name, leaf in module.named_parameters():
        assert torch.allclose(params[name] + delta[name], leaf, atol=1e-10), name


def test_two_vae_steps_are_those_of_torch():
    objective = ModuleObjective(lambda: cvae_rows((2,), 2, 4, 3), dtype=torch.float64)
    solver = Cvae(lr=0.05, batch_size=None, optimizer="adam")
    params, delta, noise, order = client_delta(solver, objective, steps=2)
    module = filled(objective, params)
    optimizer = torch.optim.Adam(module.parameters(), 0.05)
    for draw, rows in zip(noise, order, strict=True):
        target, made, mean, spread = module(X[rows], Y[rows], draw, capability="reconstruct")
        kl = torch.distributions.kl_divergence(
            torch.distributions.Normal(mean, spread), torch.distributions.Normal(0.0, 1.0)
        )
        optimizer.zero_grad()
        ((made - target).square().sum(1) + kl.sum(1)).mean().backward()
        optimizer.step()
    for name, leaf in module.named_parameters():
        assert torch.allclose(params[name] + delta[name], leaf, atol=1e-10), name


@pytest.mark.parametrize("solver", [Cgan(), Cvae()])
def test_padding_changes_neither_noise_nor_gradients(solver):
    """A masked batch gives the gradient of its real rows."""
    task = small_task("acgan" if isinstance(solver, Cgan) else "cvae")
    params, _ = task.objective.init(Key.of(1))
    shared = {"params": params, "buffers": {}}
    ctx = Context(1, 1, Key.of(0), 0.1)
    x, y = task.block.x[:3], task.block.y[:3]
    wide = torch.cat([x, torch.full((2, x.shape[1]), 7.0).double()]), torch.cat([y, torch.zeros(2).long()])
    mask = torch.tensor([True, True, True, False, False])
    after = [
        solver.step(solver.begin(shared, {}, ctx), grad_at, {"noise": NOISE}, torch.tensor(0), ctx)["params"]
        for grad_at in (
            BatchGradient(task.objective, x, y, None, {}, None),
            BatchGradient(task.objective, *wide, mask, {}, None),
        )
    ]
    for name, leaf in after[0].items():
        assert torch.allclose(leaf, after[1][name], atol=1e-12), name
        assert not torch.equal(leaf, params[name]), name


def test_dropout_masks_differ_between_the_calls_of_a_step():
    """One mask for both losses would tie the generator to the features that the discriminator was just shown."""
    from fedalloy.tasks.dropout import Dropout
    from fedalloy.tasks.models.capabilities import CapabilityModule

    class Drops(CapabilityModule):
        def __init__(self):
            super().__init__()
            self.scale, self.drop = nn.Parameter(torch.ones(1)), Dropout(0.5)

        def classify(self, x):
            return self.drop(x * self.scale)

    masks: list[torch.Tensor] = []

    def loss(model, x, y):
        said = [model("classify", x), model("classify", x)]
        masks.extend(torch.func.debug_unwrap(value).detach() for value in said)
        return sum(said).sum(1)

    objective = ModuleObjective(Drops)
    params, _ = objective.init(Key.of(0))
    grad_at = BatchGradient(objective, torch.ones(4, 50), torch.zeros(4).long(), None, {}, torch.tensor(9))
    grad_at(params, by=loss)
    # The masks are what was kept of ones, doubled; they outlive the gradient's own level as plain numbers.
    assert not torch.equal(*masks)
    assert [0.3 < float((mask > 0).double().mean()) < 0.7 for mask in masks] == [True, True]


@pytest.mark.parametrize("name", ["fedcgan", "fedcvae"])
def test_a_model_that_only_classifies_is_refused_before_the_first_round(name):
    with pytest.raises(SpecError, match=r"needs a model that can .* choose a generative model"):
        run(algorithms.named(name), small_task(), RunConfig(rounds=1, engine="loop"))


@pytest.mark.parametrize(("name", "model"), [("fedcgan", "acgan"), ("fedcvae", "cvae")])
def test_any_weighting_and_server_combines_them_and_samples_come_out(name, model):
    task = small_task(model)
    algorithm = algorithms.named(name, lr=0.01, batch_size=4)
    params, buffers = task.objective.init(Key.of(0))
    state = algorithm.init(params, task.population, buffers)
    ctx = Context(1, task.population, Key.of(1), 0.01)
    ids = torch.arange(task.population)
    keys = Key.of(1).each(ids)
    with torch.no_grad():
        sent = [
            run_client(
                algorithm, task.objective, state["shared"], algorithm.init_client(state["shared"], Key.of(0)),
                Assignment(task.data("train", ids).client(row)), keys.rows(row, row + 1), ctx,
            )
            for row in range(task.population)
        ]  # fmt: skip
    for other in ("fedadam", "fedlayerwise", "ewwa", "median", "fedavgm"):
        rules = algorithms.named(other)
        mixed = Algorithm(algorithm.solver, rules.weighting, rules.server)
        fresh = mixed.init(params, task.population, buffers)
        moved = server_step(mixed, fresh, Cohort.gather(ids.tolist(), sent), ctx).state["shared"]
        maker = mixed.solver.aspect(Generative)
        assert maker is not None
        x, y = maker.synthesise(moved, Key.of(2), 7, task.objective)
        assert x.shape == (21, 4)
        assert torch.bincount(y).tolist() == [7, 7, 7]
        assert bool(x.isfinite().all())


def test_samples_depend_on_the_key_alone():
    task, solver = small_task("acgan"), Cgan()
    params, buffers = task.objective.init(Key.of(0))
    shared = {"params": params, "buffers": buffers}

    def samples(seed: int) -> torch.Tensor:
        made = solver.synthesise(shared, Key.of(seed), 200, task.objective)
        assert made is not None
        return made[0]

    first, again, other = (samples(seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first.unique(dim=0)) == 600

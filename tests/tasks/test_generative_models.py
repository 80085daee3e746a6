"""The generative models: published sizes, values within declared bounds, noise by slot."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.models.build import build
from fedalloy.tasks.models.sides import Frame
from fedalloy.tasks.objective import ModuleObjective

DRAW = torch.tensor(77)
SHAPES = [((1, 32, 32), 10), ((3, 32, 32), 10), ((3, 64, 64), 7), ((1, 64, 64), 11)]


def size(model):
    return sum(leaf.numel() for leaf in model.parameters())


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_published_numbers_of_parameters(norm):
    found = [size(build("acgan", shape, classes, norm=norm)) for shape, classes in SHAPES]
    assert found == [2_931_083, 2_935_179, 4_233_608, 4_246_924]
    found = [size(build("cvae", shape, classes, norm=norm)) for shape, classes in SHAPES]
    assert found == [1_850_881, 1_854_979, 3_056_131, 3_068_417]


@pytest.mark.parametrize("kind", ["acgan", "cvae"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (64,), (1, 28, 28), (3, 13, 16), (1, 40, 64)])
def test_pictures_of_any_side_come_out_as_they_went_in(kind, shape):
    model = build(kind, shape, 3, width=4, latent=5, bounds=(-2.0, 6.0))
    made = model(DRAW, torch.tensor([0, 1, 2, 0]), capability="generate").detach()
    assert made.shape == (4, *shape)
    assert float(made.min()) >= -2
    assert float(made.max()) <= 6
    assert model.eval()(made).shape == (4, 3)


@pytest.mark.parametrize("kind", ["acgan_rows", "cvae_rows"])
def test_rows_are_unbounded_unless_bounds_are_given(kind):
    torch.manual_seed(0)
    y = torch.arange(2).repeat(500)
    free, held = (build(kind, (6,), 2, bounds=bounds) for bounds in (None, (0.0, 1.0)))
    for leaf in free.parameters():
        leaf.data.mul_(3)
    assert float(free(DRAW, y, capability="generate").detach().abs().max()) > 1.5
    made = held(DRAW, y, capability="generate").detach()
    assert 0 <= float(made.min()) <= float(made.max()) <= 1


@pytest.mark.parametrize("kind", ["acgan_rows", "cvae_rows"])
def test_noise_belongs_to_the_slot_not_to_the_batch(kind):
    model = build(kind, (6,), 3)
    y = torch.tensor([2, 0, 1, 1, 2])
    assert torch.allclose(
        model(DRAW, y, capability="generate")[:3], model(DRAW, y[:3], capability="generate"), atol=1e-6
    )
    assert len(model(DRAW, torch.zeros(9, dtype=torch.int64), capability="generate").unique(dim=0)) == 9


def test_the_label_enters_the_decoder_only():
    model = build("cvae_rows", (6,), 3)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    zeros, ones = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    one, other = (model(x, y, DRAW, capability="reconstruct") for y in (zeros, ones))
    assert torch.equal(one[2], other[2])
    assert torch.equal(one[3], other[3])
    assert not torch.equal(one[1], other[1])


def test_the_autoencoder_classifies_by_the_best_reconstruction():
    model = build("cvae_rows", (2,), 2, width=4, latent=2)
    for leaf in model.parameters():
        leaf.data.zero_()
    # Class 0 is decoded to (1, 1), class 1 to (3, 3), whatever the code.
    first, last = model.get_submodule("decoder.0"), model.get_submodule("decoder.2")
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    first.weight.data[0, 2], first.weight.data[0, 3] = 1.0, 3.0
    last.weight.data[:, 0] = 1.0
    found = model(torch.tensor([[1.0, 1.0], [3.0, 2.0]]))
    assert found.tolist() == [[0.0, -8.0], [-5.0, -1.0]]


def test_frames_are_cut_where_they_were_put():
    frame = Frame(5, 11, ground=-1.0)
    x = torch.rand(2, 3, 5, 11)
    wide = frame(x)
    assert wide.shape == (2, 3, 16, 16)
    assert torch.equal(frame.cut(wide), x)
    assert float(wide.sum() - x.sum()) == pytest.approx(-(16 * 16 - 55) * 6, rel=1e-5)
    with pytest.raises(SpecError, match="too large"):
        Frame(65, 10, 0.0)


def test_bounds_come_from_the_data():
    task = make_task({"kind": "digits", "flat": False}, {"kind": "acgan", "width": 4}, clients=2)
    assert task.bounds == (0.0, 1.0)
    assert isinstance(task.objective, ModuleObjective)
    params, buffers = task.objective.init(Key.of(0))
    made, _ = task.objective.apply_capability("generate", params, buffers, (DRAW, torch.arange(10)))
    assert 0 <= float(made.min()) <= float(made.max()) <= 1
    standardised = make_task("digits", "acgan_rows", clients=2, standardise="client")
    assert standardised.bounds is None


def test_what_cannot_be_is_refused():
    with pytest.raises(SpecError, match="declared range"):
        build("acgan", (1, 8, 8), 3, bounds=None)
    with pytest.raises(SpecError, match="two classes or more"):
        build("cvae_rows", (4,), 1)
    with pytest.raises(SpecError, match="cannot 'reconstruct'"):
        build("acgan_rows", (4,), 2)(torch.zeros(1, 4), capability="reconstruct")
    with pytest.raises(SpecError, match="norm: 'layer' is not allowed"):
        build("acgan", (1, 8, 8), 3, norm="layer")

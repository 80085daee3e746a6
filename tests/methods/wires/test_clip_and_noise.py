"""Clipping and noise: lengths, draws by client, and the refusal of weightings without a bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import AlgorithmError, FedalloyError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import LocalSolver, Wire
from fedalloy.core.spec import from_spec
from fedalloy.experiment.recipe import parse, resolve
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.scaffold import Scaffold
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.nova import Nova
from fedalloy.methods.weightings.samples import Samples
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.methods.wires.clip import Clip
from fedalloy.methods.wires.noise import Noise
from fedalloy.methods.wires.scaled_sign import ScaledSign
from fedalloy.methods.wires.topk import TopK
from fedalloy.testing import EngineCase, Jitter, check_engine, check_rule, small_task
from fedalloy.testing.cases import CHANGING

PARAMS = {"a": torch.zeros(200, 50), "b": torch.zeros(3, dtype=torch.float64)}


@given(st.floats(1e-6, 1e6), st.floats(1e-3, 1e3), st.integers(0, 100))
def test_no_update_is_longer_than_the_limit_and_directions_stay(scale, norm, seed):
    x = {name: scale * Key.of(seed).fold(name).normal(2, 3, dtype=torch.float64) for name in "ab"}
    sent, _ = Clip(norm).encode({"delta": x}, {}, {})
    length, after = float(tree.norm(x)), float(tree.norm(sent["delta"]))
    assert after == pytest.approx(min(length, norm))
    assert float(tree.dot(x, sent["delta"])) == pytest.approx(length * after)
    if length <= norm:
        assert all(torch.equal(sent["delta"][name], x[name]) for name in x)


def test_an_update_of_zero_stays_zero():
    sent, _ = Clip(0.5).encode({"delta": {"w": torch.zeros(3)}}, {}, {})
    assert sent["delta"]["w"].tolist() == [0.0, 0.0, 0.0]


def test_noise_has_the_said_size_and_belongs_to_the_client():
    wire = Noise(std=0.5)
    draws = wire.draws({"params": PARAMS}, Key.of(3).each(torch.tensor([4, 9])))
    assert {name: (leaf.shape[1:], leaf.dtype) for name, leaf in draws.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in PARAMS.items()
    }
    alone = wire.draws({"params": PARAMS}, Key.of(3).each(torch.tensor([9])))
    assert torch.equal(draws["a"][1], alone["a"][0])
    sent, _ = wire.encode({"delta": PARAMS}, {}, tree.rows(draws, 0))
    assert float(sent["delta"]["a"].std()) == pytest.approx(0.5, rel=0.05)
    assert abs(float(sent["delta"]["a"].mean())) < 0.02
    assert sent["delta"]["b"].dtype == torch.float64


def test_noise_refuses_a_weighting_without_a_bound():
    for weighting in (Samples(), Uniform()):
        Algorithm(Sgd(), weighting, ServerSgd(), (Clip(), Noise()))
    Algorithm(Sgd(), Nova(), ServerSgd(), (Clip(),))
    with pytest.raises(AlgorithmError, match=r"wire 'Noise' needs a weighting that bounds .* 'Nova' has no such bound"):
        Algorithm(Sgd(), Nova(), ServerSgd(), (Clip(), Noise()))


def noisy(*wire: Wire, solver: LocalSolver | None = None) -> Algorithm:
    return Algorithm(solver or Sgd(), Samples(), ServerSgd(), wire)


@pytest.mark.parametrize(
    "wire",
    [(Noise(),), (Noise(), Clip()), (Clip(), TopK(), Noise()), (Clip(), Noise(), Noise()), (Clip(), Jitter(), Noise())],
)
def test_noise_without_clipping_directly_before_it_is_refused(wire):
    with pytest.raises(
        AlgorithmError, match=r"'Noise' on the part 'delta' does not directly follow clipping: .* 'clip' with part"
    ):
        noisy(*wire)


def test_every_sent_part_needs_clipping_and_noise():
    control = (Clip(part="control"), Noise(part="control", like="control"))
    noisy(Clip(), Noise(), *control, solver=Scaffold())
    noisy(Clip(), Clip(part="control"), Noise(), control[1], solver=Scaffold())  # in between is another part's
    with pytest.raises(AlgorithmError, match="the part 'control' is sent without noise"):
        noisy(Clip(), Noise(), solver=Scaffold())
    with pytest.raises(AlgorithmError, match="on the part 'control' does not directly follow clipping"):
        noisy(Clip(), Noise(), control[1], solver=Scaffold())
    with pytest.raises(AlgorithmError, match=r"'Clip' works on the part 'control', which the solver does not send"):
        noisy(*control)


def test_a_model_with_buffers_is_refused_before_the_first_round():
    params, buffers = small_task("batchnorm").objective.init(Key.of(0))
    with pytest.raises(AlgorithmError, match="does not work on buffers, and those of this model"):
        noisy(Clip(), Noise()).init(params, 5, buffers)
    noisy(Clip()).init(params, 5, buffers)


def test_a_recipe_with_noise_alone_is_refused():
    tables: dict[str, Any] = {"task": {"dataset": "digits"}, "partition": {"clients": 3}, "solver": {"kind": "sgd"}}
    good = resolve(parse({**tables, "wire": [{"kind": "clip"}, {"kind": "noise"}]}))
    assert [type(wire) for wire in good.algorithm.wire] == [Clip, Noise]
    with pytest.raises(FedalloyError, match="does not directly follow clipping"):
        resolve(parse({**tables, "wire": [{"kind": "noise"}]}))


def test_noise_claims_no_privacy():
    """What it gives is said where users look; what it does not give is not claimed."""
    text = " ".join((Noise.__doc__ or "").split())
    assert "no privacy guarantee" in text
    assert "seed" in text
    assert "differential privacy" not in text


@pytest.mark.parametrize("engine", [{"kind": "loop"}, {"kind": "batched", "kernel": "mapped"}])
def test_engines_agree_on_a_whole_chain(engine):
    algorithm = Algorithm(Sgd(lr=0.3, batch_size=3), Samples(), ServerSgd(), (Clip(0.1), Noise(0.05), ScaledSign()))
    case = EngineCase("chain", "draws and memories", algorithm, small_task(), CHANGING)
    assert check_engine(from_spec("engine", engine), [case]) == []


@pytest.mark.parametrize("wire", [Clip(0.2), Noise(0.3)])
def test_every_promise_of_a_wire(wire):
    assert check_rule("wire", wire) == []


@pytest.mark.parametrize("make", [lambda: Clip(0.0), lambda: Clip(-1.0), lambda: Noise(-0.1)])
def test_settings_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="must"):
        make()


@pytest.mark.parametrize("shape", [(), (1, 3), (4, 3)])
def test_noise_gives_every_entry_a_number_of_its_own(shape):
    wire = Noise(std=0.5, like="form")
    draws = wire.draws({"form": {"b": torch.zeros(shape)}}, Key.of(0))
    with pytest.raises(ValueError, match="'form' and 'delta' have different shapes"):
        wire.encode({"delta": {"b": torch.zeros(3)}}, {}, draws)

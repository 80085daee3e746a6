"""Speech commands: energies at the stated scale, speakers with enough clips, silence where it was asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedalloy
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.speech_commands import SpeechCommands
from tests.tasks.real_data import use_real_data

KEY = Key.of(0)


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> None:
    use_real_data(SpeechCommands, monkeypatch)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Speaker b has one clip, a and c have three, and there are five silent clips."""
    client = np.array([-1, 0, 2, -1, 0, 2, 1, 0, 2, -1, -1, -1])
    x = np.zeros((12, 49, 40), dtype=np.uint8)
    x[:, 0, 0], x[:, 0, 1] = 255, np.arange(12)
    np.savez(
        tmp_path / "speech_commands_v2_test_logmel.npz",
        x=x, y=np.arange(12), client=client, scale=np.array([-14.0, 10.0]), speaker=np.array(["a", "b", "c"]),
    )  # fmt: skip
    monkeypatch.setenv("FEDALLOY_DATA", str(tmp_path))


def test_the_published_counts(real):
    data, everyone = SpeechCommands().load(KEY), SpeechCommands(min_clips=1).load(KEY)
    assert everyone.x.shape == (4890, 1, 49, 40)
    assert torch.bincount(everyone.y).tolist() == [408, 408, 419, 405, 425, 406, 412, 396, 396, 402, 411, 402]
    assert everyone.names is not None
    assert data.names is not None
    assert (len(everyone.names), len(data.names)) == (239, 155)
    assert data.owner is not None
    assert int(torch.bincount(data.owner[data.owner >= 0]).min()) >= 10
    assert make_task("speech_commands").population == 155


def test_energies_are_dequantised(small):
    logs, unit = SpeechCommands(1, scale="log").load(KEY).x, SpeechCommands(1).load(KEY).x
    assert logs[5, 0, 0, :3].tolist() == pytest.approx([10.0, -14 + 24 * 5 / 255, -14.0])
    assert (float(unit.min()), float(unit.max())) == (-1.0, 1.0)
    torch.testing.assert_close(logs, -2 + 12 * unit)


def test_rare_speakers_are_left_out_with_their_clips(small):
    data = SpeechCommands(min_clips=2).load(KEY)
    assert data.names == ("a", "c")
    assert data.owner is not None
    assert data.owner.tolist() == [-1, 0, 1, -1, 0, 1, 0, 1, -1, -1, -1]
    assert 6 not in data.y.tolist()
    with pytest.raises(DataError, match="no speaker has 4 clips; at most 3"):
        SpeechCommands(min_clips=4).load(KEY)


def test_silence_is_nobodys_or_dealt_in_turn(small):
    assert make_task({"kind": "speech_commands", "min_clips": 2}).manifest.sizes.tolist() == [3, 3]
    shared = make_task({"kind": "speech_commands", "min_clips": 2, "silence": "dealt"})
    assert shared.manifest.sizes.tolist() == [6, 5]
    assert (
        make_task({"kind": "speech_commands"} | {"min_clips": 1}, partition="iid", clients=2).manifest.sizes.sum() == 12
    )


def test_the_habits(small):
    task = make_task({"kind": "speech_commands", "min_clips": 1})
    assert task.metrics == ("accuracy", "top5", "loss")
    assert "head.weight" in task.objective.init(KEY)[0]


@pytest.mark.parametrize("arguments", [{"min_clips": 0}, {"silence": "everybody"}, {"scale": "linear"}])
def test_senseless_arguments_are_refused(arguments):
    with pytest.raises(SpecError, match="allowed"):
        SpeechCommands(**arguments)


def test_federated_averaging_lowers_the_loss(real):
    task = make_task("speech_commands", partition="natural", clients=12)
    algorithm = fedalloy.algorithms.fedavg(lr=0.05, momentum=0.9, epochs=3, batch_size=10)
    result = fedalloy.fit(algorithm, task, rounds=4, engine="loop")
    losses = [row["evaluation"]["loss"]["mean"] for row in result.rounds()]
    assert losses[-1] < losses[0] < 2.6

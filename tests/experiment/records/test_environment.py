"""A run says what it ran on, and nothing about who ran it."""

from __future__ import annotations

import getpass
import json
import os
import platform
from pathlib import Path

import torch

from fedalloy.experiment.records.environment import describe


def test_versions_threads_and_device_are_named() -> None:
    told = describe()
    assert told["torch"].startswith(torch.__version__.split("+")[0])
    assert told["python"] == platform.python_version()
    assert told["threads"] == torch.get_num_threads()
    assert {"fedalloy", "numpy", "safetensors", "cpus", "system", "machine", "device"} <= told.keys()


def test_it_is_json_and_does_not_tell_where_or_who() -> None:
    text = json.dumps(describe(torch.device("cpu")))
    assert str(Path.home()) not in text
    assert os.getcwd() not in text
    values = json.loads(text).values()
    assert platform.node() not in values
    assert getpass.getuser() not in values

"""The script for the GPU, with tiny settings on the CPU: it stops in time, goes on, and leaves curve and samples."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.synthetic_gpu import main

TINY = ["--dataset", "digits", "--clients", "2", "--rounds", "3", "--evaluate-every", "2", "--classifier-epochs", "3"]
MODELS = {"fedevg": "energy_cnn", "fedcgan": "acgan_rows", "fedcvae": "cvae_rows"}


@pytest.mark.parametrize("method", sorted(MODELS))
def test_a_run_in_two_sittings(method, tmp_path):
    where = ["--folder", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--device", "cpu"]
    more = ["--model", MODELS[method], "--classifier", "logistic", "--batch", "256", *TINY]
    stopped = main([method, *where, *more, "--seconds", "0"])
    assert (stopped["status"], stopped["rounds"]) == ("stopped", 1)
    done = main([method, *where, *more])
    assert (done["status"], done["rounds"]) == ("finished", 3)
    assert [row["round"] for row in done["curve"]] == [2, 3]
    assert done["bytes"]["bytes_up"] > 0
    assert (done["bytes"]["bytes_model"] > 0) == (method == "fedevg")
    assert json.loads((tmp_path / "out" / f"{method}.json").read_text())["rounds"] == 3
    with np.load(tmp_path / "out" / f"{method}.npz") as arrays:
        assert arrays["x"].shape[0] == arrays["y"].shape[0] == 100
        assert arrays["history"].shape[:2] == (len(arrays["rounds"]), 100)
        assert 2 in arrays["rounds"].tolist()

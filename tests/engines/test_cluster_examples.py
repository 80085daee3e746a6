"""The recipes for clusters, as far as one machine can run them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs pip install 'fedalloy[ray]'")


def test_the_file_for_ray_up_fits_rays_schema(root):
    import yaml  # type: ignore[import-untyped]
    from ray.autoscaler._private.util import prepare_config, validate_config

    told = yaml.safe_load((root / "examples" / "cluster" / "ray-up.yaml").read_text())
    validate_config(prepare_config(told))
    with pytest.raises(Exception, match="max_wrokers"):
        validate_config(prepare_config({**told, "max_wrokers": 3}))


def test_the_script_for_slurm_is_bash(root):
    done = subprocess.run(["bash", "-n", str(root / "examples" / "cluster" / "slurm.sh")], check=False)
    assert done.returncode == 0


STAND_INS = {
    "scontrol": "#!/bin/bash\nprintf 'one\\ntwo\\n'\n",
    "hostname": "#!/bin/bash\necho 127.0.0.1\n",
    # The options that say where are dropped: both nodes are this machine.
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "fedalloy": f'#!/bin/bash\nexec {sys.executable} -m fedalloy "$@"\n',
}


@pytest.mark.skipif("FEDALLOY_LONG" not in os.environ, reason="starts two raylets: make test-long")
def test_the_script_for_slurm_runs_on_two_raylets(root, tmp_path):
    """With stand-ins for SLURM's commands, which start everything on this machine."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(text)
        (programs / name).chmod((programs / name).stat().st_mode | stat.S_IEXEC)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {
        **os.environ, "PATH": path, "PYTHONPATH": str(root / "src"), "SLURM_JOB_NODELIST": "x", "SLURM_JOB_ID": "4711",
        "SLURM_CPUS_PER_TASK": "1", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }  # fmt: skip
    line = ["bash", str(root / "examples/cluster/slurm.sh"), str(root / "recipes/quickstart.toml"), "--quick"]
    done = subprocess.run(
        [*line, "-o", str(tmp_path / "run")],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"

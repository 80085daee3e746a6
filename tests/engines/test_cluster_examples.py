"""The recipes for clusters, as far as one machine can run them."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
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


WAITING = """
import os, sys, time
import ray

address = next(one.partition("=")[2] for one in sys.argv if one.startswith("engine.address="))
ray.init(address=address, log_to_driver=False)
end = time.monotonic() + float(os.environ.get("PATIENCE", "120"))
while sum(node["Alive"] for node in ray.nodes()) < 2 and time.monotonic() < end:
    time.sleep(0.2)
print("raylets:", sum(node["Alive"] for node in ray.nodes()), flush=True)
ray.shutdown()
os.execv(sys.executable, [sys.executable, "-m", "fedalloy", *sys.argv[1:]])
"""
STAND_INS = {
    "scontrol": "#!/bin/bash\nprintf 'one\\ntwo\\n'\n",
    "hostname": "#!/bin/bash\necho 127.0.0.1\n",
    # The options that say where are dropped: both nodes are this machine.
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "fedalloy": f'#!/bin/bash\nexec {sys.executable} "${{0%/*}}/waiting.py" "$@"\n',
    "waiting.py": WAITING,
}
ALONE = ["unshare", "--map-root-user", "--net", "bash", "-c", 'ip link set lo up && exec "$@"', "alone"]
"""In a network that has only a loopback address: nobody reaches Ray from outside, and both raylets join."""


def may_be_alone() -> bool:
    """Whether this system lets us have a network of our own."""
    if "FEDALLOY_LONG" not in os.environ or not all(map(shutil.which, ("unshare", "ip"))):
        return False
    return subprocess.run([*ALONE, "true"], check=False, capture_output=True).returncode == 0


def run_script(root: Path, place: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """The script with stand-ins for SLURM's commands, which start everything on this machine."""
    programs = place / "bin"
    programs.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(text)
        (programs / name).chmod((programs / name).stat().st_mode | stat.S_IEXEC)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {
        **os.environ, "PATH": path, "PYTHONPATH": str(root / "src"), "SLURM_JOB_NODELIST": "x", "SLURM_JOB_ID": "4711",
        "SLURM_CPUS_PER_TASK": "1", **more,
    }  # fmt: skip
    line = ["bash", str(root / "examples/cluster/slurm.sh"), str(root / "recipes/quickstart.toml"), "--quick"]
    # A folder of its own, with a short name for sockets: other programs must not find the address that Ray notes in it.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as noted:
        return subprocess.run(
            [*ALONE, *line, "-o", str(place / "run")],
            env={**env, "RAY_TMPDIR": noted}, cwd=place, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip


@pytest.mark.skipif(not may_be_alone(), reason="starts two raylets in a network of their own: make test-long")
@pytest.mark.parametrize("raylets", [2, 1])
def test_the_script_for_slurm_runs_on_two_raylets(root, tmp_path, raylets):
    """And says so if a node's Ray does not start: with this setting of Ray's only the first one does."""
    done = run_script(
        root, tmp_path, **({} if raylets == 2 else {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "PATIENCE": "5"})
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    assert f"raylets: {raylets}" in done.stdout
    assert ("Ray on two ended before the run" in done.stderr) == (raylets == 1)
    assert "Ray on one" not in done.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"

"""Run experiments on a bare machine with a GPU, and bring the runs back.

Such a machine gets one folder, returns a few small files, has torch, numpy, scipy and safetensors, and cannot install
anything. Here, fill the folder with the code of a commit, the missing packages, data files and the runs to continue:

    python scripts/device_run.py load carried --data mnist_train.npz mnist_test.npz --runs runs

There, work in a folder that survives between calls. Commands are separated by ``--``; they run one after another, and
are asked to stop cleanly when the minutes are over:

    python3 carried/device_run.py work carried /tmp/there "$OUT" --minutes 9 -- \
        reproduce s1-rounds-to-95 --set engine.device=cuda -j 14

Here again, unpack the returned files; a run that is further along here is kept:

    python scripts/device_run.py unload FILES runs

Only the standard library is used, so the remote part runs before anything is unpacked.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

PACKAGES = ("pydantic", "typer", "rich")
"""Packages that fedalloy's command line needs in addition to those of such a machine."""
MOST_FILES, MOST_BYTES, MOST_TOGETHER = 8, 15 * 2**20, 62 * 2**20
"""What may be returned: this many files of this size, a little below the limits of 16 MiB each and 64 MiB in total."""
KERNELS = "src/fedalloy/core/native/kernels.so"
CLEAN_STOP = 45.0
"""Seconds for runs to end their round and write a checkpoint."""


def main(arguments: Sequence[str] | None = None) -> None:
    """One of the three steps: load, work, unload."""
    words, *commands = _split(list(sys.argv[1:] if arguments is None else arguments))
    asked = _parser().parse_args(words)
    if asked.step == "load":
        load(asked.folder, asked.commit, asked.data, asked.runs)
    elif asked.step == "work":
        more = {"at_once": asked.at_once, "models": asked.models, "cpu": asked.cpu}
        sys.exit(work(asked.carried, asked.place, asked.out, asked.minutes, commands, **more))
    else:
        print("\n".join(unload(asked.files, asked.runs)))


def load(folder: Path, commit: str, data: Sequence[str], runs: Path | None) -> None:
    """Fill ``folder`` with everything the remote machine needs."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "data").mkdir(parents=True)
    shutil.copy(__file__, folder / "device_run.py")
    code = folder / "code.tar"
    subprocess.run(["git", "archive", "-o", str(code), commit, "src", "recipes"], check=True)
    _install(folder / "packages")
    carry_kernels(Path(KERNELS), folder)
    for name in data:
        shutil.copy(_data_file(name), folder / "data")
    if runs is not None:
        pack(runs, folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 2**20:.1f} MiB of {subprocess.getoutput(f'git rev-parse --short {commit}')}")


def carry_kernels(kernels: Path, folder: Path) -> None:
    """The kernels in C, which git does not have: without them draws take a hundred times as long."""
    if kernels.exists():
        shutil.copy(kernels, folder / kernels.name)
    else:
        print(f"{kernels} is not there, so draws will be slow: make it with python -m fedalloy.core.native.building")


def work(
    carried: Path,
    place: Path,
    out: Path,
    minutes: float,
    commands: Sequence[list[str]],
    *,
    at_once: bool = False,
    models: Sequence[str] = (),
    cpu: bool = False,
) -> int:
    """Run the commands of fedalloy in ``place`` until they or the minutes end, then pack the runs into ``out``."""
    end = time.monotonic() + 60 * minutes
    _unpack_once(carried, place)
    code = 0
    env = _environment(carried, place, cpu)
    with nullcontext() if cpu else _shared_card():
        if at_once:
            code = _wait([_start(words, place, env) for words in commands], end)
        else:
            for words in commands:
                if time.monotonic() < end:
                    code = _wait([_start(words, place, env)], end) or code
    for line in pack(place / "runs", out, models):
        print(line)
    return code


def unload(files: Path, runs: Path) -> list[str]:
    """Unpack returned files below ``runs``; returns what was done. A run that is further along here is kept."""
    told = []
    for archive in sorted(files.glob("runs-*.tar.xz")):
        with tarfile.open(archive) as tar:
            for run, members in _by_run(tar).items():
                if _round_of(tar, members) < _round_at(runs / run):
                    told.append(f"kept   {run}: further here")
                    continue
                tar.extractall(runs, members=members, filter="data")
                told.append(f"fetched {run}")
    return told


def pack(runs: Path, out: Path, models: Sequence[str] = ()) -> list[str]:
    """Write the runs below a folder as ``runs-*.tar.xz``; returns what was left out.

    Checkpoints and client states of ended runs are left out, since they are only needed to continue, unless one of the
    ``models`` is part of the run's path. A run that does not fit is left out completely.
    """
    out.mkdir(parents=True, exist_ok=True)
    sized = sorted((_packed_size(runs, files), run, files) for run, files in _chosen(runs, models).items())
    told: list[str] = []
    batch: list[Path] = []
    filled = together = number = 0
    for size, run, files in sized:  # the smallest first, so that a large run does not block others
        if filled + size > MOST_BYTES and batch:
            number, batch, filled = _write(out, number, _tar(runs, batch)), [], 0
        if size > MOST_BYTES or number >= MOST_FILES or together + size > MOST_TOGETHER:
            told.append(f"left   {run.relative_to(runs)}: {size / 2**20:.1f} MiB do not fit")
            continue
        batch, filled, together = batch + files, filled + size, together + size
    if batch:
        number = _write(out, number, _tar(runs, batch))
    return [*told, f"packed {number} files"]


def _chosen(runs: Path, models: Sequence[str]) -> dict[Path, list[Path]]:
    """The files of every run to transfer."""
    found = {}
    for run in sorted(file.parent for file in runs.rglob("recipe.toml")):
        kept = any(name in run.relative_to(runs).as_posix() for name in models)
        found[run] = [file for file in sorted(run.rglob("*")) if file.is_file() and _travels(file, run, kept)]
    return found


def _packed_size(root: Path, files: Sequence[Path]) -> int:
    return len(_tar(root, files))


def _write(out: Path, number: int, packed: bytes) -> int:
    (out / f"runs-{number}.tar.xz").write_bytes(packed)
    return number + 1


def _tar(root: Path, files: Sequence[Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=1) as tar:
        for file in files:
            tar.add(file, file.relative_to(root).as_posix())
    return buffer.getvalue()


def _travels(file: Path, run: Path, kept: bool) -> bool:
    """All files of an unfinished run; of an ended one the records, and its last model if requested."""
    above = file.relative_to(run).parts[:-1]
    if file.name == "lock":
        return False
    if _state(run) not in ("finished", "failed"):
        return True
    return "clients" not in above and (kept or "checkpoints" not in above)


def _state(run: Path) -> str:
    try:
        return str(json.loads((run / "status.json").read_text(encoding="utf-8"))["state"])
    except (OSError, ValueError, KeyError):
        return "interrupted"


def _round_at(run: Path) -> int:
    try:
        return int(json.loads((run / "status.json").read_text(encoding="utf-8"))["round"])
    except (OSError, ValueError, KeyError):
        return -1


def _round_of(tar: tarfile.TarFile, members: Sequence[tarfile.TarInfo]) -> int:
    found = next((member for member in members if member.name.endswith("/status.json")), None)
    file = tar.extractfile(found) if found else None
    return int(json.loads(file.read())["round"]) if file else 0


def _by_run(tar: tarfile.TarFile) -> dict[str, list[tarfile.TarInfo]]:
    """The members of an archive by the run they belong to."""
    members = tar.getmembers()
    runs = [member.name.removesuffix("/recipe.toml") for member in members if member.name.endswith("/recipe.toml")]
    return {run: [member for member in members if member.name.startswith(run + "/")] for run in runs}


def _unpack_once(carried: Path, place: Path) -> None:
    """Unpack code and earlier runs, unless an earlier call did."""
    if (place / "src").exists():
        return
    place.mkdir(parents=True, exist_ok=True)
    with tarfile.open(carried / "code.tar") as tar:
        tar.extractall(place, filter="data")
    kernels = carried / Path(KERNELS).name
    if kernels.exists():
        shutil.copy(kernels, place / KERNELS)
    unload(carried, place / "runs")


def _environment(carried: Path, place: Path, cpu: bool) -> dict[str, str]:
    paths = [str(place / "src"), str((carried / "packages").resolve())]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "FEDALLOY_DATA": str((carried / "data").resolve())}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TERM": "dumb"}
    return env | {"CUDA_VISIBLE_DEVICES": ""} if cpu else env


def _start(words: Sequence[str], place: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    print("$ fedalloy", *words, flush=True)
    return subprocess.Popen([sys.executable, "-m", "fedalloy", *words], cwd=place, env=env, start_new_session=True)


def _wait(started: Sequence[subprocess.Popen[bytes]], end: float) -> int:
    """The first exit code that is not 0; processes still running at the end are asked to stop."""
    while any(one.poll() is None for one in started):
        if time.monotonic() > end:
            _stop(started)
        time.sleep(0.5)
    return next((one.returncode for one in started if one.returncode), 0)


def _stop(started: Sequence[subprocess.Popen[bytes]]) -> None:
    for one in started:
        if one.poll() is None:
            one.send_signal(signal.SIGTERM)
    limit = time.monotonic() + CLEAN_STOP
    while any(one.poll() is None for one in started) and time.monotonic() < limit:
        time.sleep(0.2)
    for one in started:
        if one.poll() is None:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait()


@contextmanager
def _shared_card() -> Iterator[None]:
    """Start NVIDIA's multi-process service, so that several processes run on the GPU at the same time."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield
        return
    subprocess.run([control, "-d"], check=False)
    try:
        yield
    finally:
        subprocess.run([control], input=b"quit\n", check=False)


def _install(folder: Path) -> None:
    """Packages for the remote machine's Python, as wheels that need no compiler."""
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--target", str(folder)]
    kind = ["--python-version", "3.12", "--platform", "manylinux2014_x86_64", "--only-binary=:all:"]
    subprocess.run([*pip, *kind, "-c", "constraints.txt", *PACKAGES], check=True)


def _data_file(name: str) -> Path:
    folder = os.environ.get("FEDALLOY_DATA")
    if folder is None or not (Path(folder) / name).is_file():
        raise SystemExit(f"{name} is not in FEDALLOY_DATA ({folder or 'not set'}): name the folder that has it")
    return Path(folder) / name


def _split(words: list[str]) -> list[list[str]]:
    """Lists of words between ``--``."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def _parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0], formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.epilog = "\n".join(lines[2:])
    steps = parser.add_subparsers(dest="step", required=True)
    there = steps.add_parser("load", help="fill a folder with code, packages, data and runs")
    there.add_argument("folder", type=Path)
    there.add_argument("--commit", default="HEAD", help="the commit whose code is used")
    there.add_argument("--data", nargs="*", default=[], metavar="FILE", help="names in FEDALLOY_DATA")
    there.add_argument("--runs", type=Path, help="a folder of runs to continue")
    at_work = steps.add_parser("work", help="run fedalloy commands on the remote machine")
    at_work.add_argument("carried", type=Path)
    at_work.add_argument("place", type=Path, help="a folder that survives between calls")
    at_work.add_argument("out", type=Path, help="where the packed runs go")
    at_work.add_argument("--minutes", type=float, required=True)
    at_work.add_argument("--at-once", action="store_true", help="run all commands in parallel")
    at_work.add_argument("--cpu", action="store_true", help="hide the GPU, which another command measures meanwhile")
    at_work.add_argument(
        "--models", nargs="*", default=[], metavar="NAME", help="ended runs whose model is returned too"
    )
    back = steps.add_parser("unload", help="unpack the returned files")
    back.add_argument("files", type=Path)
    back.add_argument("runs", type=Path)
    return parser


if __name__ == "__main__":
    main()

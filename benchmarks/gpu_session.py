"""All that is still to be measured on a lent GPU, as three commands that end in time.

    PYTHONPATH=src python -m benchmarks.gpu_session first --data FOLDER --out OUT [--minutes 9.5]
    PYTHONPATH=src python -m benchmarks.gpu_session second --data FOLDER --out OUT
    PYTHONPATH=src python -m benchmarks.gpu_session third --data FOLDER --out OUT --minutes 7.5
    PYTHONPATH=src python -m benchmarks.gpu_session PLAN --out OUT

``FOLDER`` holds ``cifar10_train_a.npz`` and ``cifar10_test.npz`` (first), ``mnist_train.npz`` and ``mnist_test.npz``
(second and third). ``--tiny`` runs a plan with the smallest sizes on a CPU, for which no file is needed: try a plan
with it before it costs time on a card. All results lie in ``OUT``, in at most eight files, and are written as they are
found; what a step prints is in ``log.txt``, what became of it and how long it took in ``steps.txt``. A step that fails
or is too slow ends alone.

The kernels in C must be on the machine, or draws take a hundred times as long: they are ignored by git, so carry
``src/fedalloy/core/native/kernels.so``. ``kernels.jsonl`` says in its first row whether they were found.

*First call*, expected 9 minutes: compile all models side by side, with the conformance checks and their planted
faults, which are not timed, beside them (3 minutes; 16 cores); ``h200`` before and after in one process (2.5); errors
of the updates against float64 (0.3); both CNN profiles, before and after (0.7); ResNet-20 with batches of 64, clients
one after another and mapped (0.3); one, two and four processes on the card, ResNet-20 (0.6); models x methods (1.5).

*Second call*, expected 9.2 minutes: compile (1); the generative methods' rounds, alone on the card (1.7); three seeds
in tf32 and bf16, side by side, as nothing of them is timed (6.2: FedEvg 20 rounds of 20 local steps, FedCGAN 15,
FedCVAE 20, and FedCVAE with the mapped kernel of before); the comparison (0.1).

*Third call*, expected 7.3 minutes: three seeds of FedEvg and FedCGAN with the mapped kernel of before (5.3), to be
compared afterwards with the rows of the second call; one, two and four processes on the card, FedEvg (2). All these
times are estimates from earlier calls. What matters most runs first; when the minutes are over, the rest is listed as
not run. Every row is written when it is found, so a call that ends too soon keeps what it has.

Half an hour of a card, of which its start takes one or two minutes, is these three calls and no more, one right after
the other, since an idle machine is given back after half a minute, and the compiler's cache with it. Before::

    mkdir -p carried/data
    cp DATA/cifar10_train_a.npz DATA/cifar10_test.npz DATA/mnist_train.npz DATA/mnist_test.npz carried/data
    python -m fedalloy.core.native.building

Each call carries ``carried/data`` and ``src/fedalloy/core/native/kernels.so`` (51 MB, and 12 MB of code)::

    PYTHONPATH=src python3 -m benchmarks.gpu_session first --data carried/data --out "$OUT"
    PYTHONPATH=src python3 -m benchmarks.gpu_session second --data carried/data --out "$OUT"
    PYTHONPATH=src python3 -m benchmarks.gpu_session third --data carried/data --out "$OUT" --minutes 7.5

After the last one, with the files of the second and third call in folders of these names::

    mkdir both && cat second/generative.jsonl third/generative.jsonl > both/generative.jsonl
    PYTHONPATH=src python -m benchmarks.generative_quality compare --out both --keep both

Long experiments need sessions of their own; minutes a run, estimated from the times of single rounds:

- FedEvg on MNIST, ten clients, whole epochs. alpha = 1, 100 rounds: 8.5 a seed in tf32 (6.3 in bf16), one call::

    PYTHONPATH=src python3 -m benchmarks.synthetic_gpu fedevg --data carried/data --side 32 --alpha 1 --rounds 100 \\
        --evaluate-every 25 --seconds 530 --seed 0 --folder /tmp/fedevg-1-0 --out "$OUT"

  alpha = 0.01 with the published 500 rounds: 39 a seed in tf32, 29 in bf16, so four or five calls with the same
  ``--folder`` on the same machine (``--alpha 0.01 --rounds 500 --evaluate-every 50``), more than half an hour.
- SuPerFed on MNIST, fifty clients (``fedalloy reproduce s4-ch2-mnist-50-long``): the steps of SuPerFed, APFL and Ditto
  are fused on a CPU, where a round of SuPerFed-MM takes 1.4 s of one core, 12 minutes a run of 500 rounds, as much as
  on a card (1.2 s a round): it needs none.
- EWWA on CIFAR-10 (``s2-cifar10``, sixty runs of 500 rounds): ResNet-20 has BatchNorm, whose steps run without graphs,
  which nobody has timed; at 30 ms a step a run takes 26 minutes, and fourteen side by side take 16 cores. The data,
  68 MB, are more than one call carries: the first one copies ``cifar10_train_b.npz`` to a folder outside of the
  checkout, the second brings the other two files. Runs come back with ``scripts/device_run.py`` and go on later.

A ``PLAN`` is a file with one step a line: seconds, then the command's words after ``python3``. Neighbouring lines that
begin with ``&`` run side by side and share the processors; what ``&-`` finds is not kept: this is how the compiler's
cache is filled. Time is kept for a step whose seconds end in ``!``.
``OUT/``, ``KEEP/`` and ``DATA/`` in a line are the folders of results, of what only later steps need, and of the data.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

FIRST = """
& 240 -m benchmarks.h200 --conform
&- 200 -m benchmarks.h200 --data DATA/ --timed --rounds 3 --only cnn-50x50
&- 200 -m benchmarks.h200 --data DATA/ --timed --rounds 3 --only resnet20-3x64
&- 200 -m benchmarks.h200 --data DATA/ --timed --rounds 3 --only resnet20-50x10
&- 200 -m benchmarks.gpu_kernels --warm --only table:cnn
&- 200 -m benchmarks.gpu_kernels --warm --only table:resnet20
&- 200 -m benchmarks.gpu_kernels --warm --only table:attention
&- 200 -m benchmarks.gpu_kernels --warm --only table:lora
240 -m benchmarks.h200 --data DATA/ --timed --rounds 200 --out OUT/h200.json
60 -m benchmarks.gpu_kernels --only errors
60 -m benchmarks.gpu_kernels --only cnn:tf32 cnn:bf16
40 -m benchmarks.gpu_kernels --only resnet:3x64:best,mapped
80 -m benchmarks.gpu_kernels --only sharing:resnet20
60 -m benchmarks.gpu_kernels --only table:cnn
60 -m benchmarks.gpu_kernels --only table:resnet20
60 -m benchmarks.gpu_kernels --only table:attention
60 -m benchmarks.gpu_kernels --only table:lora
"""
SECOND = """
&- 120 -m benchmarks.gpu_kernels --warm --only generative:fedevg:tf32
&- 120 -m benchmarks.gpu_kernels --warm --only generative:fedevg:bf16
&- 120 -m benchmarks.gpu_kernels --warm --only generative:fedcgan:tf32
&- 120 -m benchmarks.gpu_kernels --warm --only generative:fedcgan:bf16
&- 120 -m benchmarks.gpu_kernels --warm --only generative:fedcvae:tf32
&- 120 -m benchmarks.gpu_kernels --warm --only generative:fedcvae:bf16
50 -m benchmarks.gpu_kernels --only generative:fedcvae:tf32 generative:fedcvae:bf16
60 -m benchmarks.gpu_kernels --only generative:fedcgan:tf32 generative:fedcgan:bf16
90 -m benchmarks.gpu_kernels --only generative:fedevg:tf32 generative:fedevg:bf16
& 400 -m benchmarks.generative_quality train fedevg tf32 --data DATA/ --out OUT/ --keep KEEP/
& 400 -m benchmarks.generative_quality train fedevg bf16 --data DATA/ --out OUT/ --keep KEEP/
& 400 -m benchmarks.generative_quality train fedcgan tf32 --data DATA/ --out OUT/ --keep KEEP/
& 400 -m benchmarks.generative_quality train fedcgan bf16 --data DATA/ --out OUT/ --keep KEEP/
& 400 -m benchmarks.generative_quality train fedcvae tf32 --data DATA/ --out OUT/ --keep KEEP/
& 400 -m benchmarks.generative_quality train fedcvae bf16 --data DATA/ --out OUT/ --keep KEEP/
& 400 -m benchmarks.generative_quality train fedcvae before --data DATA/ --out OUT/ --keep KEEP/
30! -m benchmarks.generative_quality compare --out OUT/ --keep KEEP/
"""
THIRD = """
& 330 -m benchmarks.generative_quality train fedevg before --data DATA/ --out OUT/ --keep KEEP/
& 330 -m benchmarks.generative_quality train fedcgan before --data DATA/ --out OUT/ --keep KEEP/
150 -m benchmarks.gpu_kernels --only sharing:fedevg
"""
PLANS = {"first": FIRST, "second": SECOND, "third": THIRD}
RESERVE = 15.0
"""Seconds that are kept for steps marked with ``!``, which run even if nothing else is left to do."""


@dataclass(frozen=True)
class Step:
    """A command, its limit in seconds, whether it runs beside its neighbours, whether its findings are kept, and
    whether time is kept for it."""

    seconds: float
    words: tuple[str, ...]
    beside: bool = False
    kept: bool = True
    last: bool = False

    @staticmethod
    def read(line: str, folders: dict[str, Path]) -> Step:
        """A line of a plan.

        >>> Step.read("&- 9 -m this --out OUT/x", {"OUT/": Path("/o")}).words
        ('-m', 'this', '--out', '/o/x')
        """
        words = line.split()
        mark = words.pop(0) if words[0].startswith("&") else ""
        seconds, words = words[0], words[1:]
        for name, folder in folders.items():
            words = [str(folder / word[len(name) :]) if word.startswith(name) else word for word in words]
        return Step(float(seconds.rstrip("!")), tuple(words), bool(mark), mark != "&-", seconds.endswith("!"))

    def call(self, out: Path) -> list[str]:
        """The words, and where findings go if they are kept."""
        adds = self.kept and "benchmarks.gpu_kernels" in self.words
        return [*self.words, *(["--out", str(out)] if adds else [])]


def steps_of(plan: str, folders: dict[str, Path]) -> list[Step]:
    """The steps of a plan; lines that begin with # are left out."""
    lines = (line.strip() for line in plan.splitlines())
    return [Step.read(line, folders) for line in lines if line and not line.startswith("#")]


def groups(steps: list[Step]) -> Iterator[list[Step]]:
    """Neighbours that run side by side, and every other step alone."""
    for beside, neighbours in itertools.groupby(steps, lambda step: step.beside):
        some = list(neighbours)
        yield from [some] if beside else ([one] for one in some)


def start(words: list[str], log: Path, beside: int = 1) -> subprocess.Popen[bytes]:
    """Start a step; what it prints is added to the log when it is written. Those that run side by side share the
    processors, which each would otherwise use all for its draws and again for its compiler."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if beside > 1:
        share = str(max(1, (os.cpu_count() or 1) // beside))
        env |= {"OMP_NUM_THREADS": share, "TORCHINDUCTOR_COMPILE_THREADS": share}
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, *words], stdout=file, stderr=file, start_new_session=True, env=env)


def ended(started: list[tuple[Step, subprocess.Popen[bytes]]], end: float) -> Iterator[tuple[Step, float, str]]:
    """Every step as soon as it is over, with its seconds and its exit status; one that is too slow is ended."""
    begin, running = time.monotonic(), list(started)
    while running:
        now = time.monotonic()
        for one in list(running):
            step, process = one
            late = now > min(end, begin + step.seconds)
            if process.poll() is None and not late:
                continue
            if late and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                yield step, now - begin, "ended, too slow"
            else:
                yield step, now - begin, str(process.returncode)
            running.remove(one)
        time.sleep(0.05)


def work(steps: list[Step], out: Path, seconds: float, say: Callable[[str], None]) -> bool:
    """All steps, as long as there is time; whether every one ended well."""
    begin = time.monotonic()
    reserve, well = RESERVE * any(step.last for step in steps), True
    for some in groups(steps):
        now = time.monotonic()
        end = begin + seconds - (0 if some[0].last else reserve)
        if now > end - 5:
            say(f"not run: {'; '.join(' '.join(step.words) for step in some)}")
            well = False
            continue
        started = [(step, start(step.call(out), out / "log.txt", len(some))) for step in some]
        for step, took, said in ended(started, end):
            name = " ".join(step.words)
            say(f"{now - begin:6.1f} s  {took:5.1f} s  {'& ' * step.beside}{name[:110]}: {said}")
            well &= said == "0"
    return well


def main(given: list[str] | None = None) -> bool:
    """All steps of a plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", help="first, second, third, or a file")
    parser.add_argument("--data", type=Path, default=Path("."))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, on a CPU")
    options = parser.parse_args(given)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.tiny:
        os.environ["FEDALLOY_TINY"] = "1"

    def say(line: str) -> None:
        print(line, flush=True)
        with (options.out / "steps.txt").open("a") as file:
            file.write(line + "\n")

    with tempfile.TemporaryDirectory() as keep:
        folders = {"OUT/": options.out.resolve(), "KEEP/": Path(keep), "DATA/": options.data.resolve()}
        text = PLANS[options.plan] if options.plan in PLANS else Path(options.plan).read_text()
        return work(steps_of(text, folders), options.out, 60 * options.minutes, say)


if __name__ == "__main__":
    sys.exit(not main())

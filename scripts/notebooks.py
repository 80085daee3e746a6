"""Execute the notebooks of ``examples/notebooks`` and keep their outputs true.

``python scripts/notebooks.py [NAME ...]`` executes them and writes new outputs where they have changed;
``--check`` writes nothing and fails if a committed output is not what comes out. Times, addresses and temporary folders
are masked, and pictures are compared by their pixels. Each notebook runs in an empty folder, with one thread, without
the user's caches and settings of Jupyter.

Trained numbers differ in their last digits between processors and versions of libraries, and what is printed may
follow. A notebook therefore remembers what it was made with, data that had to be fetched included. Where that
differs, only the kinds of outputs are compared, and this is said.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import difflib
import hashlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
FOLDER = ROOT / "examples" / "notebooks"
FAST = ("your-arrays", "your-weighting")
"""Those that run with the tests."""
MOST_SECONDS = 300
SEEN = ("torch", "numpy", "pandas", "matplotlib", "scikit-learn", "transformers", "peft")
_CHATTER = ("IProgress not found", "`is_gradient_checkpointing` is deprecated")
"""Warnings of libraries about each other, which are no part of a notebook."""
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
_MASKS = (
    (re.compile(r"[\d.]+ rounds/s"), "# rounds/s"),
    (re.compile(r"\b\d+(\.\d+)? ?(s|ms|seconds|minutes)\b"), "# s"),
    (re.compile(r"0x[0-9a-f]{6,}"), "0x#"),
    (re.compile(r"(/private)?(/var|/tmp)/[\w./-]*fedalloy-notebook-\w+"), "#"),
)


def main(words: Sequence[str] | None = None) -> int:
    """Execute the named notebooks, or all; 1 if an output is not the committed one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"{', '.join(names())} (default: all)")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="so many at the same time (default 1)")
    wanted = parser.parse_args(words)
    if strange := set(wanted.names) - set(names()):
        parser.error(f"no notebook {', '.join(sorted(strange))}: there are {', '.join(names())}")
    with ThreadPoolExecutor(wanted.jobs) as pool:
        return max(pool.map(lambda name: _one(name, wanted.check), wanted.names or names()))


def names() -> list[str]:
    """The names of all notebooks."""
    return sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> Any:
    """A notebook as it is committed."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def _one(name: str, check: bool) -> int:
    from nbclient.exceptions import CellExecutionError

    began, committed = perf_counter(), read(name)
    try:
        done = execute(committed)
    except CellExecutionError as error:
        print(f"{name}: {error.ename}: {error.evalue}\n{_COLOURS.sub('', error.traceback)}", flush=True)
        return 1
    found = differences(committed, done)
    told = "as committed" if not found else "differs" if check else "written"
    if not found and (other := made_elsewhere(committed)):
        told = f"runs; numbers not compared, as {other}"
    print(f"{name}: {told}, {perf_counter() - began:.0f} s", flush=True)
    if found and check:
        print("\n".join(found), flush=True)
    elif not check and (found or told != "as committed"):
        nbformat.write(done, FOLDER / f"{name}.ipynb")
    return int(bool(found) and check)


def execute(notebook: Any) -> Any:
    """A copy of a notebook with the outputs of now; an error in a cell is raised."""
    from nbclient import NotebookClient
    from traitlets.config import Config

    made = bare(notebook)
    with tempfile.TemporaryDirectory(prefix="fedalloy-notebook-") as scratch:
        work = Path(scratch) / "work"
        work.mkdir()
        place = {"metadata": {"path": str(work)}}
        # A socket in the folder: nobody else on this machine can talk to the kernel.
        sockets = {} if os.name == "nt" else {"transport": "ipc", "ip": str(Path(scratch) / "kernel")}
        # What a cell prints is one output, however fast it comes.
        client = NotebookClient(
            made, config=Config(KernelManager=sockets), kernel_name="python3", timeout=MOST_SECONDS, resources=place,
            coalesce_streams=True,
        )  # fmt: skip
        asyncio.run(client.async_execute(env=_environment(Path(scratch))))
    for cell in made.cells:
        cell.metadata.pop("execution", None)  # when each cell was run
    made.metadata["fedalloy"] = made_with(made)
    return made


def bare(notebook: Any) -> Any:
    """A copy without outputs and without what editors leave in it."""
    made = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    for number, cell in enumerate(notebook.cells):
        new: Any = nbformat.v4.new_code_cell if cell.cell_type == "code" else nbformat.v4.new_markdown_cell
        made.cells.append(new(cell.source.strip(), id=f"cell-{number}"))
    made.metadata["language_info"] = {"name": "python"}
    return made


def _environment(scratch: Path) -> dict[str, str]:
    own = {"IPYTHONDIR": "ipython", "JUPYTER_CONFIG_DIR": "jupyter", "XDG_CACHE_HOME": "cache"}
    return {
        **os.environ, **{name: str(scratch / place) for name, place in own.items()},
        "FEDALLOY_DATA": str(data_folder()), "PYTHONPATH": str(ROOT / "src"), "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": ",".join(f"ignore:{said}" for said in _CHATTER),
    }  # fmt: skip


def data_folder() -> Path:
    """Where fetched data are, before the caches are hidden from a notebook."""
    from fedalloy.tasks.locate import folders

    return folders()[0].absolute()


def differences(committed: Any, done: Any) -> list[str]:
    """What differs between the outputs of two notebooks, as lines for a reader; empty if they are alike."""
    kinds = bool(made_elsewhere(committed))
    found: list[str] = []
    for number, (old, new) in enumerate(zip(committed.cells, done.cells, strict=True)):
        if new.cell_type == "code":
            before, after = (_kinds(cell) if kinds else list(_lines(cell)) for cell in (old, new))
            found += difflib.unified_diff(before, after, f"cell {number}, committed", "now", lineterm="", n=0)
            found += [] if kinds or before != after else _changed_pictures(number, old, new)
    return found


def _kinds(cell: Any) -> list[str]:
    return [f"{one.output_type} {sorted(one.get('data', {}))}" for one in cell.outputs]


def _lines(cell: Any) -> Iterator[str]:
    """The outputs of a cell as text, with everything masked that a clock or a machine decides."""
    for one in cell.outputs:
        yield one.output_type
        texts = {"stream": one.get("text", "")} if one.output_type == "stream" else one.get("data", {})
        for kind, text in sorted(texts.items()):
            yield kind
            yield from [] if kind.startswith("image/") else masked(text).splitlines()


def masked(text: str) -> str:
    """A text without what differs from one time to the next."""
    for pattern, instead in _MASKS:
        text = pattern.sub(instead, text)
    return text


def _changed_pictures(number: int, old: Any, new: Any) -> list[str]:
    pairs = zip(pictures(old), pictures(new), strict=True)
    return [f"cell {number}: picture {place} differs" for place, pair in enumerate(pairs) if not alike(*pair)]


def pictures(cell: Any) -> list[bytes]:
    """The PNG files among the outputs of a cell."""
    found = [one.data["image/png"] for one in cell.outputs if "image/png" in one.get("data", {})]
    return [base64.b64decode(one) for one in found]


def alike(one: bytes, other: bytes) -> bool:
    """Whether two PNG files show the same: one size, and colours that differ by less than 1 of 255 on average."""
    import numpy as np
    from PIL import Image

    first, second = (np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.float64) for data in (one, other))
    return first.shape == second.shape and float(np.abs(first - second).mean()) < 1.0


def made_with(notebook: Any) -> dict[str, str]:
    """What printed numbers depend on: versions of libraries, how this machine computes, to the last bit, and files that
    the notebook asks for."""
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    files = {name: "here" if _fetched(name) else "absent" for name in re.findall(r'look\("([\w.]+)"\)', code)}
    return {**{name: version(name).partition("+")[0] for name in SEEN}, "arithmetic": _arithmetic(), **files}


def _fetched(name: str) -> Path | None:
    from fedalloy.tasks.locate import look

    return look(name)


def made_elsewhere(notebook: Any) -> str:
    """Why the numbers of a notebook cannot be expected here; empty if they can."""
    was, now = notebook.metadata.get("fedalloy", {}), made_with(notebook)
    other = [f"{name} was {was.get(name, 'unknown')} and is {now[name]}" for name in now if was.get(name) != now[name]]
    return "; ".join(other)


def _arithmetic() -> str:
    """A mark of the bits that products, sums and functions give on this processor."""
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(1)
    x = torch.arange(32 * 96, dtype=torch.float32).reshape(32, 96).sin()
    y = F.gelu(x @ x.T).softmax(1) @ x
    z = F.conv2d(x.reshape(1, 3, 32, 32), x[:27].reshape(96, 3, 3, 3)[:8]).exp().sum((2, 3))
    return hashlib.sha256(y.numpy().tobytes() + z.numpy().tobytes()).hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())

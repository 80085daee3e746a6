"""Pages of the site for the notebooks, made when it is built (a hook of mkdocs): their text, code and outputs."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import notebooks


def on_files(files: Files, config: Any) -> Files:
    """Add one page per notebook, and its pictures beside it."""
    for name in notebooks.names():
        pictures: dict[str, bytes] = {}
        text = "\n\n".join(_parts(name, notebooks.read(name), pictures)) + "\n"
        files.append(File.generated(config, f"notebooks/{name}.md", content=text))
        for place, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{place}", content=content))
    return files


def _parts(name: str, notebook: Any, pictures: dict[str, bytes]) -> Iterator[str]:
    """The cells as Markdown; pictures are put aside under their names."""
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            title, _, rest = cell.source.partition("\n")
            yield cell.source if number else f"{title}\n\nThe notebook: `examples/notebooks/{name}.ipynb`.\n{rest}"
            continue
        yield f"```python\n{cell.source}\n```"
        for one in cell.outputs:
            yield from _output(f"{name}-{len(pictures)}.png", one, pictures)


def _output(place: str, output: Any, pictures: dict[str, bytes]) -> Iterator[str]:
    """The richest form of an output, as a notebook shows it."""
    data = output.get("data", {})
    if "image/png" in data:
        pictures[place] = base64.b64decode(data["image/png"])
        yield f"![A picture that the cell above draws]({place})"
    elif "text/html" in data:
        yield f"<div>{data['text/html']}</div>"
    else:
        text = data.get("text/plain") or output.get("text", "")
        yield f"```text\n{text.rstrip()}\n```"

"""Shown output against what came out.

Times, dates, speeds, process numbers, ports and the page's folder are masked on both sides, and runs of blanks count as
one. A line ``...`` stands for any number of lines, ``...`` within a line for any text.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

_MASKS = (
    (r"\x1b\[[0-9;]*m", ""),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?Z?", "DATE"),
    (r"\b\d+(\.\d+)? rounds/s", "SPEED"),
    (r"\b\d+(\.\d+)? ?(ms|s|min|h|seconds|minutes|hours)\b", "TIME"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r"\bprocess \d+", "process NUMBER"),
    (r"-{3,}", "---"),
    (r"[ \t]+", " "),
)


def masked(text: str, folder: Path | None = None) -> list[str]:
    """The lines of an output without what differs from run to run.

    >>> masked("took  3.2 s in /tmp/a/runs \\n", Path("/tmp/a"))
    ['took TIME in runs']
    """
    if folder:
        text = text.replace(f"{folder}/", "").replace(str(folder), ".")
    for pattern, word in _MASKS:
        text = re.sub(pattern, word, text)
    return [line.strip() for line in text.strip().splitlines()]


def difference(shown: str, printed: str, folder: Path | None = None) -> str:
    """How the two differ, empty where they do not.

    >>> difference("first\\n...\\nmean 0.9... of 1", "first\\n2\\n3\\nmean 0.95 of 1\\n")
    ''
    >>> print(difference("0.90", "0.91"))
    - 0.90
    + 0.91
    """
    wanted, found = masked(shown), masked(printed, folder)
    pattern = "\n".join(r"(?s:.*)" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") for line in wanted)
    if re.fullmatch(pattern, "\n".join(found)):
        return ""
    return "\n".join(line for line in difflib.ndiff(wanted, found) if line[0] in "+-")

"""Sentiment140: from Stanford's table of tweets, the hub's copy or LEAF's json files to tweets by user.

Names of users, dates and queries are left behind; a mention of anybody becomes ``@user``.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedalloy.core.errors import DataError
from fedalloy.tasks.datasets.sent140 import TEST, WHOLE
from fedalloy.tasks.unpacking import Originals, base_name, is_for_testing

_LEAST = 30
"""Users with fewer tweets are left out, as in LEAF's set of this name."""
_MENTION = re.compile(r"@\w+")
_LABELS = {"0": 0, "4": 1}
_FIELDS = ("polarity", "id", "date", "query", "user", "text")
_LEAF_TEXT = 4
"""The place of the text in what LEAF keeps of a tweet: everything but its polarity."""
Tweet = tuple[str, int, str]
"""User, label, text."""


def convert_sent140(originals: Originals) -> dict[str, bytes]:
    """The tweets of users with at least 30, and the tenth of them that recipes use."""
    leaf = sorted(path for path in originals.files.values() if path.suffix == ".json")
    if leaf:
        return _from_leaf(originals, leaf)
    many = {user for user, count in Counter(user for user, _, _ in _tweets(originals)).items() if count >= _LEAST}
    if not many:
        raise DataError(f"sent140: no user has {_LEAST} tweets; give the whole archive of Stanford")
    tweets = sorted((one for one in _tweets(originals) if one[0] in many), key=lambda one: one[0])
    return {WHOLE: _packed(tweets), TEST: _packed(_every_tenth(tweets))}


def _tweets(originals: Originals) -> Iterator[Tweet]:
    """Every tweet that is positive or negative, from the hub's table or from the one in the archive."""
    parquet = originals.one(".parquet")
    if parquet is not None:
        found = originals.table(parquet, ("sentiment", "user", "text"))
        rows: Iterable[Any] = zip(map(str, found["sentiment"]), found["user"], found["text"], strict=True)
    else:
        path = next(iter(originals.files.values()))
        lines = originals.lines(path, lambda name: base_name(name).startswith("training"), "latin-1")
        rows = ((row[0], row[4], row[5]) for row in map(_checked, csv.reader(lines)))
    return ((user, _LABELS[label], text) for label, user, text in rows if label in _LABELS)


def _checked(row: list[str]) -> list[str]:
    if len(row) != len(_FIELDS):
        raise DataError(f"sent140: a line has {len(row)} values; a tweet has {', '.join(_FIELDS)}")
    return row


def _from_leaf(originals: Originals, paths: Sequence[Path]) -> dict[str, bytes]:
    """LEAF's files: all tweets, and those of files with ``test`` in their name."""
    whole: list[Tweet] = []
    test: list[Tweet] = []
    for path in paths:
        found = json.loads(originals.content(path))
        for user in found["users"]:
            mine = found["user_data"][user]
            some = [(str(user), int(y), str(x[_LEAF_TEXT])) for x, y in zip(mine["x"], mine["y"], strict=True)]
            whole += some
            test += some if is_for_testing(path) else []
    numbers = _numbers(whole)
    made = {TEST: _packed(sorted(test, key=lambda one: one[0]), numbers)} if test else {}
    if len(test) < len(whole):
        made[WHOLE] = _packed(sorted(whole, key=lambda one: one[0]), numbers)
    return made if test else {**made, TEST: _packed(_every_tenth(sorted(whole, key=lambda one: one[0])), numbers)}


def _every_tenth(tweets: Sequence[Tweet]) -> list[Tweet]:
    """The last of every ten tweets of a user."""
    seen: Counter[str] = Counter()
    kept = []
    for one in tweets:
        seen[one[0]] += 1
        if seen[one[0]] % 10 == 0:
            kept.append(one)
    return kept


def _numbers(tweets: Sequence[Tweet]) -> dict[str, int]:
    return {user: number for number, user in enumerate(sorted({user for user, _, _ in tweets}))}


def _packed(tweets: Sequence[Tweet], numbers: Mapping[str, int] | None = None) -> bytes:
    """Tweets as the loader reads them: users are numbers, in the order of their names."""
    numbers = numbers or _numbers(tweets)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("client", "label", "text"))
    writer.writerows((numbers[user], label, _MENTION.sub("@user", words)) for user, label, words in tweets)
    return gzip.compress(text.getvalue().encode("utf-8"), mtime=0)

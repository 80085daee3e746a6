"""Sentiment140 (LEAF): tweets of many users, positive or negative."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.datasets.base import Dataset, DatasetDefaults, DatasetLoader
from fedalloy.tasks.datasets.reading import read_csv
from fedalloy.tasks.datasets.words import tokens

TEST = "sent140_k30_test.csv.gz"
WHOLE = "sent140_k30.csv.gz"


@register("dataset", "sent140")
@dataclass(frozen=True)
class Sent140(DatasetLoader):
    """Whether a tweet is positive: the users with at least ``min_tweets`` tweets as clients, one logit.

    An example is ``length`` token numbers, padded with 0. A word's number is a hash of its letters in
    ``1 .. vocabulary - 1``; this replaces the pretrained GloVe vectors of the published experiments, which are not
    included. These are 16025 tweets of 2875 users, the held-out tenth of the LEAF set with at least 30 tweets per
    user, and every client gets its own split of them. Users have few tweets (3 to 55), often of one class
    only, so they are scored by accuracy and not by AUROC. ``fedalloy data fetch sent140`` makes another tenth of the
    same users, and a file with all their tweets, which ``whole`` reads.
    """

    min_tweets: int = 10
    length: int = 25
    vocabulary: int = 4096
    whole: bool = False

    summary: ClassVar[str] = "16025 tweets of 2875 users as hashed words, 2 classes; 218 users with 10 tweets or more"
    files: ClassVar[dict[str, str]] = {TEST: "8c57491b1401c6ec25aae7c7076cd3a8a903c244980dfeb57eee8897283b0c61"}
    hint: ClassVar[str] = (
        "get it with 'fedalloy data fetch sent140' (another tenth of the tweets), or give that command LEAF's files, "
        "--from FILE, or make it from the test part of LEAF's sent140 (non-iid, users with at least 30 tweets): a "
        "gzipped csv with the columns client (users numbered in the order of their sorted names), label (0 or 1), text "
        "(mentions as @user)"
    )
    defaults: ClassVar[DatasetDefaults] = DatasetDefaults(model="sent140_lstm", loss="binary")

    def __post_init__(self) -> None:
        if self.min_tweets < 1 or self.length < 1 or self.vocabulary < 2:
            raise SpecError(
                f"sent140: min_tweets {self.min_tweets}, length {self.length} and vocabulary {self.vocabulary}: "
                "allowed are 1 or more, 1 or more and 2 or more"
            )

    def load(self, key: Key) -> Dataset:
        """The tweets in the order of the file, less those of rare users; nothing is drawn."""
        rows = read_csv(WHOLE if self.whole else TEST, ("client", "label", "text"), self.hint)
        tweets = Counter(int(row["client"]) for row in rows)
        users = sorted(user for user, count in tweets.items() if count >= self.min_tweets)
        if not users:
            raise DataError(f"sent140: no user has {self.min_tweets} tweets; at most {max(tweets.values())}")
        number = {user: place for place, user in enumerate(users)}
        rows = [row for row in rows if int(row["client"]) in number]
        x = torch.tensor([tokens(row["text"], self.length, self.vocabulary) for row in rows])
        y = torch.tensor([int(row["label"]) for row in rows])
        owner = torch.tensor([number[int(row["client"])] for row in rows])
        return Dataset(x, y, 2, owner, names=tuple(f"user {user}" for user in users))

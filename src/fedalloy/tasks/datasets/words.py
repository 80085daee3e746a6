"""Words as numbers: a hash of their letters, so that no vocabulary is learned from the text."""

from __future__ import annotations

import hashlib
import re

PADDING = 0
_WORD = re.compile(r"[a-z0-9']+")


def tokens(text: str, length: int, vocabulary: int) -> list[int]:
    """The first ``length`` words of a text as numbers, padded with ``PADDING``.

    >>> tokens("Fever, again?", 3, 4096) == [token("fever", 4096), token("again", 4096), PADDING]
    True
    """
    words = _WORD.findall(text.lower())[:length]
    return [token(word, vocabulary) for word in words] + [PADDING] * (length - len(words))


def token(word: str, vocabulary: int) -> int:
    """A number in ``1 .. vocabulary - 1`` that depends on the letters alone: the same on every machine.

    >>> token("fever", 4096) == token("fever", 4096) != token("cough", 4096)
    True
    """
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "big") % (vocabulary - 1)

"""Prompt texts of a wanted length, made without the target's tokenizer.

A text is a row of common words drawn at random from a seed. The same seed gives the same text; two seeds give
texts that differ from the first word on (they begin with the same k words once in 1024**k pairs), so no server
finds a prefix in its cache that the workload did not put there. What a workload shares on purpose is drawn from
the shared key instead, and is the same to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.random import PCG64, Generator

from headrace.bench.requests.words import MAX_WORD_CHARS, WORDS

_ROW_BYTES: Final = MAX_WORD_CHARS + 1
_ROWS: Final = np.array([f" {word}".encode() for word in WORDS], dtype=f"S{_ROW_BYTES}")
"""Each word with the space before it, filled with zero bytes: rows are gathered at once, the zeros fall out."""

_OWN, _SHARED, _BLOCK = range(3)
"""What a text is drawn for: the same number means different texts in each."""


class PromptTexts:
    """Words by seed.

    ``salt`` changes every text and no length: with another salt the same schedule finds nothing of its earlier
    run in the target's prefix cache.
    """

    def __init__(self, salt: int = 0) -> None:
        if salt < 0:
            raise ValueError(f"salt must not be negative: {salt}")
        self._salt = salt

    def own(self, text_seed: int, words: int) -> str:
        """The part of a prompt that is its request's own."""
        return _text(self._words(_OWN, text_seed, words))

    def shared(self, key: str, words: int) -> str:
        """What every prompt with this ``key`` begins with; a shorter one begins like a longer one."""
        digest = blake2b(key.encode(), digest_size=8).digest()
        return _text(self._words(_SHARED, int.from_bytes(digest), words))

    def blocks(self, hash_ids: Sequence[int], block_words: int, text_seed: int, words: int) -> str:
        """A prompt of ``words`` words in blocks of ``block_words``, each drawn from its id.

        Two prompts whose id lists begin alike begin with the same text, for as many whole blocks as the ids
        agree. What goes beyond the blocks is the request's own.
        """
        used = hash_ids[: -(-words // block_words)]
        pieces = [self._words(_BLOCK, hash_id, block_words) for hash_id in used]
        missing = words - block_words * len(used)
        if missing > 0:
            pieces.append(self._words(_OWN, text_seed, missing))
        return _text(np.concatenate(pieces)[:words])

    def _words(self, purpose: int, seed: int, words: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
        random = Generator(PCG64((self._salt, purpose, seed)))
        return random.integers(0, len(WORDS), max(words, 0), dtype=np.uint16)


def _text(chosen: np.ndarray[tuple[int], np.dtype[np.uint16]]) -> str:
    return _ROWS[chosen].tobytes().translate(None, b"\0").decode("ascii")[1:]

"""What one forward pass computes, as far as its time depends on it."""

from __future__ import annotations

import math

from msgspec import Struct

from headrace.scheduling.cost import prefill_pairs


class Chunk(Struct, frozen=True):
    """``tokens`` tokens of a prompt after ``done`` that were computed before. ``ends``: the prompt's last, so that a
    token is sampled."""

    done: int
    tokens: int
    ends: bool = True

    @property
    def pairs(self) -> int:
        """(token, earlier token or itself), summed."""
        return prefill_pairs(self.done, self.tokens)


class Work(Struct, frozen=True):
    """``decodes`` sequences get a token each and read ``context_tokens`` tokens of KV together; ``chunks`` of prompts
    are computed beside them."""

    decodes: int = 0
    context_tokens: int = 0
    chunks: tuple[Chunk, ...] = ()

    @property
    def rows(self) -> int:
        """Tokens that go through the matrices."""
        return self.decodes + self.prompt_tokens

    @property
    def sequences(self) -> int:
        """Sequences that take part."""
        return self.decodes + len(self.chunks)

    @property
    def sampled(self) -> int:
        """Rows that go through the vocabulary's matrix."""
        return self.decodes + sum([chunk.ends for chunk in self.chunks])

    @property
    def prompt_tokens(self) -> int:
        """Of the chunks."""
        return sum([chunk.tokens for chunk in self.chunks])

    @classmethod
    def of_call(cls, rows: int, context_tokens: int = 0, pairs: int = 0) -> Work:
        """The pass of which only these sums are known (``scheduling.cost.Call``).

        Exact for decodes alone and for one chunk alone. Where both share a pass, the sums do not say how many rows
        are whose; then one chunk from a prompt's beginning is assumed, as long as its pairs allow. The matrices see
        the same rows either way.
        """
        if rows <= 0:
            return cls()
        if not pairs:
            return cls(rows, context_tokens)
        if not context_tokens:
            return cls(chunks=(Chunk(max(0, round((pairs - prefill_pairs(0, rows)) / rows)), rows),))
        tokens = min(rows - 1, max(1, (math.isqrt(8 * pairs + 1) - 1) // 2))
        if not tokens:
            return cls(rows, context_tokens + pairs)
        done = max(0, round((pairs - prefill_pairs(0, tokens)) / tokens))
        return cls(rows - tokens, context_tokens, (Chunk(done, tokens),))
